"""Summary of a conversion, with counts of tensors read, written, merged, split and dropped.

Every tensor of the source is dropped, skipped, or used in the output. Every tensor of the output is
computed from source tensors, from tensors of ``--fill-from``, or filled with zeros.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

from ckptctl.catalog import Extent, TensorEntry
from ckptctl.columns import get_extent_files
from ckptctl.conversion.draft import Draft
from ckptctl.formats.base import OutputTensor
from ckptctl.planner.mapping.mapped import ComposedTensor
from ckptctl.results import JsonField, Result
from ckptctl.units import format_bytes, pluralize

KINDS = ("made", "same", "fused", "divided", "regrouped", "repeated")
MAX_OFFSET = sys.maxsize
INTO_TEXT = "number of resulting tensors"


@dataclass(frozen=True, slots=True)
class Amount(Result):
    """Number of tensors, with their total size in bytes."""

    tensors: Annotated[int, JsonField("number of tensors, by name")] = 0
    nbytes: Annotated[
        int, JsonField("bytes of their elements; shared memory counts once", name="bytes")
    ] = 0


@dataclass(frozen=True, slots=True)
class TensorCounts(Result):
    """Number of source tensors, and number of output tensors that are computed from them."""

    tensors: Annotated[int, JsonField("number of input tensors")] = 0
    into: Annotated[int, JsonField(INTO_TEXT)] = 0

    def __bool__(self) -> bool:
        return bool(self.tensors or self.into)


@dataclass(frozen=True, slots=True)
class Summary(Result):
    """Counts of source and output tensors, grouped by kind of change.

    Tensors of the source and of ``--fill-from`` are dropped, skipped, fused, divided, regrouped,
    repeated, or copied one to one. Output tensors without any source are zeros.
    """

    read: Annotated[Amount, JsonField("source tensors", name="in")]
    written: Annotated[Amount, JsonField("output tensors", name="out")]
    dropped: Annotated[int, JsonField("number of source tensors in `dropped`")]
    left_out: Annotated[
        int,
        JsonField("number of source tensors in `left_out` or outside of the requested parts"),
    ]
    missing: Annotated[int, JsonField("number of incomplete source tensors")]
    taken: Annotated[int, JsonField("number of tensors from `--fill-from`")]
    made: Annotated[int, JsonField("number of output tensors created as zeros")]
    fused: Annotated[
        TensorCounts,
        JsonField("several tensors into one: fused, stacked, or dequantized with their scales"),
    ]
    divided: Annotated[TensorCounts, JsonField("one tensor into several parts")]
    regrouped: Annotated[TensorCounts, JsonField("several tensors into several others")]
    repeated: Annotated[TensorCounts, JsonField("one tensor into several copies")]
    quantized: Annotated[
        TensorCounts,
        JsonField("one tensor into several, by `--quantize`", name="quantized"),
    ] = TensorCounts()

    @property
    def changes(self) -> tuple[str, ...]:
        """Texts that describe all changes except one-to-one copies."""
        counts = {
            "dropped": self.dropped,
            "skipped": self.left_out,
            "incomplete": self.missing,
            "filled from the base": self.taken,
        }
        groups = {
            "fused into": self.fused,
            "split into": self.divided,
            "regrouped into": self.regrouped,
            "repeated as": self.repeated,
            "quantized into": self.quantized,
        }
        phrases = [f"{count:,} {word}" for word, count in counts.items() if count]
        phrases += [
            f"{group.tensors:,} {word} {group.into:,}" for word, group in groups.items() if group
        ]
        return (*phrases, *([f"{self.made:,} filled with zeros"] if self.made else ()))

    @property
    def sentence(self) -> str:
        """One-line summary that omits counts of zero."""
        sides = dict.fromkeys(
            f"{pluralize(side.tensors, 'tensor')}, {format_bytes(side.nbytes)}"
            for side in (self.read, self.written)
        )
        changes = ", ".join(self.changes)
        return " → ".join(sides) + (f" ({changes})" if changes else "")

    @property
    def is_unchanged(self) -> bool:
        """Whether every tensor is written exactly once, with the same size as in the source."""
        return self.read == self.written and not self.changes


def summarize_conversion(draft: Draft, output: Draft) -> Summary:
    """Count the source and output tensors of a conversion by kind of change.

    Args:
        draft: Draft before the steps at ``output``, such as quantization, have run.
        output: Draft after all steps have run.
    """
    source, origins, skipped = draft.source, draft.origins, output.notes.get_reasons("skipped")
    written = {output_tensor.name: output_tensor for output_tensor in draft.stored_tensors}
    groups = _TensorGroups(_TensorOrigins(draft), written)
    for composed in draft.mapped.values():
        groups.add_tensor(composed)
    used = {name for name in groups.sources if not name.startswith("/")}
    unused = source.tensors.keys() - used
    missing_names = unused & draft.missing.keys()
    skipped_sources = {origins.get(name, name) for name in skipped}
    skipped_names = (unused - missing_names) & (
        skipped_sources | (source.tensors.keys() - draft.catalog.tensors.keys())
    )
    virtual_entries = [draft.located.tensors[name] for name in used - source.tensors.keys()]
    kinds = groups.count_by_kind()
    quantization = output.quantization
    return Summary(
        Amount(
            len(source.tensors) + len(virtual_entries),
            source.nbytes + sum(entry.nbytes for entry in virtual_entries),
        ),
        Amount(
            len(output.stored_tensors),
            sum(tensor.nbytes for tensor in output.tensors if tensor.alias_of is None),
        ),
        len(unused) - len(skipped_names) - len(missing_names),
        len(skipped_names),
        len(missing_names),
        len(groups.sources - used),
        kinds["made"].into,
        kinds["fused"],
        kinds["divided"],
        kinds["regrouped"],
        kinds["repeated"],
        TensorCounts(len(quantization.weights), len(quantization.parts))
        if quantization and not quantization.is_lossless
        else TensorCounts(),
    )


_EMPTY_ENTRY = TensorEntry("", "uint8", (0,), (), ())


class _TensorOrigins:
    """Lookup of the source and base tensors that a tensor is computed from."""

    def __init__(self, draft: Draft) -> None:
        self._source, self._catalog = draft.source, draft.located
        self._names, self._taken = draft.origins, draft.filled_from
        self._known: dict[str, frozenset[str]] = {}

    def find_origins(self, key: str) -> frozenset[str]:
        """Find the names of the tensors that *key* is computed from.

        Names of tensors in the ``--fill-from`` base start with a slash.
        """
        if key in self._taken:
            return frozenset((f"/{key}",))
        if key not in self._known:
            name, entry = self._names.get(key, key), self._catalog.tensors[key]
            # A tensor that is not in the source may be computed, or nested in a leaf.
            origins = {name}
            if name not in self._source.tensors:
                origins = {stored or name for stored in self._iterate_storing_tensors(entry)}
            if self._catalog.computed:
                origins.update(self._iterate_inputs(entry))
            self._known[key] = frozenset(origins)
        return self._known[key]

    def count_elements(self, name: str) -> int:
        """Return the number of elements of *name*, a tensor returned by :meth:`find_origins`."""
        filled_entry = self._catalog.tensors.get(name.removeprefix("/"))
        return self._source.tensors.get(name, filled_entry or _EMPTY_ENTRY).numel

    def _iterate_storing_tensors(self, entry: TensorEntry) -> Iterator[str | None]:
        """Yield the source tensor of each extent of *entry* that is not computed, or None."""
        computed = self._catalog.computed
        return map(
            self._find_storing_tensor,
            (extent for extent in entry.extents if extent.file not in computed),
        )

    def _find_storing_tensor(self, extent: Extent) -> str | None:
        """Return the source tensor whose byte range contains the start of *extent*, or None."""
        spans = self._file_spans.get(extent.file, ())
        at = bisect_right(spans, (extent.offset, MAX_OFFSET)) - 1
        return spans[at][2] if at >= 0 and extent.offset < spans[at][1] else None

    @cached_property
    def _file_spans(self) -> Mapping[str, Sequence[tuple[int, int, str]]]:
        """Sorted ``(start, end, tensor name)`` byte ranges of the source, by file."""
        spans_by_file: dict[str, list[tuple[int, int, str]]] = {}
        for name, entry in self._source.tensors.items():
            for extent in entry.extents:
                span = extent.offset, extent.offset + extent.nbytes, name
                spans_by_file.setdefault(extent.file, []).append(span)
        return {file: sorted(spans) for file, spans in spans_by_file.items()}

    def _iterate_inputs(self, entry: TensorEntry) -> Iterator[str]:
        """Yield the source tensors that the virtual files of *entry* are computed from."""
        computed_tensors = map(
            self._catalog.computed.get, dict.fromkeys(get_extent_files(entry.extents))
        )
        for computed in filter(None, computed_tensors):
            for input_tensor in computed.inputs:
                read = input_tensor.entry
                if input_tensor.root == self._source.root:
                    if read.name in self._source.tensors:
                        yield read.name
                    else:
                        yield from filter(None, self._iterate_storing_tensors(read))
                yield from self._iterate_inputs(read)


class _TensorGroups:
    """Groups of source tensors and the output tensors that are computed from them.

    Attributes:
        sources: Names of tensors that the output uses. Names of tensors in the ``--fill-from`` base
            start with a slash.
    """

    def __init__(self, origins: _TensorOrigins, written: Mapping[str, OutputTensor]) -> None:
        self._origins, self._written = origins, written
        self._parents: dict[object, object] = {}
        self.sources: set[str] = set()
        self._targets: set[str] = set()

    def add_tensor(self, composed: ComposedTensor) -> None:
        """Add an output tensor to the group of its source tensors."""
        if composed.key not in self._written:
            return
        sources = {name for key in composed.keys for name in self._origins.find_origins(key)}
        self.sources |= sources
        self._targets.add(composed.key)
        for node in ((0, name) for name in sources):
            self._parents[self._find_root(node)] = self._find_root((1, composed.key))

    def count_by_kind(self) -> dict[str, TensorCounts]:
        """Count source and output tensors by the kind of change of their group."""
        groups: dict[object, tuple[list[str], list[str]]] = {}
        for name in self.sources:
            groups.setdefault(self._find_root((0, name)), ([], []))[0].append(name)
        for key in self._targets:
            groups.setdefault(self._find_root((1, key)), ([], []))[1].append(key)
        counts = dict.fromkeys(KINDS, (0, 0))
        for sources, targets in groups.values():
            if not sources:
                kind = "made"
            elif len(targets) == 1:
                kind = "same" if len(sources) == 1 else "fused"
            elif len(sources) > 1:
                kind = "regrouped"
            else:
                written = sum(math.prod(self._written[key].shape) for key in targets)
                kind = (
                    "repeated" if written > self._origins.count_elements(sources[0]) else "divided"
                )
            before, after = counts[kind]
            counts[kind] = before + len(sources), after + len(targets)
        return {kind: TensorCounts(*count) for kind, count in counts.items()}

    def _find_root(self, node: object) -> object:
        while (parent := self._parents.get(node, node)) != node:
            self._parents[node] = self._parents.get(parent, parent)
            node = parent
        return node
