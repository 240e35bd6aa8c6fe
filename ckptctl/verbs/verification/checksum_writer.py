"""Writer of the checksum list of a checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

from ckptctl.catalog import Finding
from ckptctl.errors import CkptError
from ckptctl.formats.shared.findings import finding_from_error
from ckptctl.ranks.coordinator import RankCollectives, run_on_all_ranks, run_on_rank_zero
from ckptctl.ranks.sharing import select_rank_share
from ckptctl.storage.file_system import write_file
from ckptctl.storage.files import source_files
from ckptctl.storage.publish import stage_output
from ckptctl.storage.threads import StartProgress, create_thread_pool, get_default_thread_count
from ckptctl.tree import TreePath
from ckptctl.verbs.verification.digest_lists import (
    compute_digest,
    get_checksum_list_path,
    list_checkpoint_files,
    require_no_checksum_list,
)
from ckptctl.verbs.verification.structure import get_checkpoint_folder


def find_unlistable_files(path: TreePath) -> list[Finding]:
    """Return findings about files that a checksum list cannot cover, such as outside links."""
    findings: list[Finding] = []
    with source_files(get_checkpoint_folder(path)) as files:
        for name in list_checkpoint_files(path):
            try:
                files.size(name)
            except CkptError as error:
                findings.append(finding_from_error(error, files.root))
    return findings


def write_checksum_list(
    path: TreePath, jobs: int | None, progress: StartProgress, ranks: RankCollectives
) -> str:
    """Write the SHA-256 sums of all files of a checkpoint, and return the path of the list.

    The ranks share the reading, and rank 0 writes the list atomically.
    """
    names, target, threads = (
        list_checkpoint_files(path),
        get_checksum_list_path(path),
        jobs or get_default_thread_count(),
    )
    with source_files(get_checkpoint_folder(path)) as files:
        sizes = run_on_all_ranks(ranks, lambda: {name: files.size(name) for name in names})
        own_names = select_rank_share(ranks, names, sizes.__getitem__)

        def compute_digests() -> dict[str, str]:
            with progress(sum(sizes.values())) as advance, create_thread_pool(threads) as pool:
                sums = pool.map(
                    lambda name: compute_digest(files, name, "sha256", advance), own_names
                )
                return dict(zip(own_names, sums, strict=True))

        parts = ranks.all_gather(run_on_all_ranks(ranks, compute_digests))
    by_name = {name: sum_ for part in parts for name, sum_ in part.items()}
    content = "".join(_format_line(by_name[name], name) for name in names)
    run_on_rank_zero(ranks, lambda: _publish_list(target, content))
    return str(target)


def _publish_list(target: TreePath, content: str) -> None:
    require_no_checksum_list(target)
    with stage_output(Path(target), single_file=True) as stage:
        write_file(stage.data / target.name, os.fsencode(content))
        stage.publish()


def _format_line(sum_: str, name: str) -> str:
    escaped = name.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
    return f"{'' if escaped == name else chr(92)}{sum_}  {escaped}\n"
