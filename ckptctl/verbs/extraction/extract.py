"""Extraction of selected tensors or slices. The data of other tensors is not read."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

from ckptctl import dtypes, families, formats
from ckptctl.catalog import Catalog
from ckptctl.conversion.contents import choose_cast_dtype
from ckptctl.conversion.destinations import require_destination
from ckptctl.conversion.leaves import remove_hashes, select_metadata
from ckptctl.conversion.recognition.model import ModelRequest, recognize_model
from ckptctl.conversion.recognition.roots import list_possible_roots, parse_root
from ckptctl.conversion.sources import locate_tensors, read_short_values
from ckptctl.errors import (
    CkptError,
    MappingError,
    UsageError,
    find_nearest,
    format_command,
    format_option,
    quote_names,
)
from ckptctl.numerics.dequantizing import require_quantized_uncast
from ckptctl.results import JsonField, Result
from ckptctl.save_load.loading.checks import find_casts
from ckptctl.save_load.loading.reading import PreparedRead
from ckptctl.save_load.loading.state_mapping import RequestedTensor, StateMapping
from ckptctl.storage.computed import require_packages_for
from ckptctl.storage.outcome import OUT_OF_RANGE, OutOfRange
from ckptctl.storage.paths import redact_path
from ckptctl.tree import TreePath
from ckptctl.units import pluralize
from ckptctl.verbs.extraction.extract_options import ExtractOptions
from ckptctl.verbs.extraction.mapped_source import open_mapped_source
from ckptctl.verbs.extraction.slices import parse_slice, preview_slice, split_name
from ckptctl.verbs.extraction.tensor_files import (
    REPLACEABLE_TENSOR_FILE,
    SelectedTensor,
    plan_tensor_file,
    write_tensor_file,
)


@dataclass(frozen=True, slots=True)
class ExtractedTensor:
    """Extracted tensor or slice."""

    name: Annotated[str, JsonField("name in the requested layout")]
    sources: Annotated[tuple[str, ...], JsonField("names in the checkpoint")]
    dtype: Annotated[str, JsonField("dtype after the cast")]
    shape: Annotated[tuple[int, ...], JsonField("shape of the extracted slice")]
    whole: Annotated[tuple[int, ...], JsonField("shape of the whole tensor")]
    nbytes: Annotated[int, JsonField("bytes of the extracted slice", name="bytes")]
    preview: Annotated[
        str | None,
        JsonField(
            "first and last values as text; null if a file was written or several "
            "tensors were named"
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class Extraction(Result):
    """Result of an extraction."""

    source: Annotated[str, JsonField("path of the checkpoint as given")]
    output: Annotated[str | None, JsonField("written file")]
    tensors: Annotated[tuple[ExtractedTensor, ...], JsonField("extracted tensors")]
    nbytes: Annotated[int, JsonField("size of the file; 0 if no file was written", name="bytes")]
    bytes_read: Annotated[int, JsonField("tensor bytes read")]
    notes: Annotated[tuple[str, ...], JsonField("further notes")] = ()
    out_of_range: Annotated[Mapping[str, OutOfRange], OUT_OF_RANGE] = field(default_factory=dict)


__all__ = ["ExtractOptions", "Extraction", "extract_tensors"]
MAX_PREVIEWS = 8
"""Maximum number of extracted tensors of which a preview is shown."""


def extract_tensors(path: str | TreePath, tensor: str, options: ExtractOptions) -> Extraction:
    """Extract the tensors that match a name or glob, and write them to a file or preview them."""
    with families.use_converter_file(options.converter):
        source = formats.to_existing_path(path)
        catalog, mapping = open_mapped_source(source, options)
        selection = _select_tensors(mapping, tensor, options)
        targets = {
            selected.name: RequestedTensor(selected.dtype, selected.full_shape, ())
            for selected in selection
        }
        composed_tensors = {selected.name: mapping.tensors[selected.name] for selected in selection}
        names = [key for composed in composed_tensors.values() for key in composed.keys]
        if options.dtype is not None:
            require_quantized_uncast(mapping.catalog, names, options.dtype)
        mapping.notes.add(*_iterate_truncation_notes(selection))
        mapping = replace(
            mapping, catalog=locate_tensors(mapping.catalog, names), tensors=composed_tensors
        )
        reading = PreparedRead(mapping, find_casts(mapping, targets, True))
        if options.output is None:
            return _preview_tensors(redact_path(path), reading, selection)
        output = Path(options.output)
        target = Path(
            require_destination(source, output, options.overwrite, REPLACEABLE_TENSOR_FILE).path
        )
        kind = formats.get_writable_format("hf" if target.suffix == ".safetensors" else "torch")
        notes = mapping.notes
        strings = select_metadata(catalog, [selected.output for selected in selection], kind, notes)
        plan = plan_tensor_file(reading, selection, target, remove_hashes(strings, notes))
        if skipped := notes.get_reasons("skipped"):
            notes.add(f"not copied: {quote_names(list(skipped))}")
        require_packages_for(plan, "this extraction")
        execution = write_tensor_file(plan, target, options)
        extracted = tuple(_describe_tensor(reading, selected) for selected in selection)
        return Extraction(
            redact_path(path),
            str(options.output),
            extracted,
            plan.nbytes,
            execution.bytes_read,
            notes.get_texts(),
            execution.lost,
        )


def _select_tensors(
    mapping: StateMapping, tensor: str, options: ExtractOptions
) -> list[SelectedTensor]:
    tensors = mapping.tensors
    name, part = (tensor, None) if tensor in tensors else split_name(tensor)
    if options.slice is not None:
        if part is not None:
            raise UsageError(
                "two slices were given",
                where=f"`{tensor}`",
                why=f"`{part}` after the name, and {format_option('--slice')}",
                hint="omit one of them",
            )
        name, part = tensor, options.slice
    selection = []
    for key in _find_matching_names(mapping, name, options):
        shape = tensors[key].shape
        dtype = mapping.catalog.tensors[tensors[key].sources[0].key].dtype
        selection.append(
            SelectedTensor(
                key, choose_cast_dtype(dtype, options.dtype), shape, parse_slice(part, shape, key)
            )
        )
    return selection


def _iterate_truncation_notes(selection: Sequence[SelectedTensor]) -> Iterator[str]:
    """Yield a note for each slice that extends beyond its tensor and was truncated."""
    truncated = [selected for selected in selection if selected.selection.truncated_dims]
    if truncated:
        first, dim = truncated[0], truncated[0].selection.truncated_dims[0]
        nothing = first.selection.box.sizes[dim] == 0
        yield (
            f"the slice of `{first.name}` {'is empty' if nothing else 'is truncated'}: "
            f"dimension {dim} has size {first.full_shape[dim]:,}"
            + (f"; also for {len(truncated) - 1:,} more" if truncated[1:] else "")
        )


def _find_matching_names(mapping: StateMapping, glob: str, options: ExtractOptions) -> list[str]:
    """Return the names of tensors that match *glob*, with or without the model's key prefix."""
    names = mapping.tensors
    prefixes: Sequence[str] = ("", *list_possible_roots(mapping.catalog))
    if options.root is not None:
        model_prefix = parse_root(mapping.catalog, options.root) if options.layout is None else ""
        prefixes = (model_prefix,)
    for root in prefixes:
        if root + glob in names:
            return [root + glob]
        matches = [name for name in names if fnmatchcase(name, root + glob)]
        if matches:
            return matches
    raise no_matching_tensor_error(mapping.catalog, list(names), glob, options)


def _preview_tensors(
    path: str, reading: PreparedRead, selection: Sequence[SelectedTensor]
) -> Extraction:
    extracted, read = [], 0
    for selected in selection:
        text = None
        if len(selection) <= MAX_PREVIEWS:
            text, nbytes = preview_slice(
                reading, selected.name, selected.selection, selected.full_shape, selected.dtype
            )
            read += nbytes
        extracted.append(replace(_describe_tensor(reading, selected), preview=text))
    return Extraction(path, None, tuple(extracted), 0, read, reading.mapping.notes.get_texts())


def _describe_tensor(reading: PreparedRead, selected: SelectedTensor) -> ExtractedTensor:
    sources = tuple(reading.mapping.tensors[selected.name].keys)
    nbytes = selected.selection.box.numel * dtypes.get_itemsize(selected.dtype)
    return ExtractedTensor(
        selected.name,
        sources,
        selected.dtype,
        selected.selection.shape,
        selected.full_shape,
        nbytes,
    )


def no_matching_tensor_error(
    catalog: Catalog, names: Collection[str], requested_name: str, options: ExtractOptions
) -> MappingError:
    """Build the error for a requested name or glob that matches no tensor."""
    leaf = next(
        (
            r + requested_name
            for r in ("", *list_possible_roots(catalog))
            if r + requested_name in catalog.blobs
        ),
        None,
    )
    if leaf is not None:
        value = read_short_values(catalog, [leaf]).get(leaf)
        return MappingError(
            f"`{leaf}` is not a tensor",
            where=catalog.path,
            why=f"its value is {value}" if value else "it is an object",
            hint=f"list non-tensor values with {format_command('inspect', catalog.path)}",
        )
    fragment = requested_name.strip("*")
    containing = [name for name in names if fragment and fragment in name]
    close = min(containing, key=len, default=None) or find_nearest(requested_name, list(names))
    return MappingError(
        f"no tensor matches `{requested_name}`",
        where=catalog.path,
        why=f"found {pluralize(len(names), 'tensor')}, such as {quote_names(list(names), 2)}",
        hint=_build_layout_hint(catalog, requested_name, options)
        or (
            f"did you mean `{close}`?"
            if close
            else "list all tensors with "
            f"{format_command('inspect', catalog.path, options=['--tensors'])}"
        ),
    )


def _build_layout_hint(
    catalog: Catalog, requested_name: str, options: ExtractOptions
) -> str | None:
    """Return a hint if the key belongs to another layout of the model type, else None."""
    if options.layout is not None:
        is_stored = any(
            root + requested_name in catalog.tensors for root in ("", *list_possible_roots(catalog))
        )
        return (
            f"omit {format_option('--layout')}: this key belongs to the layout of the checkpoint"
            if is_stored
            else None
        )
    layout = next(_iterate_layouts(catalog, requested_name, options), None)
    return layout and f"add {format_option(f'--layout {layout}')}: this key belongs to that layout"


def _iterate_layouts(
    catalog: Catalog, requested_name: str, options: ExtractOptions
) -> Iterator[str]:
    request = ModelRequest(options.model_type, options.from_layout, options.root)
    with suppress(CkptError):
        model = recognize_model(catalog, request=request)
        for family in map(families.family, model.candidates):
            for name in family.layouts:
                table = family.get_layout(name).table
                if (
                    name != model.layout
                    and next(table.iterate_matches(requested_name), None) is not None
                ):
                    yield name
