"""Sharded objects, which are non-tensor values called ``KEY/shard_3_32``.

After the slash are the offset of an object in the grid of its key and the global shape of that
grid. Objects are named like tensors (:mod:`ckptctl.formats.mcore.spelling`). A stacked layer is an
index in the first dimension of the grid, and an expert is an index in the last dimension.
Source: ``ShardedObject`` in ``megatron/core/dist_checkpointing/mapping.py``.

Megatron-Core requires ``_extra_state`` objects when it loads. Each Transformer Engine module has
one, for FP8 scales. Megatron-Core's own linear layers have one that is None. If one is missing,
loading fails with ``Missing key in checkpoint state_dict``. Additional objects are ignored, unless
``strict`` is ``raise_all``. Therefore, all objects that a model of Transformer Engine or of the
local specification requires are written, in the form for models without FP8: the list ``[None]``,
which all versions of Transformer Engine read as "no scales". Sources:
``megatron/core/transformer/utils.py`` (``make_sharded_object_for_checkpoint``),
``dist_checkpointing/strategies/torch.py`` (``mcore_to_pyt_state_dict``).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from operator import lt

from ckptctl.catalog import Blob
from ckptctl.formats.base import OutputTensor
from ckptctl.formats.mcore.layers import LayerStorage
from ckptctl.formats.mcore.spelling import TensorNameParts, parse_tensor_name
from ckptctl.planner.mapping.adapters import is_factor
from ckptctl.units import pluralize

_NUMBERS = r"[0-9]{1,6}(?:\.[0-9]{1,6})*"
_OBJECT = re.compile(rf"(.+)/shard_({_NUMBERS})_({_NUMBERS})")
EXTRA_STATE = "_extra_state"
EMPTY_EXTRA_STATE: list[object] = [None]
ATTENTION = "self_attention"
CORE = "core_attention"
HYBRID_NORM = "decoder.final_norm.weight"
"""The last norm of hybrid models. That of ``GPTModel`` has another name."""
_MODULES_WITHOUT_STATE = frozenset(
    {"mixer", "output_layer", "router", "self_attention", "shared_experts"}
)
_CONVOLUTIONS = frozenset({"conv1d", "in_proj"})
"""Parent modules of convolution weights, which have no extra state.

Routers, gates, convolutions and gated norms are not Transformer Engine modules, and fused parts are
not modules at all. ``GPTModel.sharded_state_dict`` removes the extra state of the output layer, and
``HybridModel`` (until 0.16 ``MambaModel``) does not.
"""
_EXPERTS = ".mlp.experts.experts."


def is_sharded_object(name: str) -> bool:
    """Return whether the leaf *name* is a sharded object."""
    return _OBJECT.fullmatch(name) is not None


def find_missing_objects(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the key of each incomplete grid in *names*, and a description of the missing objects.

    Megatron-Core requires full grids when it saves (``_validate_objects_for_key`` in
    ``dist_checkpointing/validation.py``).
    """
    offsets_by_grid: dict[tuple[str, str], set[tuple[int, ...]]] = {}
    for name in names:
        if match := _OBJECT.fullmatch(name):
            offset = tuple(map(int, match[2].split(".")))
            offsets_by_grid.setdefault((match[1], match[3]), set()).add(offset)
    for (key, grid_text), offsets in offsets_by_grid.items():
        grid = [int(number) for number in grid_text.split(".")]
        total = math.prod(grid)
        existing = {o for o in offsets if len(o) == len(grid) and all(map(lt, o, grid))}
        if len(existing) < total:
            first = next(o for o in map(partial(_unravel, grid), count()) if o not in existing)
            name = format_object_name(key, first, grid)
            number = f"{total - len(existing):,} of {pluralize(total, 'object')}"
            yield key, f"{number} of `{key}` are missing, such as `{name}`"


def _unravel(grid: Sequence[int], index: int) -> tuple[int, ...]:
    """Return the offset of the object at *index* in the row-major order of *grid*."""
    return tuple(index // math.prod(grid[n + 1 :]) % size for n, size in enumerate(grid))


def format_object_name(key: str, offset: Sequence[int], grid: Sequence[int]) -> str:
    """Return the name of the object at *offset* in a grid of shape *grid*.

    *offset* and *grid* are empty for a single object.
    """
    return f"{key}/shard_{_join_numbers(offset or [0])}_{_join_numbers(grid or [1])}"


def to_canonical_objects(blobs: Mapping[str, Blob]) -> dict[str, Blob]:
    """Rename the sharded objects in *blobs* to match the canonical tensor names."""
    parsed_names = {
        name: parse_tensor_name(match[1]) for name in blobs if (match := _OBJECT.fullmatch(name))
    }
    experts: Counter[tuple[str, str]] = Counter()
    for name_parts in parsed_names.values():
        if name_parts.expert is not None:
            experts[name_parts.tensor_kind] = max(
                experts[name_parts.tensor_kind], name_parts.expert + 1
            )
    names = {
        name: _to_canonical_name(name, name_parts, experts[name_parts.tensor_kind])
        for name, name_parts in parsed_names.items()
    }
    if len({names.get(name, name) for name in blobs}) < len(blobs):
        return dict(blobs)
    return {
        blob.name: blob for blob in (_rename_blob(b, names.get(n, n)) for n, b in blobs.items())
    }


def to_stored_object(blob: Blob, layers: LayerStorage) -> Blob:
    """Rename *blob* from its canonical name to its stored name, which differs in stacked layers."""
    match = _OBJECT.fullmatch(blob.name)
    stored, layer = layers.locate_leaf(match[1]) if match else (blob.name, None)
    if match is None or layer is None:
        return blob
    offset, grid = _parse_object_place(match)
    return _rename_blob(blob, format_object_name(stored, [layer, *offset], [layers.count, *grid]))


def _to_canonical_name(name: str, name_parts: TensorNameParts, experts: int) -> str:
    match = _OBJECT.fullmatch(name)
    if match is None or not (name_parts.is_stacked or name_parts.expert is not None):
        return (
            name
            if match is None
            else format_object_name(name_parts.format_canonical_name(), *_parse_object_place(match))
        )
    offset, grid = _parse_object_place(match)
    layer = None
    if name_parts.is_stacked:
        layer, offset, grid = int(match[2].partition(".")[0]), offset[1:], grid[1:]
    if name_parts.expert is not None:
        offset, grid = [*offset, name_parts.expert], [*grid, experts]
    return format_object_name(name_parts.format_canonical_name(layer), offset, grid)


def _parse_object_place(match: re.Match[str]) -> tuple[list[int], list[int]]:
    """Return the offset of an object and the shape of its grid. Both are empty for one object."""
    offset, grid = ([int(number) for number in match[group].split(".")] for group in (2, 3))
    return ([], []) if grid == [1] else (offset, grid)


def _rename_blob(blob: Blob, name: str) -> Blob:
    return blob if name == blob.name else replace(blob, name=name, path=(name,))


def _join_numbers(numbers: Sequence[int]) -> str:
    return ".".join(map(str, numbers))


def make_extra_states(tensors: Iterable[OutputTensor], layers: LayerStorage) -> Iterator[Blob]:
    """Yield the extra-state objects of the modules whose parameters are *tensors*.

    Args:
        tensors: Tensors of the model, with a separate tensor for every layer.
        layers: How the output stores the layers.
    """
    seen: set[str] = set()
    for tensor in tensors:
        for module in _iterate_modules(tensor.name):
            if module not in seen:
                seen.add(module)
                experts = tensor.shape[0] if _EXPERTS in module else 0
                yield from _make_extra_state_objects(module, experts, layers)


def _iterate_modules(name: str) -> Iterator[str]:
    """Yield the modules with extra state that the parameter *name* requires.

    These are the module of the parameter, the core attention next to it, and the output layer of
    hybrid models.
    """
    module = name.rpartition(".")[0]
    parts = module.split(".")
    convolution = parts[-1] in ("weight", "bias") and not _CONVOLUTIONS.isdisjoint(parts[-2:-1])
    gated_norm = parts[-2:] == ["mixer", "norm"]
    if (
        module
        and "embedding" not in parts
        and parts[-1] not in _MODULES_WITHOUT_STATE
        and not convolution
        and not gated_norm
    ):
        yield module
    if name == HYBRID_NORM:
        yield "output_layer"
    attention, separator, _ = name.partition(f".{ATTENTION}.linear_")
    if separator and not is_factor(name):  # gated delta nets do not have such layers
        yield f"{attention}.{ATTENTION}.{CORE}"


def _make_extra_state_objects(module: str, experts: int, layers: LayerStorage) -> Iterator[Blob]:
    """Yield the extra-state object of *module*, or one object for each of its *experts*."""
    stored, place = layers.locate_leaf(f"{module}.{EXTRA_STATE}")
    offset, total = ([place], [layers.count]) if place is not None else ([], [])
    for expert in range(experts) if experts else [None]:
        object_offset, grid = [*offset], [*total]
        if expert is not None:
            object_offset, grid = [*object_offset, expert], [*grid, experts]
        name = format_object_name(stored, object_offset, grid)
        yield Blob(name, (name,), value=EMPTY_EXTRA_STATE)
