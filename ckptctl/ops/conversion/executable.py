"""What the executor does for a conversion: the files, the copies, and what they are read from."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from ckptctl.catalog import Catalog, Computed, is_computed, made_of, reached
from ckptctl.formats.base import Output, OutputTensor, WritableFormat
from ckptctl.ops.conversion.digest import digest_of
from ckptctl.ops.conversion.documents import Papers
from ckptctl.ops.conversion.manifest import manifest
from ckptctl.ops.conversion.source_checks import with_checks
from ckptctl.ops.conversion.transfers import transfers
from ckptctl.ops.recognition.recognise import Recognition
from ckptctl.planner.mapping.mapped import MappedTensor
from ckptctl.planner.plan import FileIdentity, Plan, RawCopy, Transfer
from ckptctl.storage.files import SourceFiles


def executable(
    catalog: Catalog,
    mapped: Sequence[MappedTensor],
    tensors: Sequence[OutputTensor],
    output: Output,
    beside: Papers,
    *,
    target: WritableFormat,
    destination: Path,
    checksum: bool,
    provenance: Mapping[str, object],
) -> Plan:
    """Return the plan that writes *output*.

    Args:
        catalog: The source; the bytes of what is needed of it are found.
        mapped: Where the elements of each output tensor come from.
        tensors: The output tensors.
        output: How the format lays them out.
        beside: Configuration and side files.
        target: The format.
        destination: Absolute path of the output.
        checksum: Whether checksums are computed, and a manifest written.
        provenance: What the manifest says of the source.
    """
    by_name = {tensor.name: tensor.dtype for tensor in tensors}
    copies = tuple(transfers(mapped, catalog.tensors, output, by_name))
    raw = (*output.raw_copies, *beside.copies)
    files = (*output.files, *beside.files)
    computed = _computed(catalog, copies)
    read = dict.fromkeys(view.key for item in mapped for view in item.sources)
    entries = [catalog.tensors[name] for name in read]
    copies, checks = with_checks(catalog.root, entries, copies, computed)
    digest = digest_of(
        checksum, files, output.records, copies, raw, beside.contents, computed, checks
    )
    if checksum and not target.single_file:
        head = {"source": provenance, "plan": digest}
        files = (*files, manifest(head, tensors, output.boxes, output.records))
    return Plan(
        source_root=catalog.root,
        sources=_sources(catalog.root, copies, output.raw_copies, computed),
        target=str(destination),
        single_file=target.single_file,
        files=files,
        records=output.records,
        transfers=copies,
        raw_copies=raw,
        digest=digest,
        computed=computed,
        inputs=_inputs(catalog.root, computed),
        checks=checks,
    )


def provenance(catalog: Catalog, known: Recognition, missing: Collection[str]) -> dict[str, object]:
    """Return what the manifest of the output says of where it comes from."""
    return {
        "name": Path(catalog.path).name.encode(errors="replace").decode(),
        "format": catalog.format,
        "layout": known.layout,
        "model_type": known.model_type,
        **({"missing": list(missing)} if missing else {}),
    }


def _computed(catalog: Catalog, copies: Sequence[Transfer]) -> dict[str, Computed]:
    """Return the virtual files that transfers read, and those that these are made of."""
    names = (operand.file for copy in copies for operand in copy.source.operands)
    return reached(catalog.computed, names)


def _sources(
    root: str,
    copies: Sequence[Transfer],
    raw: Sequence[RawCopy],
    computed: Mapping[str, Computed],
) -> dict[str, FileIdentity]:
    read = dict.fromkeys(o.file for copy in copies for o in copy.source.operands)
    names = {name: None for name in read if not is_computed(name)}
    names |= dict.fromkeys(sorted(file for place, file in made_of(computed) if place == root))
    names |= dict.fromkeys(item.source for item in raw)
    with SourceFiles(root) as files:
        return {name: files.identity(name) for name in names}


def _inputs(root: str, computed: Mapping[str, Computed]) -> dict[tuple[str, str], FileIdentity]:
    """Return what virtual files are made of beside the source: an adapter's files."""
    found: dict[tuple[str, str], FileIdentity] = {}
    for place, file in sorted(made_of(computed)):
        if place != root:
            with SourceFiles(place) as files:
                found[place, file] = files.identity(file)
    return found
