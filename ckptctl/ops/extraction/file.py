"""From what was asked for to a file of tensors: the plan, and carrying it out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ckptctl.catalog import Catalog, is_computed, made_of, reached
from ckptctl.ops.conversion.transfers import transfers
from ckptctl.ops.extraction.options import ExtractOptions, Taken
from ckptctl.ops.extraction.tensor_files import lay_out, overwritable
from ckptctl.ops.loading.reading import Reading
from ckptctl.planner.plan import FileIdentity, Plan
from ckptctl.storage.destinations import require_space
from ckptctl.storage.execution.executor import execute
from ckptctl.storage.execution.options import ExecutionOptions
from ckptctl.storage.files import SourceFiles
from ckptctl.storage.publish import staging


def plan_file(reading: Reading, taken: Sequence[Taken], target: Path) -> Plan:
    """Plan the one file that tensors go into.

    Args:
        reading: What can be read.
        taken: What of it is wanted.
        target: The file.

    Raises:
        UsageError: Its name says no format.
        RefusedError: It cannot hold one of the dtypes.
    """
    output = lay_out(target, [one.output for one in taken])
    catalog = reading.mapping.catalog
    parts = {one.name: one.part.box for one in taken}
    boxes = {
        name: tuple(place._replace(box=parts[name]) for place in places)
        for name, places in output.boxes.items()
    }
    kinds = {one.name: one.dtype for one in taken}
    found = transfers(reading.tensors, catalog.tensors, replace(output, boxes=boxes), kinds)
    copies = tuple(copy for copy in found if copy.target.operands)
    read = dict.fromkeys(o.file for copy in copies for o in copy.source.operands)
    computed = reached(catalog.computed, read)
    files = {file for root, file in made_of(computed) if root == catalog.root}
    files |= {file for file in read if not is_computed(file)}
    return Plan(
        source_root=catalog.root,
        sources=_identities(catalog, files),
        target=str(target),
        single_file=True,
        files=output.files,
        records=output.records,
        transfers=copies,
        raw_copies=(),
        digest="",
        computed=computed,
    )


def _identities(catalog: Catalog, files: set[str]) -> dict[str, FileIdentity]:
    with SourceFiles(catalog.root) as opened:
        return {file: opened.identity(file) for file in sorted(files)}


def write_file(plan: Plan, target: Path, options: ExtractOptions) -> int:
    """Write and publish the file, whole or not at all; return the bytes that were read.

    Raises:
        RefusedError: It exists, or does not fit on the disk.
        DamagedError: The checkpoint changed meanwhile, or contradicts its checksums.
        StorageError: A read or a write failed.
    """
    how = ExecutionOptions(jobs=options.jobs)
    with staging(
        target, overwrite=options.overwrite, single_file=True, is_checkpoint=overwritable
    ) as stage:
        require_space(stage.data, plan.nbytes)
        read = execute(plan, stage.data, how, lambda _: None).bytes_read
        stage.publish()
    return read
