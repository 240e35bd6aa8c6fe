"""Objects that ranks divide among them as they do tensors: ``KEY/shard_3_32``.

Behind the slash stands the place of one object among all of its key, and how many there are, both
by dimension. They are spelled as the tensors beside them are: a stack's layer is a place of the
first dimension, an expert one of the last (:mod:`ckptctl.formats.mcore.spelling`). Sources:
``ShardedObject`` in ``megatron/core/dist_checkpointing/mapping.py``.

Megatron-Core asks for some when it loads: ``_extra_state``. Each module of Transformer Engine has
one, for the scales of FP8; Megatron-Core's own linear layers have one that is None. A load that
misses one fails with ``Missing key in checkpoint state_dict``, whereas one that nobody asks for is
left alone, unless ``strict`` is ``raise_all``. So all that a model of Transformer Engine or of the
local specification asks for are written, each as Megatron-Core writes one of a model without FP8:
the list ``[None]``, which every version of Transformer Engine takes for "no scales". Sources:
``megatron/core/transformer/utils.py`` (``make_sharded_object_for_checkpoint``),
``dist_checkpointing/strategies/torch.py`` (``mcore_to_pyt_state_dict``).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from ckptctl.catalog import Blob
from ckptctl.formats.base import OutputTensor
from ckptctl.formats.mcore.layers import Layers
from ckptctl.formats.mcore.spelling import Spelling, spelling_of
from ckptctl.planner.mapping.adapters import is_factor

_NUMBERS = r"[0-9]{1,6}(?:\.[0-9]{1,6})*"
_OBJECT = re.compile(rf"(.+)/shard_({_NUMBERS})_({_NUMBERS})")
EXTRA_STATE = "_extra_state"
EMPTY: list[object] = [None]
ATTENTION = "self_attention"
CORE = "core_attention"
_WITHOUT = frozenset({"output_layer", "router", "self_attention", "shared_experts"})
_CONVOLUTIONS = frozenset({"conv1d", "in_proj"})
"""Modules whose parameters are theirs alone: lookups, gates and sinks are not Transformer Engine's.

Nor are convolutions; what is stored in parts is no module.

Of the output layer, ``GPTModel.sharded_state_dict`` takes it out.
"""
_EXPERTS = ".mlp.experts.experts."


def is_object(name: str) -> bool:
    """Return whether a leaf is one that ranks divide."""
    return _OBJECT.fullmatch(name) is not None


def object_name(key: str, at: Sequence[int], of: Sequence[int]) -> str:
    """Return the name of the object at the place *at* among *of*; empty: it is the only one."""
    return f"{key}/shard_{_joined(at or [0])}_{_joined(of or [1])}"


def canonical_objects(blobs: Mapping[str, Blob]) -> dict[str, Blob]:
    """Return *blobs* under the names that go with those of canonical tensors."""
    found = {name: spelling_of(match[1]) for name in blobs if (match := _OBJECT.fullmatch(name))}
    experts: Counter[tuple[str, str]] = Counter()
    for one in found.values():
        if one.expert is not None:
            experts[one.family] = max(experts[one.family], one.expert + 1)
    names = {name: _canonical(name, one, experts[one.family]) for name, one in found.items()}
    if len({names.get(name, name) for name in blobs}) < len(blobs):
        return dict(blobs)
    return {blob.name: blob for blob in (_called(b, names.get(n, n)) for n, b in blobs.items())}


def stored_object(blob: Blob, layers: Layers) -> Blob:
    """Return *blob*, whose name is canonical, as it is called where *layers* are stored."""
    match = _OBJECT.fullmatch(blob.name)
    stored, layer = layers.place(match[1]) if match else (blob.name, None)
    if match is None or layer is None:
        return blob
    at, of = _places(match)
    return _called(blob, object_name(stored, [layer, *at], [layers.count, *of]))


def _canonical(name: str, one: Spelling, experts: int) -> str:
    match = _OBJECT.fullmatch(name)
    if match is None or not (one.stacked or one.expert is not None):
        return name if match is None else object_name(one.name(), *_places(match))
    at, of = _places(match)
    layer = None
    if one.stacked:
        layer, at, of = int(match[2].partition(".")[0]), at[1:], of[1:]
    if one.expert is not None:
        at, of = [*at, one.expert], [*of, experts]
    return object_name(one.name(layer), at, of)


def _places(match: re.Match[str]) -> tuple[list[int], list[int]]:
    """Return the place of an object, and the number of all; empty where it is the only one."""
    at, of = ([int(number) for number in match[group].split(".")] for group in (2, 3))
    return ([], []) if of == [1] else (at, of)


def _called(blob: Blob, name: str) -> Blob:
    return blob if name == blob.name else replace(blob, name=name, path=(name,))


def _joined(numbers: Sequence[int]) -> str:
    return ".".join(map(str, numbers))


def extra_states(tensors: Iterable[OutputTensor], layers: Layers) -> Iterator[Blob]:
    """Yield the objects of the modules that *tensors* are parameters of.

    Args:
        tensors: The tensors of a model, by their names with each layer by itself.
        layers: How its layers are stored.
    """
    seen: set[str] = set()
    for tensor in tensors:
        for module in _modules(tensor.name):
            if module not in seen:
                seen.add(module)
                count = tensor.shape[0] if _EXPERTS in module else 0
                yield from _objects(module, count, layers)


def _modules(name: str) -> Iterator[str]:
    """Yield the modules that a parameter tells of: its own, and the attention around it."""
    own = name.rpartition(".")[0]
    parts = own.split(".")
    convolution = parts[-1] == "weight" and not _CONVOLUTIONS.isdisjoint(parts[-2:-1])
    if own and "embedding" not in parts and parts[-1] not in _WITHOUT and not convolution:
        yield own
    attention, found, _ = name.partition(f".{ATTENTION}.linear_")
    if found and not is_factor(name):  # gated delta nets have no such layers
        yield f"{attention}.{ATTENTION}.{CORE}"


def _objects(module: str, experts: int, layers: Layers) -> Iterator[Blob]:
    """Yield the object of a module, or that of each of its experts."""
    stored, place = layers.place(f"{module}.{EXTRA_STATE}")
    offset, total = ([place], [layers.count]) if place is not None else ([], [])
    for expert in range(experts) if experts else [None]:
        at, of = [*offset], [*total]
        if expert is not None:
            at, of = [*at, expert], [*of, experts]
        name = object_name(stored, at, of)
        yield Blob(name, (name,), value=EMPTY)
