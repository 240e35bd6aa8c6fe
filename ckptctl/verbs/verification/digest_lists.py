"""Checksum lists of files: ``SHA256SUMS``, Meta's ``checklist.chk`` and others.

The syntax is that of coreutils' ``sha256sum`` and ``md5sum`` (``src/cksum.c``): digest, two
characters, name, with a backslash before the digest if the name is escaped. Megatron-Core's
``integrity.json`` contains ``algorithm`` and ``files``
(``megatron/core/dist_checkpointing/integrity.py``).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptctl.catalog import Finding
from ckptctl.errors import CkptError, RefusedError, format_command
from ckptctl.formats.shared.findings import finding_from_error
from ckptctl.ranks.coordinator import Coordinator, on_first, together
from ckptctl.storage.crc import create_hasher, iterate_windows
from ckptctl.storage.file_system import write_file
from ckptctl.storage.files import SourceFiles, source_files
from ckptctl.storage.json_reader import read_json
from ckptctl.storage.publish import stage_output
from ckptctl.storage.threads import Advance, Watch, create_thread_pool, default_threads
from ckptctl.tree import TreePath
from ckptctl.verbs.verification.structure import root_of
from ckptctl.verdict import Severity

SUMS = "SHA256SUMS"
LISTS = {SUMS: "sha256", "checklist.chk": "md5"}
INTEGRITY = "integrity.json"
MAX_LIST = 100_000_000
_LINE = re.compile(r"(\\?)([0-9a-fA-F]{32,64}) [ *](.+)")
_SHA256 = re.compile("[0-9a-fA-F]{64}")
_ESCAPES = {"\\\\": "\\", "\\n": "\n", "\\r": "\r"}


@dataclass(frozen=True, slots=True)
class FileDigest:
    """Line of a checksum list.

    *algorithm* is ``sha256``, ``md5`` or ``git-sha1``, the digest of a git blob. *severity* is that
    of a finding if the file has another digest.
    """

    list_: str
    algorithm: str
    file: str
    digest: str
    severity: Severity = "error"


def lists_of(path: TreePath) -> dict[str, str]:
    """Return the names of checksum lists for the checkpoint at *path*, with algorithms."""
    return {**LISTS, INTEGRITY: "sha256", target_of(path).name: "sha256"}


def listed_digests(files: SourceFiles, path: TreePath) -> tuple[list[FileDigest], list[Finding]]:
    """Parse the checksum lists of the checkpoint at *path*, and find problems in them.

    For a checkpoint of a single file, lines about other files are ignored.
    """
    found: list[FileDigest] = []
    findings: list[Finding] = []
    if (files.root / INTEGRITY).is_file():
        of_megatron = _of_integrity(files)
        found += of_megatron
        if not of_megatron:
            what = "not a checksum list of Megatron-Core"
            findings.append(Finding(what, None, "warning", INTEGRITY))
    for name, algorithm in lists_of(path).items():
        if name != INTEGRITY and (files.root / name).is_file():
            try:
                text = files.read(name, 0, min(files.size(name), MAX_LIST)).decode(errors="replace")
            except CkptError as error:
                findings.append(finding_from_error(error, files.root))
                continue
            for number, line in enumerate(text.split("\n"), 1):
                match = _LINE.fullmatch(line)
                if match:
                    found.append(FileDigest(name, algorithm, _file_of(match), match[2].lower()))
                elif line.strip():
                    # Other programs use other formats next to single files.
                    severity: Severity = "error" if name in LISTS else "warning"
                    what = f"line {number} is not a checksum"
                    findings.append(Finding(what, None, severity, name))
    if path.is_file():
        found = [line for line in found if line.file == path.name]
    return found, findings


def _of_integrity(files: SourceFiles) -> list[FileDigest]:
    """Parse Megatron-Core's ``integrity.json``, or return nothing for other programs' files."""
    try:
        said = read_json(files, INTEGRITY)
    except CkptError:
        return []
    listed = said.get("files") if isinstance(said, dict) else None
    if not isinstance(listed, dict) or not isinstance(said, dict):
        return []
    sums = {name: sum_ for name, sum_ in listed.items() if isinstance(sum_, str)}
    return [
        FileDigest(INTEGRITY, "sha256", name, sum_.lower())
        for name, sum_ in sums.items()
        if said.get("algorithm") == "sha256" and _SHA256.fullmatch(sum_)
    ]


def without(text: str, gone: Callable[[str], bool]) -> str:
    """Return a checksum list without the files that are *gone*."""
    matched = ((line, _LINE.fullmatch(line)) for line in text.split("\n"))
    return "\n".join(line for line, match in matched if not match or not gone(_file_of(match)))


def _file_of(line: re.Match[str]) -> str:
    """Return the file name in a line, unescaped."""
    file = re.sub(r"\\[\\nr]", lambda match: _ESCAPES[match[0]], line[3]) if line[1] else line[3]
    return file.removeprefix("./")


def check_lists(
    files: SourceFiles, lines: Sequence[FileDigest], jobs: int | None, advance: Advance | None
) -> tuple[list[Finding], list[str]]:
    """Compare every listed file, and return findings and the files that match."""

    def compared(line: FileDigest) -> Finding | None:
        try:
            found = digest(files, line.file, line.algorithm, advance)
        except CkptError as error:
            return finding_from_error(error, files.root)
        if found == line.digest:
            return None
        why = f"its {line.algorithm} is {found}, but {line.list_} lists {line.digest}"
        return Finding("a file does not match its listed checksum", why, line.severity, line.file)

    with create_thread_pool(jobs or default_threads()) as pool:
        results = list(pool.map(compared, lines))
    bad = {line.file for line, result in zip(lines, results, strict=True) if result}
    return [r for r in results if r], [line.file for line in lines if line.file not in bad]


def digest(files: SourceFiles, name: str, algorithm: str, advance: Advance | None) -> str:
    """Compute the digest of a file."""
    size = files.size(name)
    known = create_hasher(algorithm, size)
    for view in iterate_windows(files, name, 0, size, advance):
        known.update(view)
    return known.hexdigest()


def require_room(target: TreePath) -> None:
    """Raise if a checksum list exists already."""
    if os.path.lexists(target):
        path = target.parent if target.name == SUMS else target.with_suffix("")
        compare = format_command("verify", path, options=("--level", "full"))
        raise RefusedError(
            f"`{target.name}` exists already",
            where=str(target),
            why="an existing checksum list is never replaced",
            hint=f"compare the files with it: {compare}",
        )


def target_of(path: TreePath) -> TreePath:
    """Return the path of the checksum list, in a directory or next to a file."""
    return path / SUMS if path.is_dir() else path.with_name(f"{path.name}.sha256")


def members(path: TreePath) -> list[str]:
    """List all files of the checkpoint at *path*, relative to it."""
    if path.is_file():
        return [path.name]
    found = (Path(folder) / name for folder, _, names in os.walk(path) for name in names)
    return sorted(str(item.relative_to(path)) for item in found if item != path / SUMS)


def unlistable(path: TreePath) -> list[Finding]:
    """Return findings about files that no list can name, such as links to other folders."""
    findings: list[Finding] = []
    with source_files(root_of(path)) as files:
        for name in members(path):
            try:
                files.size(name)
            except CkptError as error:
                findings.append(finding_from_error(error, files.root))
    return findings


def write_list(path: TreePath, jobs: int | None, progress: Watch, ranks: Coordinator) -> str:
    """Write the SHA-256 sums of all files of a checkpoint, and return the path of the list.

    The ranks share the reading, and rank 0 writes the list atomically.
    """
    # `ls` reads lists, but does not execute plans.
    from ckptctl.ranks.sharing import portion

    names, target, threads = members(path), target_of(path), jobs or default_threads()
    with source_files(root_of(path)) as files:
        sizes = together(ranks, lambda: {name: files.size(name) for name in names})
        mine = portion(ranks, names, sizes.__getitem__)

        def digests() -> dict[str, str]:
            with progress(sum(sizes.values())) as advance, create_thread_pool(threads) as pool:
                sums = pool.map(lambda name: digest(files, name, "sha256", advance), mine)
                return dict(zip(mine, sums, strict=True))

        parts = ranks.all_gather(together(ranks, digests))
    by_name = {name: sum_ for part in parts for name, sum_ in part.items()}
    content = "".join(_line(by_name[name], name) for name in names)
    on_first(ranks, lambda: _publish(target, content))
    return str(target)


def _publish(target: TreePath, content: str) -> None:
    require_room(target)
    with stage_output(Path(target), single_file=True) as stage:
        write_file(stage.data / target.name, os.fsencode(content))
        stage.publish()


def _line(sum_: str, name: str) -> str:
    escaped = name.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
    return f"{'' if escaped == name else chr(92)}{sum_}  {escaped}\n"
