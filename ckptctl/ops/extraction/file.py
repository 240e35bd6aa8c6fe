"""From what was asked for to a file of tensors: the plan, and carrying it out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ckptctl.ops.conversion.sources import sources_of
from ckptctl.ops.conversion.transfers import transfers
from ckptctl.ops.extraction.options import ExtractOptions, Taken
from ckptctl.ops.extraction.tensor_files import OVERWRITABLE, lay_out
from ckptctl.ops.loading.reading import Reading
from ckptctl.planner.plan import Plan
from ckptctl.storage.destinations import require_space
from ckptctl.storage.execution.executor import execute
from ckptctl.storage.execution.options import Execution, ExecutionOptions
from ckptctl.storage.out_of_range import require_in_range
from ckptctl.storage.publish import staging


def plan_file(
    reading: Reading, taken: Sequence[Taken], target: Path, metadata: Mapping[str, str]
) -> Plan:
    """Plan the one file that tensors go into.

    Args:
        reading: What can be read.
        taken: What of it is wanted.
        target: The file.
        metadata: Free-form strings, for files that have a place for them.

    Raises:
        UsageError: Its name says no format.
        RefusedError: It cannot hold one of the dtypes.
    """
    output = lay_out(target, [one.output for one in taken], metadata)
    catalog = reading.mapping.catalog
    parts = {one.name: one.part.box for one in taken}
    boxes = {
        name: tuple(place._replace(box=parts[name]) for place in places)
        for name, places in output.boxes.items()
    }
    kinds = {one.name: one.dtype for one in taken}
    found = transfers(reading.tensors, catalog.tensors, replace(output, boxes=boxes), kinds)
    copies = tuple(copy for copy in found if copy.target.operands)
    computed, sources = sources_of(catalog.root, copies, catalog.computed)
    return Plan(
        source_root=catalog.root,
        sources=sources,
        target=str(target),
        single_file=True,
        files=output.files,
        records=output.records,
        transfers=copies,
        raw_copies=(),
        digest="",
        computed=computed,
        opened=catalog.opened,
    )


def write_file(plan: Plan, target: Path, options: ExtractOptions) -> Execution:
    """Write and publish the file, whole or not at all.

    Raises:
        RefusedError: It exists, or does not fit on the disk; or elements do not fit into their
            dtype.
        DamagedError: The checkpoint contradicts its checksums.
        ChangedError: The checkpoint was written to meanwhile.
        StorageError: A read or a write failed.
    """
    how = ExecutionOptions(jobs=options.jobs)
    with staging(
        target, overwrite=options.overwrite, single_file=True, is_checkpoint=OVERWRITABLE
    ) as stage:
        require_space(stage.data, plan.nbytes)
        done = execute(plan, stage.data, how, lambda _: None)
        if not options.allow_overflow:
            require_in_range(done.lost, "`--allow-overflow` writes them as they are")
        stage.publish()
    return done
