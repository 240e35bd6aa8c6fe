"""Tensors in memory, such as those of an inference engine, as the tensors of a delta.

An engine may store a tensor of the delta under another name, as rows of a fused tensor, or in
another layout, where its elements are in several tensors or in another order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ckptctl.catalog import Box, Catalog, Extent, TensorEntry, compute_row_major_strides
from ckptctl.conversion.recognition.model import ModelRequest
from ckptctl.errors import CkptError, MappingError, format_option, quote_names
from ckptctl.planner.strided import Part
from ckptctl.save_load.loading.state_mapping import MappingRequest, map_state
from ckptctl.save_load.saving.local_shards import TensorMeta
from ckptctl.storage.arithmetic import is_tensor
from ckptctl.verbs.deltas.chain import Chain

if TYPE_CHECKING:
    from ckptctl.storage.arithmetic import Tensor

CHECKPOINT_HINT = "apply it to a checkpoint, and load the result"
CONFIG_HINT = "pass the content of the base's config.json as `config`"


@dataclass(frozen=True, slots=True)
class ElementGrid:
    """Evenly spaced elements of a tensor, in the tensor of the delta.

    Attributes:
        sizes: Number of elements along each axis.
        steps: Distance between neighbors along each axis, in elements in row-major order.
        start: Position of the first element, in row-major order.
    """

    sizes: tuple[int, ...]
    steps: tuple[int, ...]
    start: int

    def view(self, dense: Tensor) -> Tensor:
        """View the elements in *dense*, a contiguous tensor."""
        return dense.as_strided(self.sizes, self.steps, dense.storage_offset() + self.start)


@dataclass(frozen=True, slots=True)
class LiveTensor:
    """Tensor of a delta that is stored in memory.

    Attributes:
        names: Names of the tensors in memory that store it.
        pieces: Views of these tensors, each with the position of its elements, or None if the view
            has all elements in order.
    """

    names: tuple[str, ...]
    pieces: tuple[tuple[Tensor, ElementGrid | None], ...]

    @property
    def dtype(self) -> str:
        """Name of the dtype."""
        return str(self.pieces[0][0].dtype).removeprefix("torch.")

    @property
    def memory_key(self) -> tuple[object, ...]:
        """Key that is equal for tensors of the same elements in memory."""
        return tuple(
            (view.device, view.data_ptr(), view.dtype, tuple(view.shape), view.stride(), grid)
            for view, grid in self.pieces
        )

    def gather(self, shape: Sequence[int]) -> Tensor:
        """Return all elements as a contiguous tensor, which may share memory with the views."""
        first, grid = self.pieces[0]
        if grid is None:
            return first.contiguous()
        dense = first.new_empty(tuple(shape))
        for view, position in self.pieces:
            assert position is not None
            position.view(dense).copy_(view)
        return dense

    def scatter(self, dense: Tensor) -> None:
        """Store *dense*, which :meth:`gather` returned."""
        for view, grid in self.pieces:
            if grid is not None:
                view.copy_(grid.view(dense))
            elif dense.data_ptr() != view.data_ptr():
                view.copy_(dense)


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveNames:
    """Statement of how tensors in memory differ from those of a delta.

    Attributes:
        names: Name in memory of each tensor that is called differently in the delta.
        fused: For the name of a module in memory, the modules of the delta that it stores one after
            another, as in ``packed_modules_mapping`` of vLLM.
        layout: Layout of the tensors in memory, or None if it is that of the delta.
        config: Content of ``config.json``, which some layouts require.
    """

    names: Mapping[str, str]
    fused: Mapping[str, Sequence[str]]
    layout: str | None = None
    config: Mapping[str, object] | None = None


def find_live_tensors(
    tensors: Mapping[str, Tensor], chain: Chain, stated: LiveNames, required: AbstractSet[str]
) -> dict[str, LiveTensor]:
    """Find the tensors of the base of *chain* in memory, by name in the delta.

    Tensors that are not in memory are omitted. Those that are not *required* are also omitted if
    they have another dtype or shape, or no data in this process.
    """
    finder = _Finder(tensors, chain, stated, required)
    return finder.map_layout(stated.layout) if stated.layout is not None else finder.find_names()


class _Finder:
    """Search of the tensors of a base in memory."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        chain: Chain,
        stated: LiveNames,
        required: AbstractSet[str],
    ) -> None:
        self._tensors, self._base, self._stated = tensors, chain.base, stated
        self._required, self._manifest = required, chain.deltas[0].manifest
        self._where = str(chain.deltas[0].root)
        self._fused_names: set[str] = set()

    def find_names(self) -> dict[str, LiveTensor]:
        """Find tensors by name, and rows of fused tensors."""
        live: dict[str, LiveTensor] = {}
        for name, record in self._base.items():
            stored_name = self._stated.names.get(name, name)
            try:
                if stored_name in self._tensors:
                    tensor = self._get_tensor(stored_name, record.dtype, record.shape)
                    live[name] = LiveTensor((stored_name,), ((tensor, None),))
                elif rows := self._find_rows(name):
                    live[name] = rows
            except MappingError:
                if name in self._required:
                    raise
        if unknown := self._stated.names.keys() - self._base.keys() - self._fused_names:
            raise MappingError(
                "`names` has tensors that are not in the delta",
                where=self._where,
                why=quote_names(sorted(unknown)),
                hint="pass names of the delta as keys, and `fused` for modules fused in memory",
            )
        return live

    def _get_tensor(self, name: str, dtype: str, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor in memory, or raise if it has no data or another dtype or shape."""
        tensor = self._tensors[name]
        if not is_tensor(tensor):
            raise MappingError(
                f"`{name}` is not a tensor of torch",
                where=self._where,
                why=f"it is of type `{type(tensor).__name__}`",
            )
        if tensor.is_meta or hasattr(tensor, "to_local"):
            raise MappingError(
                f"`{name}` has no data" if tensor.is_meta else f"`{name}` is a DTensor",
                where=self._where,
                hint="pass complete tensors, or apply the delta to a checkpoint",
            )
        own_form = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
        if own_form != (dtype, shape):
            raise MappingError(
                f"`{name}` has another dtype or shape",
                where=self._where,
                why=f"{own_form[0]} {list(own_form[1])} in memory, "
                f"{dtype} {list(shape)} in the delta",
                hint=CHECKPOINT_HINT,
            )
        if any(not step and size > 1 for step, size in zip(tensor.stride(), shape, strict=True)):
            raise MappingError(
                f"elements of `{name}` share memory",
                where=self._where,
                why=f"its strides are {list(tensor.stride())}",
                hint="pass the tensor that was expanded, or a copy",
            )
        return tensor.detach()

    def _find_rows(self, name: str) -> LiveTensor | None:
        """Find the rows of a fused tensor that store the tensor *name*."""
        words, record = name.split("."), self._base[name]
        for module, parts in self._stated.fused.items():
            for at, word in enumerate(words):
                if word not in parts:
                    continue
                names = [".".join([*words[:at], part, *words[at + 1 :]]) for part in parts]
                fused_name = ".".join([*words[:at], module, *words[at + 1 :]])
                self._fused_names.add(fused_name)
                fused_name = self._stated.names.get(fused_name, fused_name)
                records = [self._base.get(part) for part in names]
                if fused_name not in self._tensors or not all(
                    item and item.shape[1:] == record.shape[1:] and item.shape for item in records
                ):
                    continue
                rows = [item.shape[0] for item in records if item]
                shape = (sum(rows), *record.shape[1:])
                fused = self._get_tensor(fused_name, record.dtype, shape)
                start = sum(rows[: parts.index(word)])
                return LiveTensor((fused_name,), ((fused[start : start + record.shape[0]], None),))
        return None

    def map_layout(self, layout: str) -> dict[str, LiveTensor]:
        """Find the elements of each tensor in tensors of *layout*."""
        manifest = self._manifest
        if manifest.model_type is None:
            raise MappingError(
                "the model type of the delta is unknown, so its layout cannot be mapped",
                where=self._where,
                hint=f"make it with {format_option('--model-type')}",
            )
        state = {
            name: TensorMeta(
                str(tensor.dtype).removeprefix("torch."),
                tuple(tensor.shape),
                tuple(name.split(".")),
            )
            for name, tensor in self._tensors.items()
            if is_tensor(tensor)
        }
        request = MappingRequest(
            source=ModelRequest(model_type=manifest.model_type, layout=manifest.layout),
            state=ModelRequest(layout=layout),
        )
        try:
            mapping = map_state(self._build_catalog(), state, request)
        except CkptError as error:
            if error.hint and "`--" in error.hint:  # an option of conversions
                error.hint = CONFIG_HINT
            raise
        catalog = mapping.catalog
        pieces: dict[str, list[tuple[str, Tensor, ElementGrid]]] = {}
        for name, composed in mapping.tensors.items():
            if name not in self._tensors:
                continue
            strided = composed.bind_entries({key: catalog.tensors[key] for key in composed.keys})
            try:
                tensor = self._get_tensor(name, strided.dtype, strided.shape)
            except MappingError:
                if self._required & {part.entry.name for part in strided.parts}:
                    raise
                continue
            for part in strided.parts:
                # Computed elements are no view, so that the tensor is incomplete below.
                if not any(extent.file in catalog.computed for extent in part.entry.extents):
                    view, grid = _view_part(tensor, part)
                    pieces.setdefault(part.entry.name, []).append((name, view, grid))
        return {name: self._require_complete(name, parts) for name, parts in pieces.items()}

    def _build_catalog(self) -> Catalog:
        """Build a catalog of the tensors of the base, without data."""
        tensors: dict[str, TensorEntry] = {}
        for name, record in self._base.items():
            extent = Extent(Box.whole(record.shape), name, 0, record.nbytes)
            tensors[name] = TensorEntry(name, record.dtype, record.shape, (extent,), (name,))
        config = self._stated.config
        documents = {} if config is None else {"config.json": config}
        root = Path(self._where)
        return Catalog(root, root, "hf", {}, tensors, documents=documents)

    def _require_complete(
        self, name: str, parts: list[tuple[str, Tensor, ElementGrid]]
    ) -> LiveTensor:
        """Return the tensor *name*, or raise if only some of its elements are in memory.

        It may be in memory more than once, such as a tied one, but then completely each time.
        """
        numel = math.prod(self._base[name].shape)
        counts: dict[str, int] = {}
        for stored_name, _, grid in parts:
            counts[stored_name] = counts.get(stored_name, 0) + math.prod(grid.sizes)
        total = sum(counts.values())
        if total != numel and any(count != numel for count in counts.values()):
            raise MappingError(
                f"only some elements of `{name}` are in memory",
                where=self._where,
                why=f"{total:,} of {numel:,} are in {quote_names([*counts])}",
                hint=CHECKPOINT_HINT,
            )
        return LiveTensor(tuple(counts), tuple((view, grid) for _, view, grid in parts))


def _view_part(tensor: Tensor, part: Part) -> tuple[Tensor, ElementGrid]:
    """View the elements of *part* in a tensor in memory, and return their positions in the delta.

    The tensor in memory is the one that *part* composes, and the stored one is that of the delta.
    """
    strides, stored_strides = tensor.stride(), compute_row_major_strides(part.entry.shape)
    sizes = tuple(axis.size for axis in part.axes)
    start = sum(map(math.prod, zip(part.origin, strides, strict=True)))
    view = tensor.as_strided(
        sizes,
        tuple(axis.step * strides[axis.dim] for axis in part.axes),
        tensor.storage_offset() + start,
    )
    stored_start = sum(map(math.prod, zip(part.stored_origin, stored_strides, strict=True)))
    steps = tuple(axis.stride * stored_strides[axis.at] for axis in part.axes)
    return view, ElementGrid(sizes, steps, stored_start)
