"""Objects that ranks shard like tensors, called ``KEY/shard_3_32``.

After the slash are the offset of an object in the grid of its key and the global shape of that
grid. The naming follows that of tensors: the layer of a stack is an index of the first dimension,
an expert one of the last (:mod:`ckptctl.formats.mcore.spelling`). Sources: ``ShardedObject`` in
``megatron/core/dist_checkpointing/mapping.py``.

Megatron-Core requires ``_extra_state`` objects when it loads. Each Transformer Engine module has
one, for FP8 scales; Megatron-Core's own linear layers have one that is None. If one is missing,
loading fails with ``Missing key in checkpoint state_dict``. Additional objects are ignored, unless
``strict`` is ``raise_all``. Therefore, all objects that a model of Transformer Engine or of the
local specification requires are written, in the form for models without FP8: the list ``[None]``,
which all versions of Transformer Engine read as "no scales". Sources:
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
"""Modules without extra state.

Routers, gates and convolutions are not Transformer Engine modules, and fused parts are not modules
at all. ``GPTModel.sharded_state_dict`` removes the extra state of the output layer.
"""
_EXPERTS = ".mlp.experts.experts."


def is_object(name: str) -> bool:
    """Return whether a leaf is a sharded object."""
    return _OBJECT.fullmatch(name) is not None


def object_name(key: str, at: Sequence[int], of: Sequence[int]) -> str:
    """Return the name of the object at *at* in a grid of shape *of*, or of a single one."""
    return f"{key}/shard_{_joined(at or [0])}_{_joined(of or [1])}"


def canonical_objects(blobs: Mapping[str, Blob]) -> dict[str, Blob]:
    """Rename the objects in *blobs* to match canonical tensors."""
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
    """Rename *blob* from its canonical name to the one for the storage of *layers*."""
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
    """Return the offset of an object and the grid shape, both empty for a single object."""
    at, of = ([int(number) for number in match[group].split(".")] for group in (2, 3))
    return ([], []) if of == [1] else (at, of)


def _called(blob: Blob, name: str) -> Blob:
    return blob if name == blob.name else replace(blob, name=name, path=(name,))


def _joined(numbers: Sequence[int]) -> str:
    return ".".join(map(str, numbers))


def extra_states(tensors: Iterable[OutputTensor], layers: Layers) -> Iterator[Blob]:
    """Yield the extra-state objects of the modules whose parameters are *tensors*.

    Args:
        tensors: Tensors of a model with separate layers.
        layers: Storage of the layers.
    """
    seen: set[str] = set()
    for tensor in tensors:
        for module in _modules(tensor.name):
            if module not in seen:
                seen.add(module)
                count = tensor.shape[0] if _EXPERTS in module else 0
                yield from _objects(module, count, layers)


def _modules(name: str) -> Iterator[str]:
    """Yield the modules that a parameter implies, which are its own and the attention around it."""
    own = name.rpartition(".")[0]
    parts = own.split(".")
    convolution = parts[-1] == "weight" and not _CONVOLUTIONS.isdisjoint(parts[-2:-1])
    if own and "embedding" not in parts and parts[-1] not in _WITHOUT and not convolution:
        yield own
    attention, found, _ = name.partition(f".{ATTENTION}.linear_")
    if found and not is_factor(name):  # gated delta nets do not have such layers
        yield f"{attention}.{ATTENTION}.{CORE}"


def _objects(module: str, experts: int, layers: Layers) -> Iterator[Blob]:
    """Yield the extra-state object of a module, or of each of its experts."""
    stored, place = layers.place(f"{module}.{EXTRA_STATE}")
    offset, total = ([place], [layers.count]) if place is not None else ([], [])
    for expert in range(experts) if experts else [None]:
        at, of = [*offset], [*total]
        if expert is not None:
            at, of = [*at, expert], [*of, experts]
        name = object_name(stored, at, of)
        yield Blob(name, (name,), value=EMPTY)
