"""Extraction of single tensors or slices; nothing else is read."""

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
from ckptctl.conversion.leaves import select_metadata, without_hashes
from ckptctl.conversion.recognition.model import ModelRequest, recognize_model
from ckptctl.conversion.recognition.roots import list_roots, parse_root
from ckptctl.conversion.sources import locate_tensors, read_short_values
from ckptctl.errors import (
    CkptError,
    MappingError,
    UsageError,
    find_nearest,
    format_command,
    quote_names,
    spell_option,
)
from ckptctl.numerics.dequantizing import require_uncast
from ckptctl.results import JsonField, Result
from ckptctl.save_load.loading.checks import casts
from ckptctl.save_load.loading.reading import Reading
from ckptctl.save_load.loading.state_mapping import StateMapping, Wanted
from ckptctl.storage.computed import require_torch_for
from ckptctl.storage.outcome import OUT_OF_RANGE, OutOfRange
from ckptctl.storage.paths import redact_path
from ckptctl.tree import TreePath
from ckptctl.units import pluralize
from ckptctl.verbs.extraction.extract_options import ExtractOptions
from ckptctl.verbs.extraction.mapped_source import mapped_source
from ckptctl.verbs.extraction.slices import preview, split_name, take
from ckptctl.verbs.extraction.tensor_files import OVERWRITABLE, Taken, plan_file, write_file


@dataclass(frozen=True, slots=True)
class Extracted:
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
    tensors: Annotated[tuple[Extracted, ...], JsonField("extracted tensors")]
    nbytes: Annotated[int, JsonField("size of the file; 0 if no file was written", name="bytes")]
    bytes_read: Annotated[int, JsonField("tensor bytes read")]
    notes: Annotated[tuple[str, ...], JsonField("further notes")] = ()
    out_of_range: Annotated[Mapping[str, OutOfRange], OUT_OF_RANGE] = field(default_factory=dict)


__all__ = ["ExtractOptions", "Extraction", "extract"]
FEW = 8
"""Maximum number of tensors with a preview."""


def extract(path: str | TreePath, tensor: str, options: ExtractOptions) -> Extraction:
    """Extract a tensor, or the tensors that match a glob, as a file or a preview."""
    with families.use_converter_file(options.converter):
        source = formats.to_existing_path(path)
        catalog, mapping = mapped_source(source, options)
        taken = _taken(mapping, tensor, options)
        wanted = {one.name: Wanted(one.dtype, one.whole, ()) for one in taken}
        chosen = {one.name: mapping.tensors[one.name] for one in taken}
        names = [key for composed in chosen.values() for key in composed.keys]
        if options.dtype is not None:
            require_uncast(mapping.catalog, names)
        mapping.notes.add(*_short(taken))
        mapping = replace(mapping, catalog=locate_tensors(mapping.catalog, names), tensors=chosen)
        reading = Reading(mapping, casts(mapping, wanted, True))
        if options.output is None:
            return _shown(redact_path(path), reading, taken)
        output = Path(options.output)
        target = Path(require_destination(source, output, options.overwrite, OVERWRITABLE).path)
        kind = formats.get_writable_format("hf" if target.suffix == ".safetensors" else "torch")
        notes = mapping.notes
        strings = select_metadata(catalog, [one.output for one in taken], kind, notes)
        plan = plan_file(reading, taken, target, without_hashes(strings, notes))
        if skipped := notes.get_reasons("skipped"):
            notes.add(f"not copied: {quote_names(list(skipped))}")
        require_torch_for(plan, "this extraction")
        done = write_file(plan, target, options)
        found = tuple(_extracted(reading, one) for one in taken)
        return Extraction(
            redact_path(path),
            str(options.output),
            found,
            plan.nbytes,
            done.bytes_read,
            notes.get_texts(),
            done.lost,
        )


def _taken(mapping: StateMapping, tensor: str, options: ExtractOptions) -> list[Taken]:
    there = mapping.tensors
    name, part = (tensor, None) if tensor in there else split_name(tensor)
    if options.slice is not None:
        if part is not None:
            raise UsageError(
                "two slices were given",
                where=f"`{tensor}`",
                why=f"`{part}` after the name, and {spell_option('--slice')}",
                hint="omit one of them",
            )
        name, part = tensor, options.slice
    taken = []
    for key in _matching(mapping, name, options):
        shape = there[key].shape
        dtype = mapping.catalog.tensors[there[key].sources[0].key].dtype
        taken.append(
            Taken(key, choose_cast_dtype(dtype, options.dtype), shape, take(part, shape, key))
        )
    return taken


def _short(taken: Sequence[Taken]) -> Iterator[str]:
    """Yield a note if a slice exceeds the tensor."""
    short = [one for one in taken if one.part.short]
    if short:
        first, dim = short[0], short[0].part.short[0]
        nothing = first.part.box.sizes[dim] == 0
        yield (
            f"the slice of `{first.name}` {'is empty' if nothing else 'is truncated'}: "
            f"dimension {dim} has size {first.whole[dim]:,}"
            + (f"; also for {len(short) - 1:,} more" if short[1:] else "")
        )


def _matching(mapping: StateMapping, glob: str, options: ExtractOptions) -> list[str]:
    """Return the tensors that match a name or glob, with or without the model's prefix."""
    names = mapping.tensors
    prefixes: Sequence[str] = ("", *list_roots(mapping.catalog))
    if options.root is not None:
        own = parse_root(mapping.catalog, options.root) if options.layout is None else ""
        prefixes = (own,)
    for root in prefixes:
        if root + glob in names:
            return [root + glob]
        found = [name for name in names if fnmatchcase(name, root + glob)]
        if found:
            return found
    raise no_tensor(mapping.catalog, list(names), glob, options)


def _shown(path: str, reading: Reading, taken: Sequence[Taken]) -> Extraction:
    found, read = [], 0
    for one in taken:
        text = None
        if len(taken) <= FEW:
            text, nbytes = preview(reading, one.name, one.part, one.whole, one.dtype)
            read += nbytes
        found.append(replace(_extracted(reading, one), preview=text))
    return Extraction(path, None, tuple(found), 0, read, reading.mapping.notes.get_texts())


def _extracted(reading: Reading, one: Taken) -> Extracted:
    sources = tuple(reading.mapping.tensors[one.name].keys)
    nbytes = one.part.box.numel * dtypes.itemsize(one.dtype)
    return Extracted(one.name, sources, one.dtype, one.part.shape, one.whole, nbytes)


def no_tensor(
    catalog: Catalog, names: Collection[str], asked: str, options: ExtractOptions
) -> MappingError:
    """Build the error for a name or glob without a match."""
    leaf = next((r + asked for r in ("", *list_roots(catalog)) if r + asked in catalog.blobs), None)
    if leaf is not None:
        value = read_short_values(catalog, [leaf]).get(leaf)
        return MappingError(
            f"`{leaf}` is not a tensor",
            where=catalog.path,
            why=f"its value is {value}" if value else "it is an object",
            hint=f"list non-tensor values with {format_command('inspect', catalog.path)}",
        )
    plain = asked.strip("*")
    holding = [name for name in names if plain and plain in name]
    close = min(holding, key=len, default=None) or find_nearest(asked, list(names))
    return MappingError(
        f"no tensor matches `{asked}`",
        where=catalog.path,
        why=f"found {pluralize(len(names), 'tensor')}, such as {quote_names(list(names), 2)}",
        hint=_layout_hint(catalog, asked, options)
        or (
            f"did you mean `{close}`?"
            if close
            else f"list all tensors with {format_command('inspect', catalog.path, options=['--tensors'])}"
        ),
    )


def _layout_hint(catalog: Catalog, asked: str, options: ExtractOptions) -> str | None:
    """Return a hint if the key belongs to another layout of the model type."""
    if options.layout is not None:
        own = any(root + asked in catalog.tensors for root in ("", *list_roots(catalog)))
        return (
            f"omit {spell_option('--layout')}: this key belongs to the layout of the checkpoint"
            if own
            else None
        )
    found = next(_layouts(catalog, asked, options), None)
    return found and f"add {spell_option(f'--layout {found}')}: this key belongs to that layout"


def _layouts(catalog: Catalog, asked: str, options: ExtractOptions) -> Iterator[str]:
    request = ModelRequest(options.model_type, options.from_layout, options.root)
    with suppress(CkptError):
        known = recognize_model(catalog, request=request)
        for family in map(families.family, known.candidates):
            for name in family.layouts:
                table = family.get_layout(name).table
                if name != known.layout and next(table.iterate_meanings(asked), None) is not None:
                    yield name
