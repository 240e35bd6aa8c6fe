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
from ckptctl.errors import (
    CkptError,
    MappingError,
    UsageError,
    format_option,
    quote_names,
    rename_options_in_messages,
)
from ckptctl.formats.base import Weights
from ckptctl.formats.shared.leaves import flatten_mappings
from ckptctl.installed import INSTALL_TORCH, has_torch, require_torch
from ckptctl.numerics.quantized import dequantize_catalog, find_quantized_tensors
from ckptctl.save_load.loading.state_mapping import MappingRequest, StateMapping, map_by_name
from ckptctl.storage.compare import Errors, Tolerance
from ckptctl.storage.computed import open_catalog_reader
from ckptctl.storage.paths import redact_path
from ckptctl.storage.threads import StartProgress, ignore_progress
from ckptctl.tree import TreePath
from ckptctl.verbs.comparison.diff_options import DiffOptions
from ckptctl.verbs.comparison.diff_result import Difference, LeafDifference, TensorDifference
from ckptctl.verbs.comparison.movement import ObserveWindow
from ckptctl.verbs.comparison.padded import remove_padding
from ckptctl.verbs.comparison.pairing import (
    ComparedSelection,
    Pair,
    Pairing,
    add_tied_tensors,
    map_to_first_layout,
    pair_tensors,
)
from ckptctl.verbs.comparison.values import WindowComparer, compare_leaves, has_equal_checksums

T = TypeVar("T")
_SIDE_OPTIONS = ("from", "weights", "tag", "root", "from-layout")
_RENAMED_OPTIONS = {"from": "format", "from-layout": "layout"}


@dataclass(slots=True)
class _ElementComparison:
    """Result of comparing the elements of all tensor pairs."""

    errors: Mapping[str, Errors] = field(default_factory=dict)
    by_checksum: int = 0
    bytes_read: tuple[int, int] = (0, 0)
    only_b: tuple[str, ...] = ()
    bitwise: bool = False


def compare_checkpoints(
    a: str | TreePath,
    b: str | TreePath,
    options: DiffOptions,
    progress: StartProgress = ignore_progress,
    observe: ObserveWindow | None = None,
) -> Difference:
    """Compare two checkpoints after mapping *b* to the layout of *a*.

    Errors measure how far *b* deviates from *a*. *progress* is called with the number of bytes to
    compare, and *observe* with each pair of windows that is read.
    """
    with families.use_converter_file(options.converter):
        return _compare_sources(a, b, options, progress, observe)


def _compare_sources(
    a: str | TreePath,
    b: str | TreePath,
    options: DiffOptions,
    progress: StartProgress,
    observe: ObserveWindow | None,
) -> Difference:
    start = time.monotonic()
    (first, trainer_names_a), (second, trainer_names_b) = map(
        _read_leaves, _open_both(a, b, options)
    )
    if options.root_a is not None:
        with rename_options_in_messages(_build_option_names("a")):
            parse_root(first, options.root_a)
    request = MappingRequest(
        source=ModelRequest(options.model_type, options.layout_b, options.root_b, options.sizes),
        state=ModelRequest(layout=options.layout_a, root=options.root_a),
        dequantized=bool(options.dequantize),
    )
    with rename_options_in_messages(_build_option_names("b")):
        mapping = map_to_first_layout(first, second, request)
        with_tied = add_tied_tensors(first, second, mapping, request)
        if with_tied is not first:
            first = with_tied
            mapping = map_to_first_layout(first, second, request)
    first, padding_read = remove_padding(first, mapping)
    scope = ComparedSelection(options.include, options.exclude, options.only)
    paired = pair_tensors(first, second, mapping, scope, trainer_names_a | trainer_names_b)
    _require_selection(paired, options)
    values = _ElementComparison()
    leaves: tuple[LeafDifference, ...] = ()
    if not options.structure:
        values = _compare_values(first, paired.pairs, mapping, options, progress, observe)
        leaves = compare_leaves(first, paired.leaves)
    left_out = {n: why for n, why in paired.b.left_out.items() if n not in values.only_b}
    within = [e for e in values.errors.values() if not e.differing and e.max_abs is not None]
    tensors = [_build_difference(item, values.errors.get(item.entry.name)) for item in paired.pairs]
    read_a, read_b = values.bytes_read
    differing = (item for item in tensors if item.kinds and not _is_ignored(item, options))
    return Difference(
        replace(paired.a, path=redact_path(a), bytes_read=padding_read + read_a),
        replace(
            paired.b,
            path=redact_path(b),
            only=(*paired.b.only, *values.only_b),
            left_out=left_out,
            bytes_read=read_b,
        ),
        model_type=mapping.model_type,
        structure=options.structure,
        compared=len(paired.pairs),
        by_checksum=values.by_checksum,
        within=len(within),
        tensors=tuple(sorted(differing, key=lambda item: item.sort_key)),
        compared_leaves=len(paired.leaves),
        leaves=leaves,
        notes=(
            *_list_source_notes(first, second, options),
            *_list_notes(mapping, tensors, values.bitwise),
            *_list_quantization_notes(first, second, paired, options),
        ),
        seconds=time.monotonic() - start,
        bitwise=values.bitwise,
    )


def _is_ignored(difference: TensorDifference, options: DiffOptions) -> bool:
    """Return whether only the dtype differs and `ignore_dtype` is set.

    A tensor that B stores in several dtypes is not ignored, because its elements are not compared.
    """
    compared = options.structure or not difference.has_several_dtypes
    return options.ignore_dtype and difference.kinds == ("dtype",) and compared


@dataclass(frozen=True, slots=True)
class _SideSource:
    """One of the two checkpoints to compare, and the options for opening it."""

    side: str
    path: str | TreePath
    format: str | None
    model_type: str | None
    weights: Weights | None
    tag: str | None
    rules: str | TreePath | None
    ranks: int | None = None

    def open(self) -> Catalog:
        with rename_options_in_messages(_build_option_names(self.side)):
            return open_source(self.path, self)


def _build_option_names(side: str) -> dict[str, str]:
    """Map option names for one checkpoint to option names for one side.

    For example, ``--from`` is mapped to ``--format-a``.
    """
    return {f"--{name}": f"--{_RENAMED_OPTIONS.get(name, name)}-{side}" for name in _SIDE_OPTIONS}


def _open_both(a: str | TreePath, b: str | TreePath, options: DiffOptions) -> list[Catalog]:
    """Open both checkpoints, and dequantize their tensors if *options* request this."""
    kind, rules, dtype = options.model_type, options.rules, options.dequantize
    sources = (
        _SideSource("a", a, options.format_a, kind, options.weights_a, options.tag_a, rules),
        _SideSource("b", b, options.format_b, kind, options.weights_b, options.tag_b, rules),
    )

    def open_without_rules(side: _SideSource, error: UsageError) -> Catalog:
        try:
            return replace(side, rules=None).open()
        except CkptError:
            raise error from None

    if rules:
        opened = _apply_to_sides(sources, _SideSource.open, open_without_rules)
    else:
        opened = [side.open() for side in sources]
    if dtype is None:
        return opened
    return _apply_to_sides(
        opened, lambda side: dequantize_catalog(side, dtype), lambda side, _: side
    )


def _apply_to_sides(
    sides: Sequence[T],
    apply: Callable[[T], Catalog],
    fallback: Callable[[T, UsageError], Catalog],
) -> list[Catalog]:
    """Apply an option to both sides. If only one side rejects it, use *fallback* for that side."""
    results: list[Catalog] = []
    errors: list[UsageError] = []
    for side in sides:
        try:
            results.append(apply(side))
        except UsageError as error:
            errors.append(error)
            results.append(fallback(side, error))
    if len(errors) == len(sides):
        raise errors[0]
    return results


def _read_leaves(catalog: Catalog) -> tuple[Catalog, frozenset[str]]:
    """Read the non-tensor values of *catalog*, and add entries for the tensors inside them.

    Dictionaries that are values in some formats are flattened, as in all others.

    Returns:
        The new catalog, and the names of the tensors inside trainer state.
    """
    read = formats.resolve_codecs(replace(catalog, tensors={}, replicas={}))
    blobs = {**catalog.blobs, **read.blobs}
    unpacked_catalog, parts = unpack_tensors(replace(catalog, blobs=blobs), tuple(blobs))
    trainer_names = (names for leaf, names in parts.items() if is_outside_model(catalog, leaf))
    leaves = {blob.name: blob for blob in flatten_mappings(unpacked_catalog.blobs.values())}
    unpacked_catalog = replace(unpacked_catalog, blobs=leaves)
    return unpacked_catalog, frozenset(name for names in trainer_names for name in names)


def _require_selection(paired: Pairing, options: DiffOptions) -> None:
    """Raise if the globs select nothing, since the checkpoints would then be reported as equal."""
    unpaired_names = (*paired.a.only, *paired.a.only_leaves, *paired.b.only, *paired.b.only_leaves)
    if (options.include or options.exclude) and not (
        paired.pairs or paired.leaves or unpaired_names
    ):
        raise MappingError(
            "nothing to compare",
            why=f"{format_option('--include')} and {format_option('--exclude')} select no key",
        )


def _compare_values(
    first: Catalog,
    pairs: Sequence[Pair],
    mapping: StateMapping,
    options: DiffOptions,
    progress: StartProgress,
    observe: ObserveWindow | None,
) -> _ElementComparison:
    comparable = [
        pair for pair in pairs if pair.entry.shape == pair.composed.shape and "," not in pair.dtype
    ]
    names = [key for pair in comparable for key in pair.composed.keys]
    located_a = locate_tensors(first, [pair.entry.name for pair in comparable])
    names += [key for pair in mapping.redundant for key in pair.keys]
    located_b = locate_tensors(mapping.catalog, names)
    mapping = replace(mapping, catalog=located_b)
    matching = [
        pair
        for pair in comparable
        if options.quick and _has_equal_checksums(located_a, located_b, pair)
    ]
    skipped = {pair.entry.name for pair in matching}
    remaining = [pair for pair in comparable if pair.entry.name not in skipped]
    total = sum(pair.entry.nbytes for pair in remaining)
    tolerance = None
    if options.atol is not None or options.rtol is not None:
        tolerance = Tolerance(options.atol or 0.0, options.rtol or 0.0)
    bitwise = not has_torch()
    if bitwise:
        _require_bitwise_comparable(remaining, tolerance)
    with progress(total) as advance:
        comparer = WindowComparer(
            map_by_name(located_a), mapping, options.jobs or 0, bitwise, observe=observe
        )
        errors = comparer.compare_elements(remaining, tolerance, advance)
    with open_catalog_reader(located_b) as files:  # data of B that A's layout cannot store
        lost_keys = dict.fromkeys(
            pair.part.key for pair in find_lost_data(files, located_b, mapping.redundant)
        )
        lost_read = files.bytes_read
    read_a, read_b = comparer.bytes_read
    return _ElementComparison(
        errors, len(matching), (read_a, read_b + lost_read), tuple(lost_keys), bitwise
    )


def _require_bitwise_comparable(pairs: Sequence[Pair], tolerance: Tolerance | None) -> None:
    """Raise if torch is missing and comparing bits could report equal numbers as different."""
    instead = f"{format_option('--structure')} compares names, shapes and dtypes without torch"
    if tolerance:
        require_torch("a tolerance", alternative="omit the tolerance to compare bits")
    for pair in pairs:
        if pair.entry.dtype != pair.dtype and not dtypes.NON_NUMERIC_DTYPES & {
            pair.entry.dtype,
            pair.dtype,
        }:
            why = f"`{pair.entry.name}` is {pair.entry.dtype} in A and {pair.dtype} in B"
            require_torch("comparing values of different dtypes", why, alternative=instead)


def _has_equal_checksums(a: Catalog, b: Catalog, pair: Pair) -> bool:
    """Return whether both checkpoints record checksums of the tensor, and these are equal."""
    if not pair.composed.is_rename:
        return False
    stored = b.tensors[pair.composed.sources[0].key]
    return stored.shape == pair.composed.shape and has_equal_checksums(
        a.tensors[pair.entry.name], stored
    )


def _build_difference(pair: Pair, errors: Errors | None) -> TensorDifference:
    entry = pair.entry
    differing = errors if errors and errors.differing else None
    return TensorDifference(
        entry.name,
        pair.sources,
        entry.shape,
        pair.composed.shape,
        entry.dtype,
        pair.dtype,
        differing,
    )


def _list_source_notes(a: Catalog, b: Catalog, options: DiffOptions) -> tuple[str, ...]:
    """Return the notes about reading both checkpoints, including what was not compared."""
    sides_by_note: dict[str, list[str]] = {}
    for side, catalog in (("A", a), ("B", b)):
        notes = list(catalog.notes)
        if options.only == "all":
            unread = {
                "other checkpoints": formats.list_unread_parts(catalog),
                "separate files": formats.list_unread_trainer_files(catalog),
            }
            notes += [
                f"not compared ({kind}): {quote_names(names)}"
                for kind, names in unread.items()
                if names
            ]
        for note in notes:
            sides_by_note.setdefault(note, []).append(side)
    return tuple(f"{' and '.join(sides)}: {note}" for note, sides in sides_by_note.items())


def _list_notes(
    mapping: StateMapping, tensors: Sequence[TensorDifference], bitwise: bool
) -> tuple[str, ...]:
    mixed = [difference.name for difference in tensors if difference.has_several_dtypes]
    notes = [
        f"values of `{name}` were not compared, because B stores it in several dtypes"
        for name in mixed
    ]
    if bitwise and any(difference.values for difference in tensors):
        notes.append(
            f"only bits were compared; torch is required to measure differences: {INSTALL_TORCH}"
        )
    return (*dict.fromkeys((*mapping.notes.get_texts(), *notes)),)


def _list_quantization_notes(
    a: Catalog, b: Catalog, paired: Pairing, options: DiffOptions
) -> tuple[str, ...]:
    """Return a note if only one of the two checkpoints is quantized, else an empty tuple."""
    if options.dequantize is not None or not (paired.a.only or paired.b.only):
        return ()
    quantized_tensors = [find_quantized_tensors(catalog) for catalog in (a, b)]
    if bool(quantized_tensors[0]) == bool(quantized_tensors[1]):
        return ()
    side, schemes = (
        ("A", quantized_tensors[0]) if quantized_tensors[0] else ("B", quantized_tensors[1])
    )
    description = ", ".join(dict.fromkeys(schemes.values()))
    return (
        f"{side} is quantized ({description}); pass {format_option('--dequantize bf16')} to "
        "compare "
        "dequantized values",
    )
