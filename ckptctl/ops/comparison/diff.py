"""How two checkpoints differ, whatever their formats and layouts."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ckptctl import families
from ckptctl.catalog import Catalog
from ckptctl.errors import MappingError
from ckptctl.ops.comparison.options import DiffOptions
from ckptctl.ops.comparison.pairing import Pair, Pairing, pair
from ckptctl.ops.comparison.result import Difference, LeafDifference, TensorDifference
from ckptctl.ops.comparison.sides import Scope, map_other, open_sides, option_names, read_leaves
from ckptctl.ops.comparison.values import Windows, compare_leaves, same_checksums
from ckptctl.ops.loading.options import LoadOptions
from ckptctl.ops.loading.state_mapping import StateMapping
from ckptctl.ops.recognition.roots import checked_root
from ckptctl.ops.sources import located
from ckptctl.ops.watch import Watch, unwatched
from ckptctl.options import renaming
from ckptctl.storage.compare import all_zero, equal
from ckptctl.storage.computed import open_reader
from ckptctl.storage.errors_between import Errors
from ckptctl.storage.paths import shown


@dataclass(slots=True)
class _Values:
    """What reading the elements shows."""

    errors: Mapping[str, Errors] = field(default_factory=dict)
    by_checksum: int = 0
    bytes_read: int = 0
    only_b: tuple[str, ...] = ()


def diff(
    a: str | Path, b: str | Path, options: DiffOptions, progress: Watch = unwatched
) -> Difference:
    """Compare two checkpoints, *b* mapped to the layout of *a*; errors are those of *b*.

    *progress* is told of the bytes that will be compared.
    """
    with families.using(options.converter):
        return _diff(a, b, options, progress)


def _diff(a: str | Path, b: str | Path, options: DiffOptions, progress: Watch) -> Difference:
    start = time.monotonic()
    first, second = map(read_leaves, open_sides(a, b, options))
    if options.root_a is not None:
        with renaming(option_names("a")):
            checked_root(first, options.root_a)
    asked = LoadOptions(
        model_type=options.model_type,
        layout=options.layout_a,
        from_layout=options.layout_b,
        prefix=options.root_a,
        root=options.root_b,
        dequantize=options.dequantize,
        sizes=options.sizes or {},
    )
    with renaming(option_names("b")):
        mapping = map_other(first, second, asked)
    scope = Scope(options.include, options.exclude, options.only)
    paired = pair(first, second, mapping, scope)
    _require_something(paired, options)
    values = _Values()
    leaves: tuple[LeafDifference, ...] = ()
    if not options.structure:
        values = _values(first, paired.pairs, mapping, options, progress)
        leaves = compare_leaves(first, second, paired.leaves)
    left = {n: why for n, why in paired.b.left_out.items() if n not in values.only_b}
    within = [e for e in values.errors.values() if not e.differing and e.max_abs is not None]
    tensors = [_tensor(one, values.errors.get(one.entry.name)) for one in paired.pairs]
    alike = ((), ("dtype",)) if options.ignore_dtype else ((),)
    return Difference(
        replace(paired.a, path=shown(a)),
        replace(paired.b, path=shown(b), only=(*paired.b.only, *values.only_b), left_out=left),
        model_type=mapping.model_type,
        structure=options.structure,
        compared=len(paired.pairs),
        by_checksum=values.by_checksum,
        within=len(within),
        tensors=tuple(sorted((t for t in tensors if t.kinds not in alike), key=lambda t: t.order)),
        compared_leaves=len(paired.leaves),
        leaves=leaves,
        bytes_read=values.bytes_read,
        notes=_notes(mapping, tensors),
        seconds=time.monotonic() - start,
    )


def _require_something(paired: Pairing, options: DiffOptions) -> None:
    """Refuse globs that leave nothing: two checkpoints would be called the same for it."""
    alone = (*paired.a.only, *paired.a.only_leaves, *paired.b.only, *paired.b.only_leaves)
    if (options.include or options.exclude) and not (paired.pairs or paired.leaves or alone):
        raise MappingError(
            "nothing is left to compare", why="what is included and excluded leaves no name"
        )


def _values(
    first: Catalog,
    pairs: Sequence[Pair],
    mapping: StateMapping,
    options: DiffOptions,
    progress: Watch,
) -> _Values:
    alike = [one for one in pairs if one.entry.shape == one.shape and "," not in one.dtype]
    names = [view.key for one in alike for part in one.mapped for view in part.sources]
    # what is dropped for what it holds has to be read as well
    held_back = [*mapping.must_be_zero, *(name for both in mapping.must_equal for name in both)]
    a = located(first, [one.entry.name for one in alike])
    other = located(mapping.catalog, [*names, *held_back])
    mapping = replace(mapping, catalog=other)
    known = [one for one in alike if options.checksums and _known(a, other, one)]
    skipped = {one.entry.name for one in known}
    todo = [one for one in alike if one.entry.name not in skipped]
    total = sum(one.entry.nbytes for one in todo)
    with progress(total) as advance:
        errors = Windows(a, mapping, options.jobs or 0).errors(todo, options.tolerance, advance)
    return _Values(errors, len(known), total, tuple(_lost(mapping)))


def _known(a: Catalog, b: Catalog, one: Pair) -> bool:
    """Whether checksums that were recorded show that a tensor is equal in both."""
    if not one.renamed:
        return False
    held = b.tensors[one.mapped[0].sources[0].key]
    return held.shape == one.shape and same_checksums(a.tensors[one.entry.name], held)


def _lost(mapping: StateMapping) -> list[str]:
    """Return what has no place in A's layout, and holds what nothing else does."""
    catalog = mapping.catalog
    with open_reader(catalog) as files:
        lost = [n for n in mapping.must_be_zero if not all_zero(files, catalog.tensors[n])]
        for kept, dropped in mapping.must_equal:
            if not equal(files, catalog.tensors[kept], catalog.tensors[dropped]):
                lost.append(dropped)
    return lost


def _tensor(one: Pair, errors: Errors | None) -> TensorDifference:
    entry = one.entry
    wrong = errors if errors and errors.differing else None
    return TensorDifference(
        entry.name, one.sources, entry.shape, one.shape, entry.dtype, one.dtype, wrong
    )


def _notes(mapping: StateMapping, tensors: Sequence[TensorDifference]) -> tuple[str, ...]:
    mixed = [one.name for one in tensors if "," in one.dtype_b]
    notes = [f"`{name}` is several dtypes in B: values not compared" for name in mixed]
    return (*dict.fromkeys((*mapping.notes, *notes)),)
