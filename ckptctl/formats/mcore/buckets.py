"""Map optimizer state that Megatron-Core saved by ranges of its buffers to parameters.

Megatron's distributed optimizer keeps the parameters of a model-parallel rank in flat buffers. The
sharding type ``dp_reshardable``, which is Megatron-LM's default since 0.17, saves these buffers::

    optimizer.distributed.dp_group_idx_G.gbuf_idx_B.dtype_(PARAMETER, GRADIENT).bucket_idx_N.STATE

A bucket contains the rank's parameters in the reverse order of their registration. Each parameter
starts at a multiple of 64 elements, and each pipeline stage and model chunk has its own buffer.
``STATE`` is ``param`` (the master weights), ``exp_avg``, ... The names and shapes of the parameters
are not saved. They are derived from the model's tensors and the order in which Megatron's modules
register them. Three facts must agree before a mapping is used:

* every start and end of a parameter is the edge of a saved chunk,
* the parameters fill all buckets of all ranks exactly,
* the first master weights of each kind of parameter, cast to the dtype of the model, equal the
  weights.

The result has the names of the sharding type ``fully_reshardable``, ``optimizer.state.STATE.NAME``.
Source: ``sharded_param_state_dp_reshardable`` and ``_compute_per_buffer_param_layout`` in
``megatron/core/optimizer/distrib_optimizer.py``, ``get_megatron_optimizer`` in its ``__init__.py``.
"""

from __future__ import annotations

import math
import re
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

from ckptctl.catalog import Blob, Box, Catalog, Extent, ItemPart, TensorEntry
from ckptctl.columns import BoxColumns, ExtentColumns, get_boxes
from ckptctl.dtypes import get_itemsize
from ckptctl.formats.dcp.locating import locate_elements
from ckptctl.formats.mcore.spelling import parse_tensor_name
from ckptctl.formats.shared.findings import UNUSABLE_ERRORS, FaultCollector
from ckptctl.formats.shared.stored_leaves import Leaves, extract_leaves
from ckptctl.storage.files import SourceFiles
from ckptctl.storage.schema import read_as
from ckptctl.storage.zips.zip_reader import TABLE_WITH_UNREAD_TENSORS, read_archive
from ckptctl.units import pluralize

DP_RESHARDABLE, FULLY_RESHARDABLE = "dp_reshardable", "fully_reshardable"
SHARDING_TYPE_KEYS = ("param_state_sharding_type", "distrib_optim_sharding_type")
_GROUP = r"(?:chained_(\d{1,3})\.)?optimizer\.distributed\.dp_group_idx_(\d{1,6})\."
_BUCKET = re.compile(
    _GROUP + r"gbuf_idx_(\d{1,4})\.dtype_\(torch\.(\w+), torch\.\w+\)\.bucket_idx_(\d{1,6})\.(\w+)"
)
_SETTINGS = re.compile(_GROUP + r"(\w+)/shard_0_1")
_STATE = re.compile(r"optimizer\.state\.")
BUCKET_SIZES = frozenset({"per_bucket_numel", "per_bucket_numel_unpadded"})
MASTER = "param"
ALIGNMENT = 64
"""Multiple of elements at which each parameter starts in a bucket."""
SAMPLE = 16
"""Number of master weights of a parameter that are compared with the model."""
_STATISTICS = frozenset({"expert_bias", "local_tokens_per_expert", "input_amax", "max_logits"})
"""Last components of saved tensors that are buffers instead of parameters."""
_MODULES = (
    *("enorm", "hnorm", "eh_proj"),  # of MTP layers, which contain a transformer layer
    "input_layernorm",
    "self_attention.core_attention",
    "self_attention.linear_proj",
    "self_attention.linear_qkv",
    *(f"self_attention.linear_{name}" for name in ("q_proj", "q_down_proj", "q_up_proj")),
    *(f"self_attention.linear_{name}" for name in ("kv_down_proj", "kv_up_proj")),
    *(f"self_attention.{name}_layernorm" for name in ("q", "k", "kv")),
    "pre_mlp_layernorm",
    "mlp.router",
    "mlp.experts.experts",
    "mlp.shared_experts",
    *(f"mlp.shared_experts.linear_fc{number}" for number in (1, 2)),
    *(f"mlp.linear_fc{number}" for number in (1, 2)),
    "final_layernorm",
)
"""Modules of a transformer layer in the order of their registration."""
_LEAVES = (
    *("softmax_offset", "gate_weight"),
    *("layer_norm_weight", "layer_norm_bias", "weight", "bias"),
)
_SEPARATE_NORMS = {
    "self_attention.linear_qkv": "input_layernorm",
    "self_attention.linear_q_up_proj": "self_attention.q_layernorm",
    "self_attention.linear_kv_up_proj": "self_attention.kv_layernorm",
    "mlp.linear_fc1": "pre_mlp_layernorm",
}
"""Modules of norms that the local specification saves under the names of fused norms."""
_EXPERTS = "mlp.experts.experts"
_EDGES = ("embedding.word_embeddings.weight", "embedding.position_embeddings.weight")
_AFTER_LAYERS = ("decoder.final_layernorm.weight", "decoder.final_layernorm.bias")
_OUTPUT = "output_layer.weight"
_STACKS = {"decoder.layers": 1, "mtp.layers": 3}


class UnknownOrderError(Exception):
    """Reason why the parameters in Megatron's buffers cannot be determined."""


class _Parameter(NamedTuple):
    """Parameter of one model-parallel rank, or of all ranks of a tensor-parallel group.

    Attributes:
        name: Canonical name of its tensor.
        boxes: Boxes of the tensor that the parameter of each tensor-parallel rank consists of. One
            entry if all ranks have the same values.
        expert: Number of the expert, or None.
    """

    name: str
    boxes: tuple[tuple[Box, ...], ...]
    expert: int | None = None

    @property
    def numel(self) -> int:
        return sum(math.prod(box.sizes) for box in self.boxes[0])


class _BucketPosition(NamedTuple):
    """Position of a bucket: optimizer, model-parallel rank, buffer, dtype and number."""

    chain: int
    group: int
    buffer: int
    dtype: str
    bucket: int


class _ParallelSizes(NamedTuple):
    """Numbers of ranks of a group of parameters."""

    tensor: int
    expert: int
    pipeline: int

    def find_group(self, tensor: int, expert: int, stage: int) -> int:
        """Return the number of a model-parallel rank, which is part of the names of its buckets."""
        return tensor + self.tensor * (expert + self.expert * stage)


def map_buckets(
    catalog: Catalog,
    files: SourceFiles,
    arguments: Mapping[str, object],
    faults: FaultCollector,
) -> tuple[Catalog, Leaves, str]:
    """Replace the buckets in *catalog* with the optimizer state of each parameter.

    Args:
        catalog: Catalog with canonical names.
        files: Files of the checkpoint.
        arguments: Arguments of the training run.
        faults: Collector of findings.

    Returns:
        The new catalog, the settings of the optimizer, and the file that stores them. The file name
        is empty if the catalog has no buckets, or if they cannot be mapped, which a note explains.
    """
    if not any(map(_BUCKET.fullmatch, catalog.tensors)):
        return catalog, Leaves(), ""
    try:
        buckets = _collect_buckets(catalog.tensors)
        if catalog.lost or catalog.findings:
            raise UnknownOrderError("parts of the checkpoint are unreadable")
        if other := next((name for name in catalog.tensors if _STATE.match(name)), None):
            raise UnknownOrderError(
                f"a layer-wise optimizer, such as Muon, saved another part by parameter (`{other}`)"
            )
        settings, file = _read_settings(catalog.blobs, files)
        states = _map_states(catalog, files, buckets, arguments)
    except UnknownOrderError as error:
        note = (
            f"the optimizer state is saved by ranges of buffers (`{DP_RESHARDABLE}`) and cannot be "
            f"mapped to parameters: {error}. Only Megatron-Core can load it"
        )
        return replace(catalog, notes=(*catalog.notes, note)), Leaves(), ""
    except UNUSABLE_ERRORS as error:
        faults.add_or_raise(error)
        return catalog, Leaves(), ""
    tensors = {name: e for name, e in catalog.tensors.items() if not _BUCKET.fullmatch(name)}
    blobs = {
        name: _state_reshardable(blob)
        for name, blob in catalog.blobs.items()
        if not _SETTINGS.fullmatch(name)
    }
    return replace(catalog, tensors={**tensors, **states}, blobs=blobs), settings, file


def _state_reshardable(blob: Blob) -> Blob:
    is_type = blob.path[-1:] and blob.path[-1] in SHARDING_TYPE_KEYS
    return replace(blob, value=FULLY_RESHARDABLE) if is_type and blob.file is None else blob


def _collect_buckets(
    tensors: Mapping[str, TensorEntry],
) -> dict[_BucketPosition, dict[str, TensorEntry]]:
    """Return the states of each bucket by name."""
    buckets: dict[_BucketPosition, dict[str, TensorEntry]] = {}
    for name, entry in tensors.items():
        if match := _BUCKET.fullmatch(name):
            _require_dimensions(entry, 1)
            chain, group, buffer, dtype, bucket, state = match.groups()
            position = _BucketPosition(int(chain or 0), int(group), int(buffer), dtype, int(bucket))
            buckets.setdefault(position, {})[state] = entry
    return buckets


def _read_settings(blobs: Mapping[str, Blob], files: SourceFiles) -> tuple[Leaves, str]:
    """Read the settings of the parameter groups, which must be equal on all ranks."""
    chained = any(name.startswith("chained_") for name in blobs if _SETTINGS.fullmatch(name))
    content: dict[object, object] = {}
    file = ""
    for name, blob in blobs.items():
        match = _SETTINGS.fullmatch(name)
        if match is None or match[3] in BUCKET_SIZES:
            continue
        archive = read_archive(
            files,
            blob.file or "",
            blob.offset,
            blob.nbytes,
            unknown="inert",
            table=TABLE_WITH_UNREAD_TENSORS,
        )
        value = read_as(tuple[object], archive.root)[0]
        target = content
        if chained:
            target = target.setdefault(int(match[1]), {})  # type: ignore[assignment]
        if match[3] in target and not _have_equal_values(target[match[3]], value):
            raise UnknownOrderError(f"ranks saved different settings in `{name}`")
        if match[3] not in target:
            target[match[3]] = value
            file = file or blob.file or ""
            if file != blob.file and match[3] != "optimizer":
                raise UnknownOrderError(f"`{name}` is in another file than the settings")
    return extract_leaves(content, file, ("optimizer",)), file


def _have_equal_values(first: object, second: object) -> bool:
    """Compare plain values. Tensors, such as loss scales, have no comparable values."""
    return repr(first) == repr(second)


def _map_states(
    catalog: Catalog,
    files: SourceFiles,
    buckets: Mapping[_BucketPosition, Mapping[str, TensorEntry]],
    arguments: Mapping[str, object],
) -> dict[str, TensorEntry]:
    """Try the known orders of parameters, and return the state of the only one that fits."""
    fitting_states: list[dict[str, TensorEntry]] = []
    problems: list[str] = []
    for separate_norms in (False, True):
        for grouped in (False, True):
            try:
                order = _Order(separate_norms, grouped)
                states = _place_parameters(catalog.tensors, buckets, arguments, order)
                _require_equal_weights(catalog, files, states)
            except UnknownOrderError as error:
                problems.append(str(error))
                continue
            if states not in fitting_states:
                fitting_states.append(states)
    if len(fitting_states) > 1:
        raise UnknownOrderError("several orders of the parameters fit")
    if not fitting_states:
        raise UnknownOrderError(problems[0])
    return fitting_states[0]


class _Order(NamedTuple):
    """Order in which the modules of a specification register parameters.

    Attributes:
        separate_norms: Whether norms are modules, although their saved names are those of norms
            that are fused with the next linear layer.
        grouped: Whether a module contains all experts, rather than each expert being a module.
    """

    separate_norms: bool
    grouped: bool

    def make_sort_key(self, parameter: _Parameter) -> tuple[int, ...]:
        """Return the position of *parameter* in the model."""
        name = parameter.name
        for section, edge_names in ((0, _EDGES), (2, _AFTER_LAYERS), (4, (_OUTPUT,))):
            if name in edge_names:
                return section, edge_names.index(name)
        parts = parse_tensor_name(name)
        if parts.stack not in _STACKS or parts.layer is None:
            raise UnknownOrderError(f"the position of `{name}` in the model is unknown")
        suffix = re.sub(r"^(?:transformer_layer|mtp_model_layer)\.", "", parts.suffix)
        module, _, leaf = suffix.rpartition(".")
        linear = ""
        if module.startswith(f"{_EXPERTS}."):
            module, linear = _EXPERTS, module.removeprefix(f"{_EXPERTS}.")
        if self.separate_norms and leaf.startswith("layer_norm_"):
            module = _SEPARATE_NORMS.get(module, module)
        if module not in _MODULES or leaf not in _LEAVES:
            raise UnknownOrderError(f"the position of `{name}` in the model is unknown")
        layer = _STACKS[parts.stack], parts.layer, _MODULES.index(module)
        place = int(linear == "linear_fc2"), _LEAVES.index(leaf)
        if parameter.expert is None:
            return *layer, *place
        if self.grouped:
            return *layer, *place, parameter.expert
        return *layer, parameter.expert, *place


def _list_parameters(
    tensors: Mapping[str, TensorEntry], ranks: int, expert_ranks: int
) -> Iterator[_Parameter]:
    for name, entry in tensors.items():
        if name.startswith(("optimizer.", "chained_")) or not entry.shape:
            continue
        if name.rpartition(".")[2] in _STATISTICS or not entry.dtype.startswith(("float", "bfl")):
            continue
        _require_dimensions(entry, len(entry.shape))
        boxes = sorted(get_boxes(entry.extents), key=lambda box: box.offsets)
        if f".{_EXPERTS}." not in name:
            yield _Parameter(name, _split_by_rank(name, boxes, ranks, 0))
            continue
        by_expert: dict[int, list[Box]] = {}
        for box in boxes:
            if box.sizes[0] != 1:
                raise UnknownOrderError(f"`{name}` has chunks with several experts")
            by_expert.setdefault(box.offsets[0], []).append(box)
        for expert, members in by_expert.items():
            yield _Parameter(name, _split_by_rank(name, members, expert_ranks, 1), expert)


def _split_by_rank(
    name: str, boxes: Sequence[Box], ranks: int, axis: int
) -> tuple[tuple[Box, ...], ...]:
    """Divide *boxes* among tensor-parallel ranks.

    Each rank has one box, or one box of each half of a gated layer along *axis*.
    """
    if len(boxes) == 1:
        return (tuple(boxes),)
    varied = {
        dimension
        for first, second in pairwise(boxes)
        for dimension, (a, b) in enumerate(zip(first.offsets, second.offsets, strict=True))
        if a != b
    }
    count, rest = divmod(len(boxes), ranks)
    if rest or count > 2 or len(varied) != 1 or (count == 2 and varied != {axis}):
        raise UnknownOrderError(f"the chunks of `{name}` are not those of {ranks} ranks")
    if len({box.sizes for box in boxes}) > 1:
        raise UnknownOrderError(f"the chunks of `{name}` have different sizes")
    return tuple(tuple(boxes[rank::ranks]) for rank in range(ranks))


def _require_dimensions(entry: TensorEntry, count: int) -> None:
    dimensions = {len(entry.shape), *(len(box.offsets) for box in get_boxes(entry.extents))}
    dimensions |= {len(box.sizes) for box in get_boxes(entry.extents)}
    if dimensions != {count} or not entry.extents:
        raise UnknownOrderError(f"the chunks of `{entry.name}` do not have its dimensions")


def _read_count(arguments: Mapping[str, object], name: str, default: int) -> int:
    value = arguments.get(name)
    return value if type(value) is int and 0 < value < 1 << 20 else default


def _place_parameters(
    tensors: Mapping[str, TensorEntry],
    buckets: Mapping[_BucketPosition, Mapping[str, TensorEntry]],
    arguments: Mapping[str, object],
    order: _Order,
) -> dict[str, TensorEntry]:
    """Return the state of all parameters, if *order* is the order of the parameters.

    Raises:
        UnknownOrderError: The parameters do not fill the buckets.
    """
    ranks = _read_count(arguments, "tensor_model_parallel_size", 1)
    expert_ranks = _read_count(arguments, "expert_tensor_parallel_size", ranks)
    experts = _read_count(arguments, "expert_model_parallel_size", 1)
    stages = _read_count(arguments, "pipeline_model_parallel_size", 1)
    if max(ranks, expert_ranks * experts) * stages > 1 + max(item.group for item in buckets):
        raise UnknownOrderError("buffers of some ranks are missing")
    parameters = sorted(_list_parameters(tensors, ranks, expert_ranks), key=order.make_sort_key)
    parameters.reverse()
    separate = experts > 1 or expert_ranks != ranks
    routed = [item for item in parameters if separate and item.expert is not None]
    dense = [item for item in parameters if not separate or item.expert is None]
    builder = _StateBuilder(tensors, buckets)
    builder.place(dense, 0, _ParallelSizes(ranks, 1, stages), 0)
    count = 1 + max((item.expert or 0 for item in routed), default=-1)
    for rank in range(experts if routed else 0):
        local = [item for item in routed if (item.expert or 0) * experts // count == rank]
        builder.place(local, 1, _ParallelSizes(expert_ranks, experts, stages), rank)
    return builder.build_entries()


@dataclass(slots=True)
class _StateBuilder:
    """Builder of the optimizer state of each parameter, from the buckets of all ranks."""

    tensors: Mapping[str, TensorEntry]
    buckets: Mapping[_BucketPosition, Mapping[str, TensorEntry]]
    used: set[_BucketPosition] = field(default_factory=set)
    extents: dict[tuple[str, str], list[Extent]] = field(default_factory=dict)
    dtypes: dict[tuple[str, str], str] = field(default_factory=dict)
    chunks: dict[tuple[_BucketPosition, str], _Chunks] = field(default_factory=dict)

    def place(
        self, parameters: Sequence[_Parameter], chain: int, sizes: _ParallelSizes, expert_rank: int
    ) -> None:
        """Place *parameters* into the buckets of the last stage first.

        Args:
            parameters: Parameters of all stages, in the reverse order of their registration, which
                is the order of the buckets.
            chain: Number of the optimizer.
            sizes: Numbers of ranks.
            expert_rank: Expert-parallel rank.
        """
        by_dtype: dict[str, list[_Parameter]] = {}
        for parameter in parameters:
            by_dtype.setdefault(self.tensors[parameter.name].dtype, []).append(parameter)
        for dtype, members in by_dtype.items():
            stages = {sizes.find_group(0, expert_rank, s): s for s in range(sizes.pipeline)}
            positions = [
                position
                for position in self.buckets
                if (position.chain, position.dtype) == (chain, dtype) and position.group in stages
            ]
            positions.sort(key=lambda p: (-p.buffer, -stages[p.group], p.bucket))
            remaining = iter(members)
            following = next(remaining, None)
            for position in positions:
                end, size = 0, _get_bucket_size(self.buckets[position])
                while following is not None:
                    start = -(-end // ALIGNMENT) * ALIGNMENT
                    if start + following.numel > size:
                        break
                    for rank in range(len(following.boxes)):
                        group = sizes.find_group(rank, expert_rank, stages[position.group])
                        self._add_state(position._replace(group=group), following, rank, start)
                    end = start + following.numel
                    following = next(remaining, None)
                if size not in (end, -(-end // ALIGNMENT) * ALIGNMENT):
                    raise UnknownOrderError(
                        f"bucket {position.bucket} of group {position.group} has "
                        f"{pluralize(size, 'element')} instead of {end:,}"
                    )
                self.used.update(
                    position._replace(
                        group=sizes.find_group(r, expert_rank, stages[position.group])
                    )
                    for r in range(sizes.tensor)
                )
            if following is not None:
                raise UnknownOrderError(f"the buckets have no room for `{following.name}`")

    def _add_state(
        self, position: _BucketPosition, parameter: _Parameter, rank: int, start: int
    ) -> None:
        """Add the extents of *parameter* on one tensor-parallel rank, which starts at *start*."""
        states = self.buckets.get(position)
        if states is None:
            raise UnknownOrderError(f"the buckets of group {position.group} are missing")
        for state, entry in states.items():
            key = state, parameter.name
            if self.dtypes.setdefault(key, entry.dtype) != entry.dtype:
                raise UnknownOrderError(f"`{state}` has different dtypes")
            extents = self.extents.setdefault(key, [])
            if (position, state) not in self.chunks:
                self.chunks[position, state] = _Chunks(entry)
            chunks = self.chunks[position, state]
            chunks.require_edges(start, start + parameter.numel, parameter.name)
            offset = start
            for box in parameter.boxes[rank]:
                numel = math.prod(box.sizes)
                extents += chunks.cut(offset, offset + numel, box)
                offset += numel

    def build_entries(self) -> dict[str, TensorEntry]:
        """Return the state tensors by name, if all buckets were used."""
        unused = next((item for item in self.buckets if item not in self.used), None)
        if unused is not None:
            raise UnknownOrderError(f"a buffer of group {unused.group} has no parameters")
        entries: dict[str, TensorEntry] = {}
        for (state, parameter), extents in self.extents.items():
            name = f"optimizer.state.{state}.{parameter}"
            columns = ExtentColumns(
                BoxColumns([e.box.offsets for e in extents], [e.box.sizes for e in extents]),
                [extent.file for extent in extents],
                [extent.offset for extent in extents],
                [extent.nbytes for extent in extents],
                extents[0].codec,
                [extent.part for extent in extents],
            )
            shape, dtype = self.tensors[parameter].shape, self.dtypes[state, parameter]
            entries[name] = TensorEntry(name, dtype, shape, columns, (name,))
        return entries


def _get_bucket_size(states: Mapping[str, TensorEntry]) -> int:
    shapes = {entry.shape for entry in states.values()}
    if len(shapes) != 1 or len(next(iter(shapes))) != 1:
        raise UnknownOrderError("the states of a bucket have different shapes")
    if MASTER not in states or any(entry.unsupported for entry in states.values()):
        raise UnknownOrderError("the master weights are missing or unreadable")
    return shapes.pop()[0]


class _Chunks:
    """Saved chunks of a bucket in the order of their elements."""

    __slots__ = ("_entry", "_extents", "_starts")

    def __init__(self, entry: TensorEntry) -> None:
        self._entry = entry
        self._extents = sorted(entry.extents, key=lambda extent: extent.box.offsets)
        self._starts = [extent.box.offsets[0] for extent in self._extents]

    def require_edges(self, start: int, end: int, parameter: str) -> None:
        """Raise if a chunk contains elements of *parameter* and of something else."""
        (size,) = self._entry.shape
        if not all(self._is_edge(element) or element == size for element in (start, end)):
            raise UnknownOrderError(
                f"elements {start:,} to {end:,} of `{self._entry.name}` are not those of "
                f"`{parameter}`"
            )

    def _is_edge(self, element: int) -> bool:
        index = bisect_left(self._starts, element)
        return self._starts[index : index + 1] == [element]

    def cut(self, start: int, end: int, box: Box) -> Iterator[Extent]:
        """Yield the extents of the elements from *start* to *end*, which fill *box*.

        Raises:
            UnknownOrderError: Elements are missing.
        """
        index, position = bisect_right(self._starts, start) - 1, start
        while position < end:
            chunk = self._extents[index] if index < len(self._extents) else None
            first = self._starts[index] if chunk else 0
            stop = min(first + chunk.box.sizes[0], end) if chunk else 0
            if chunk is None or not first <= position < stop:
                raise UnknownOrderError(f"`{self._entry.name}` has no element {position:,}")
            for flat, offsets, sizes in split_flat_range(box.sizes, position - start, stop - start):
                place = Box(tuple(map(sum, zip(box.offsets, offsets, strict=True))), sizes)
                yield _select_elements(chunk, self._entry.dtype, place, start + flat - first)
            position, index = stop, index + 1


def _select_elements(chunk: Extent, dtype: str, box: Box, first: int) -> Extent:
    """Return the extent of *box*, which consists of the elements of *chunk* from *first* on."""
    if chunk.codec == "torch":
        return replace(chunk, box=box, part=ItemPart(chunk.box.sizes, None, first))
    itemsize = get_itemsize(dtype)
    offset, nbytes = chunk.offset + first * itemsize, math.prod(box.sizes) * itemsize
    return replace(chunk, box=box, offset=offset, nbytes=nbytes)


def split_flat_range(
    sizes: tuple[int, ...], start: int, end: int
) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Yield the boxes that contain elements *start* to *end* of a row-major tensor of *sizes*.

    Each item is the position of the first element, the offsets and the sizes of a box.
    """
    if len(sizes) == 1:
        yield start, (start,), (end - start,)
        return
    inner = math.prod(sizes[1:])
    first, last = -(-start // inner), end // inner
    if first > last:  # within one row
        yield from _split_row(sizes, last, start, end)
        return
    if start < first * inner:
        yield from _split_row(sizes, first - 1, start, first * inner)
    if first < last:
        zeros = (0,) * (len(sizes) - 1)
        yield first * inner, (first, *zeros), (last - first, *sizes[1:])
    if last * inner < end:
        yield from _split_row(sizes, last, last * inner, end)


def _split_row(
    sizes: tuple[int, ...], row: int, start: int, end: int
) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    base = row * math.prod(sizes[1:])
    for flat, offsets, inner_sizes in split_flat_range(sizes[1:], start - base, end - base):
        yield base + flat, (row, *offsets), (1, *inner_sizes)


def _require_equal_weights(
    catalog: Catalog, files: SourceFiles, states: Mapping[str, TensorEntry]
) -> None:
    """Compare the first master weights of each kind of parameter with the weights.

    The first and the last layer of each kind are compared.

    Raises:
        UnknownOrderError: Weights differ, or the model has a dtype that cannot be compared.
    """
    prefix = f"optimizer.state.{MASTER}."
    names = [name.removeprefix(prefix) for name in states if name.startswith(prefix)]
    by_kind: dict[tuple[str, str], list[str]] = {}
    for name in names:
        by_kind.setdefault(parse_tensor_name(name).tensor_kind, []).append(name)
    chosen = dict.fromkeys(name for kind in by_kind.values() for name in (kind[0], kind[-1]))
    model = locate_elements(files, {name: catalog.tensors[name] for name in chosen})
    masters = locate_elements(files, {name: states[prefix + name] for name in chosen})
    for name in chosen:
        starts = {extent.box.offsets: extent for extent in masters[name].extents}
        for extent in model[name].extents:
            master = starts.get(extent.box.offsets)
            if master is None:
                raise UnknownOrderError(f"`{name}` and its master weights have different shards")
            count = min(SAMPLE, extent.box.sizes[-1], master.box.sizes[-1])
            weights = _read_bits(files, extent, model[name].dtype, count)
            values = _read_bits(files, master, masters[name].dtype, count)
            if _cast_bits(values, masters[name].dtype, model[name].dtype) != weights:
                raise UnknownOrderError(f"the master weights of `{name}` are not its weights")


def _read_bits(files: SourceFiles, extent: Extent, dtype: str, count: int) -> tuple[int, ...]:
    itemsize = get_itemsize(dtype)
    if extent.codec != "raw" or extent.strides or itemsize not in (2, 4):
        raise UnknownOrderError(f"{dtype} master weights are not supported")
    data = files.read(extent.file, extent.offset, count * itemsize)
    return struct.unpack(f"<{count}{'H' if itemsize == 2 else 'I'}", data)


def _cast_bits(values: Iterable[int], source: str, target: str) -> tuple[int, ...]:
    """Cast floats, given as their bits, with rounding to even.

    Raises:
        UnknownOrderError: The dtypes are not supported.
    """
    if source == target:
        return tuple(values)
    if source != "float32" or target not in ("bfloat16", "float16"):
        raise UnknownOrderError(f"{source} master weights of {target} weights are not supported")
    if target == "bfloat16":
        return tuple((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 for bits in values)
    floats = struct.unpack(
        f"<{len(values := tuple(values))}f", struct.pack(f"<{len(values)}I", *values)
    )
    return struct.unpack(f"<{len(floats)}H", struct.pack(f"<{len(floats)}e", *floats))
