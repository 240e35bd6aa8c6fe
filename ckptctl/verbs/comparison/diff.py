"""Comparison of two checkpoints, across formats and layouts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from ckptctl import dtypes, families, formats
from ckptctl.catalog import Catalog
from ckptctl.conversion.leaves import unpack_tensors
from ckptctl.conversion.proofs import find_lost_data
from ckptctl.conversion.recognition.model import ModelRequest
from ckptctl.conversion.recognition.roots import is_outside_model, parse_root
from ckptctl.conversion.sources import locate_tensors, open_source
from ckptctl.errors import CkptError, MappingError, UsageError, rename_options, spell_option
from ckptctl.formats.base import Weights
from ckptctl.installed import INSTALL_TORCH, has_torch, require_torch
from ckptctl.numerics.quantized import dequantize_catalog, find_quantized
from ckptctl.save_load.loading.state_mapping import MappingRequest, StateMapping, keep_names
from ckptctl.storage.compare import Errors, Tolerance
from ckptctl.storage.computed import open_reader
from ckptctl.storage.paths import redact_path
from ckptctl.storage.threads import Watch, ignore_progress
from ckptctl.tree import TreePath
from ckptctl.verbs.comparison.diff_options import DiffOptions
from ckptctl.verbs.comparison.diff_result import Difference, LeafDifference, TensorDifference
from ckptctl.verbs.comparison.padded import without_padding
from ckptctl.verbs.comparison.pairing import Pair, Pairing, Scope, map_other, pair
from ckptctl.verbs.comparison.values import Windows, compare_leaves, same_checksums

T = TypeVar("T")
_OPTIONS = ("from", "weights", "tag", "root", "from-layout")
_ELSEWHERE = {"from": "format", "from-layout": "layout"}


@dataclass(slots=True)
class _Compared:
    """Result of comparing the elements."""

    errors: Mapping[str, Errors] = field(default_factory=dict)
    by_checksum: int = 0
    bytes_read: tuple[int, int] = (0, 0)
    only_b: tuple[str, ...] = ()
    bitwise: bool = False


def diff(
    a: str | TreePath, b: str | TreePath, options: DiffOptions, progress: Watch = ignore_progress
) -> Difference:
    """Compare two checkpoints after mapping *b* to the layout of *a*.

    Errors are deviations of *b*. *progress* receives the number of bytes to compare.
    """
    with families.use_converter_file(options.converter):
        return _diff(a, b, options, progress)


def _diff(
    a: str | TreePath, b: str | TreePath, options: DiffOptions, progress: Watch
) -> Difference:
    start = time.monotonic()
    (first, own_a), (second, own_b) = map(_read_leaves, _opened(a, b, options))
    if options.root_a is not None:
        with rename_options(_option_names("a")):
            parse_root(first, options.root_a)
    asked = MappingRequest(
        source=ModelRequest(options.model_type, options.layout_b, options.root_b, options.sizes),
        state=ModelRequest(layout=options.layout_a, root=options.root_a),
        dequantized=bool(options.dequantize),
    )
    with rename_options(_option_names("b")):
        mapping = map_other(first, second, asked)
    first, padding_read = without_padding(first, mapping)
    scope = Scope(options.include, options.exclude, options.only)
    paired = pair(first, second, mapping, scope, own_a | own_b)
    _require_something(paired, options)
    values = _Compared()
    leaves: tuple[LeafDifference, ...] = ()
    if not options.structure:
        values = _values(first, paired.pairs, mapping, options, progress)
        leaves = compare_leaves(first, second, paired.leaves)
    left = {n: why for n, why in paired.b.left_out.items() if n not in values.only_b}
    within = [e for e in values.errors.values() if not e.differing and e.max_abs is not None]
    tensors = [_tensor(one, values.errors.get(one.entry.name)) for one in paired.pairs]
    read_a, read_b = values.bytes_read
    differing = (one for one in tensors if one.kinds and not _is_ignored(one, options))
    return Difference(
        replace(paired.a, path=redact_path(a), bytes_read=padding_read + read_a),
        replace(
            paired.b,
            path=redact_path(b),
            only=(*paired.b.only, *values.only_b),
            left_out=left,
            bytes_read=read_b,
        ),
        model_type=mapping.model_type,
        structure=options.structure,
        compared=len(paired.pairs),
        by_checksum=values.by_checksum,
        within=len(within),
        tensors=tuple(sorted(differing, key=lambda one: one.order)),
        compared_leaves=len(paired.leaves),
        leaves=leaves,
        notes=(*_notes(mapping, tensors, values.bitwise), *_unlike(first, second, paired, options)),
        seconds=time.monotonic() - start,
        bitwise=values.bitwise,
    )


def _is_ignored(one: TensorDifference, options: DiffOptions) -> bool:
    """Return whether only the dtype differs and `ignore_dtype` is set.

    If B stores the tensor in several dtypes, elements are not compared, so nothing shows that they
    are equal.
    """
    compared = options.structure or not one.has_several_dtypes
    return options.ignore_dtype and one.kinds == ("dtype",) and compared


@dataclass(frozen=True, slots=True)
class _Chosen:
    """One of the two checkpoints, and the options for opening it."""

    side: str
    path: str | TreePath
    format: str | None
    model_type: str | None
    weights: Weights | None
    tag: str | None
    rules: str | TreePath | None
    ranks: int | None = None

    def open(self) -> Catalog:
        with rename_options(_option_names(self.side)):
            return open_source(self.path, self)


def _option_names(side: str) -> dict[str, str]:
    """Map the options of one checkpoint to those of side ``a`` or ``b``."""
    return {f"--{name}": f"--{_ELSEWHERE.get(name, name)}-{side}" for name in _OPTIONS}


def _opened(a: str | TreePath, b: str | TreePath, options: DiffOptions) -> list[Catalog]:
    """Open both checkpoints, and dequantize them if asked."""
    kind, rules, dtype = options.model_type, options.rules, options.dequantize
    chosen = (
        _Chosen("a", a, options.format_a, kind, options.weights_a, options.tag_a, rules),
        _Chosen("b", b, options.format_b, kind, options.weights_b, options.tag_b, rules),
    )

    def without_rules(one: _Chosen, error: UsageError) -> Catalog:
        try:
            return replace(one, rules=None).open()
        except CkptError:
            raise error from None

    if rules:
        opened = _meant_for_some(chosen, _Chosen.open, without_rules)
    else:
        opened = [one.open() for one in chosen]
    if dtype is None:
        return opened
    return _meant_for_some(opened, lambda one: dequantize_catalog(one, dtype), lambda one, _: one)


def _meant_for_some(
    sides: Sequence[T],
    with_it: Callable[[T], Catalog],
    without: Callable[[T, UsageError], Catalog],
) -> list[Catalog]:
    """Apply an option to both sides, either of which may reject it."""
    found: list[Catalog] = []
    refused: list[UsageError] = []
    for side in sides:
        try:
            found.append(with_it(side))
        except UsageError as error:
            refused.append(error)
            found.append(without(side, error))
    if len(refused) == len(sides):
        raise refused[0]
    return found


def _read_leaves(catalog: Catalog) -> tuple[Catalog, frozenset[str]]:
    """Read the non-tensor values of *catalog*, and turn tensors inside them into entries.

    Also returns the names of tensors inside values of a trainer.
    """
    read = formats.resolve_codecs(replace(catalog, tensors={}, replicas={}))
    blobs = {**catalog.blobs, **read.blobs}
    whole, parts = unpack_tensors(replace(catalog, blobs=blobs), tuple(blobs))
    own = (names for leaf, names in parts.items() if is_outside_model(catalog, leaf))
    return whole, frozenset(name for names in own for name in names)


def _require_something(paired: Pairing, options: DiffOptions) -> None:
    """Raise if globs select nothing, since the checkpoints would seem equal."""
    alone = (*paired.a.only, *paired.a.only_leaves, *paired.b.only, *paired.b.only_leaves)
    if (options.include or options.exclude) and not (paired.pairs or paired.leaves or alone):
        raise MappingError(
            "nothing to compare",
            why=f"{spell_option('--include')} and {spell_option('--exclude')} select no key",
        )


def _values(
    first: Catalog,
    pairs: Sequence[Pair],
    mapping: StateMapping,
    options: DiffOptions,
    progress: Watch,
) -> _Compared:
    alike = [one for one in pairs if one.entry.shape == one.composed.shape and "," not in one.dtype]
    names = [key for one in alike for key in one.composed.keys]
    a = locate_tensors(first, [one.entry.name for one in alike])
    names += [key for one in mapping.redundant for key in one.keys]
    other = locate_tensors(mapping.catalog, names)
    mapping = replace(mapping, catalog=other)
    known = [one for one in alike if options.quick and _known(a, other, one)]
    skipped = {one.entry.name for one in known}
    todo = [one for one in alike if one.entry.name not in skipped]
    total = sum(one.entry.nbytes for one in todo)
    tolerance = None
    if options.atol is not None or options.rtol is not None:
        tolerance = Tolerance(options.atol or 0.0, options.rtol or 0.0)
    bitwise = not has_torch()
    if bitwise:
        _require_bits(todo, tolerance)
    with progress(total) as advance:
        windows = Windows(keep_names(a), mapping, options.jobs or 0, bitwise)
        errors = windows.errors(todo, tolerance, advance)
    with open_reader(other) as files:  # data of B that A's layout cannot store
        lost = dict.fromkeys(
            one.part.key for one in find_lost_data(files, other, mapping.redundant)
        )
        lost_read = files.bytes_read
    read_a, read_b = windows.bytes_read
    return _Compared(errors, len(known), (read_a, read_b + lost_read), tuple(lost), bitwise)


def _require_bits(pairs: Sequence[Pair], tolerance: Tolerance | None) -> None:
    """Require torch if comparing bits could report equal numbers as different."""
    instead = f"{spell_option('--structure')} compares names, shapes and dtypes without torch"
    if tolerance:
        require_torch("a tolerance", alternative="omit the tolerance to compare bits")
    for one in pairs:
        if one.entry.dtype != one.dtype and not dtypes.UNMEASURED & {one.entry.dtype, one.dtype}:
            why = f"`{one.entry.name}` is {one.entry.dtype} in A and {one.dtype} in B"
            require_torch("comparing values of different dtypes", why, alternative=instead)


def _known(a: Catalog, b: Catalog, one: Pair) -> bool:
    """Return whether the checksums that both sides record of a tensor match."""
    if not one.composed.is_rename:
        return False
    held = b.tensors[one.composed.sources[0].key]
    return held.shape == one.composed.shape and same_checksums(a.tensors[one.entry.name], held)


def _tensor(one: Pair, errors: Errors | None) -> TensorDifference:
    entry = one.entry
    wrong = errors if errors and errors.differing else None
    return TensorDifference(
        entry.name, one.sources, entry.shape, one.composed.shape, entry.dtype, one.dtype, wrong
    )


def _notes(
    mapping: StateMapping, tensors: Sequence[TensorDifference], bitwise: bool
) -> tuple[str, ...]:
    mixed = [one.name for one in tensors if one.has_several_dtypes]
    notes = [
        f"values of `{name}` were not compared, because B stores it in several dtypes"
        for name in mixed
    ]
    if bitwise and any(one.values for one in tensors):
        notes.append(
            f"only bits were compared; torch is required to measure differences: {INSTALL_TORCH}"
        )
    return (*dict.fromkeys((*mapping.notes.get_texts(), *notes)),)


def _unlike(a: Catalog, b: Catalog, paired: Pairing, options: DiffOptions) -> tuple[str, ...]:
    """Return a note if only one side is quantized."""
    if options.dequantize is not None or not (paired.a.only or paired.b.only):
        return ()
    ways = [find_quantized(one) for one in (a, b)]
    if bool(ways[0]) == bool(ways[1]):
        return ()
    side, found = ("A", ways[0]) if ways[0] else ("B", ways[1])
    how = ", ".join(dict.fromkeys(found.values()))
    return (
        f"{side} is quantized ({how}); pass {spell_option('--dequantize bf16')} to compare "
        "dequantized values",
    )
