"""What the executor does for a conversion: the files, the copies, and what they are read from."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptctl.catalog import Catalog, Computed, made_of
from ckptctl.file_identity import FileIdentity
from ckptctl.formats.assets import kind_of
from ckptctl.formats.base import Output, OutputTensor
from ckptctl.ops.conversion.digest import digest_of
from ckptctl.ops.conversion.documents import Papers
from ckptctl.ops.conversion.manifest import manifest
from ckptctl.ops.conversion.source_checks import with_checks
from ckptctl.ops.conversion.sources import identities, sources_of
from ckptctl.ops.conversion.transfers import transfers
from ckptctl.ops.recognition.recognise import Recognition
from ckptctl.planner.mapping.mapped import MappedTensor
from ckptctl.planner.plan import Plan


@dataclass(frozen=True, slots=True)
class LaidOut:
    """What will be written, and where.

    Attributes:
        mapped: Where the elements of each output tensor come from.
        tensors: The output tensors.
        output: How the format lays them out.
        beside: Configuration and side files.
        destination: Absolute path of the output.
        single_file: Whether the output is one file.
        metadata: The strings that its files carry.
    """

    mapped: Sequence[MappedTensor]
    tensors: tuple[OutputTensor, ...]
    output: Output
    beside: Papers
    destination: Path
    single_file: bool
    metadata: Mapping[str, str]


def executable(
    catalog: Catalog, laid: LaidOut, *, checksum: bool, provenance: Mapping[str, object]
) -> Plan:
    """Return the plan that writes an output.

    Args:
        catalog: The source; the bytes of what is needed of it are found.
        laid: The output.
        checksum: Whether checksums are computed, and a manifest written.
        provenance: What the manifest says of the source.
    """
    output, beside = laid.output, laid.beside
    by_name = {tensor.name: tensor.dtype for tensor in laid.tensors}
    copies = tuple(transfers(laid.mapped, catalog.tensors, output, by_name))
    raw = (*output.raw_copies, *beside.copies)
    files = (*output.files, *beside.files)
    computed, sources = sources_of(catalog.root, copies, catalog.computed, output.raw_copies)
    read = dict.fromkeys(view.key for item in laid.mapped for view in item.sources)
    entries = [catalog.tensors[name] for name in read]
    copies, checks = with_checks(catalog.root, entries, copies, computed)
    contents = {**beside.contents, "__metadata__": repr(sorted(laid.metadata.items())).encode()}
    digest = digest_of(checksum, files, output.records, copies, raw, contents, computed, checks)
    if checksum and not laid.single_file:
        others = (file for file in beside.files if file.path not in beside.contents)
        carried = {file.path: file.size for file in others if kind_of(file.path) is None}
        head = {"source": provenance, "plan": digest, **({"carried": carried} if carried else {})}
        files = (*files, manifest(head, laid.tensors, output.boxes, output.records))
    return Plan(
        source_root=catalog.root,
        sources=sources,
        target=str(laid.destination),
        single_file=laid.single_file,
        files=files,
        records=output.records,
        transfers=copies,
        raw_copies=raw,
        digest=digest,
        computed=computed,
        inputs=_inputs(catalog.root, computed),
        checks=checks,
        opened=catalog.opened,
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


def _inputs(root: str, computed: Mapping[str, Computed]) -> dict[tuple[str, str], FileIdentity]:
    """Return what virtual files are made of beside the source: an adapter's files."""
    found: dict[tuple[str, str], FileIdentity] = {}
    for place, file in sorted(made_of(computed)):
        if place != root:
            found[place, file] = identities(place, (file,))[file]
    return found
