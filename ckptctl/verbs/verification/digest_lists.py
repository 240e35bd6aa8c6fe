"""Readers and writers of checksum lists, such as ``SHA256SUMS`` and Meta's ``checklist.chk``.

The syntax is the same as for ``sha256sum`` and ``md5sum`` in coreutils (``src/cksum.c``). Each line
has the digest, two characters and the file name. A backslash precedes the digest if the name is
escaped. Megatron-Core's
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
from ckptctl.storage.crc import create_hasher, iterate_windows
from ckptctl.storage.files import SourceFiles
from ckptctl.storage.json_reader import read_json
from ckptctl.storage.threads import (
    Advance,
    create_thread_pool,
    get_default_thread_count,
)
from ckptctl.tree import TreePath
from ckptctl.verdict import Severity

SUMS_FILE = "SHA256SUMS"
LIST_ALGORITHMS = {SUMS_FILE: "sha256", "checklist.chk": "md5"}
INTEGRITY_FILE = "integrity.json"
MAX_LIST_BYTES = 100_000_000
_LINE = re.compile(r"(\\?)([0-9a-fA-F]{32,64}) [ *](.+)")
_SHA256 = re.compile("[0-9a-fA-F]{64}")
_ESCAPES = {"\\\\": "\\", "\\n": "\n", "\\r": "\r"}


@dataclass(frozen=True, slots=True)
class FileDigest:
    """Recorded digest of a file.

    *algorithm* is ``sha256``, ``md5`` or ``git-sha1`` (the SHA-1 of a git blob). *severity* is the
    severity of the finding if the file has a different digest.
    """

    list_name: str
    algorithm: str
    file: str
    digest: str
    severity: Severity = "error"


def get_list_algorithms(path: TreePath) -> dict[str, str]:
    """Map the file names that a checksum list of the checkpoint may have to digest algorithms."""
    return {
        **LIST_ALGORITHMS,
        INTEGRITY_FILE: "sha256",
        get_checksum_list_path(path).name: "sha256",
    }


def read_listed_digests(
    files: SourceFiles, path: TreePath
) -> tuple[list[FileDigest], list[Finding]]:
    """Read the checksum lists of the checkpoint at *path*, and return findings about them.

    If the checkpoint is a single file, lines about other files are ignored.
    """
    digests: list[FileDigest] = []
    findings: list[Finding] = []
    if (files.root / INTEGRITY_FILE).is_file():
        megatron_digests = _read_megatron_digests(files)
        digests += megatron_digests
        if not megatron_digests:
            what = "not a checksum list of Megatron-Core"
            findings.append(Finding(what, None, "warning", INTEGRITY_FILE))
    for name, algorithm in get_list_algorithms(path).items():
        if name != INTEGRITY_FILE and (files.root / name).is_file():
            try:
                text = files.read(name, 0, min(files.size(name), MAX_LIST_BYTES)).decode(
                    errors="replace"
                )
            except CkptError as error:
                findings.append(finding_from_error(error, files.root))
                continue
            for number, line in enumerate(text.split("\n"), 1):
                match = _LINE.fullmatch(line)
                if match:
                    digests.append(
                        FileDigest(name, algorithm, _parse_file_name(match), match[2].lower())
                    )
                elif line.strip():
                    # Other programs use other formats next to single files.
                    severity: Severity = "error" if name in LIST_ALGORITHMS else "warning"
                    what = f"line {number} is not a checksum"
                    findings.append(Finding(what, None, severity, name))
    if path.is_file():
        digests = [line for line in digests if line.file == path.name]
    return digests, findings


def _read_megatron_digests(files: SourceFiles) -> list[FileDigest]:
    """Read ``integrity.json``, or return an empty list if Megatron-Core did not write it."""
    try:
        content = read_json(files, INTEGRITY_FILE)
    except CkptError:
        return []
    sums_by_file = content.get("files") if isinstance(content, dict) else None
    if not isinstance(sums_by_file, dict) or not isinstance(content, dict):
        return []
    sums = {name: sum_ for name, sum_ in sums_by_file.items() if isinstance(sum_, str)}
    return [
        FileDigest(INTEGRITY_FILE, "sha256", name, sum_.lower())
        for name, sum_ in sums.items()
        if content.get("algorithm") == "sha256" and _SHA256.fullmatch(sum_)
    ]


def remove_listed_files(text: str, is_removed: Callable[[str], bool]) -> str:
    """Remove the lines of files for which *is_removed* is true from the text of a checksum list."""
    matched = ((line, _LINE.fullmatch(line)) for line in text.split("\n"))
    return "\n".join(
        line for line, match in matched if not match or not is_removed(_parse_file_name(match))
    )


def _parse_file_name(line: re.Match[str]) -> str:
    """Return the unescaped file name in a line of a checksum list."""
    file = re.sub(r"\\[\\nr]", lambda match: _ESCAPES[match[0]], line[3]) if line[1] else line[3]
    return file.removeprefix("./")


def compare_listed_files(
    files: SourceFiles, lines: Sequence[FileDigest], jobs: int | None, advance: Advance | None
) -> tuple[list[Finding], list[str]]:
    """Compare every listed file with its digest.

    Returns:
        Findings, and the names of the files that match.
    """

    def compare_line(line: FileDigest) -> Finding | None:
        try:
            actual = compute_digest(files, line.file, line.algorithm, advance)
        except CkptError as error:
            return finding_from_error(error, files.root)
        if actual == line.digest:
            return None
        why = f"its {line.algorithm} is {actual}, but {line.list_name} lists {line.digest}"
        return Finding("a file does not match its listed checksum", why, line.severity, line.file)

    with create_thread_pool(jobs or get_default_thread_count()) as pool:
        results = list(pool.map(compare_line, lines))
    bad_files = {line.file for line, result in zip(lines, results, strict=True) if result}
    return [r for r in results if r], [line.file for line in lines if line.file not in bad_files]


def compute_digest(files: SourceFiles, name: str, algorithm: str, advance: Advance | None) -> str:
    """Compute the hexadecimal digest of the file *name* with *algorithm*."""
    size = files.size(name)
    digest_hasher = create_hasher(algorithm, size)
    for view in iterate_windows(files, name, 0, size, advance):
        digest_hasher.update(view)
    return digest_hasher.hexdigest()


def require_no_checksum_list(target: TreePath) -> None:
    """Raise if the checksum list *target* exists already."""
    if os.path.lexists(target):
        path = target.parent if target.name == SUMS_FILE else target.with_suffix("")
        compare = format_command("verify", path, options=("--level", "full"))
        raise RefusedError(
            f"`{target.name}` exists already",
            where=str(target),
            why="an existing checksum list is never replaced",
            hint=f"compare the files with it: {compare}",
        )


def get_checksum_list_path(path: TreePath) -> TreePath:
    """Return the path of a checkpoint's checksum list.

    It is inside a checkpoint directory, or next to a checkpoint file.
    """
    return path / SUMS_FILE if path.is_dir() else path.with_name(f"{path.name}.sha256")


def list_checkpoint_files(path: TreePath) -> list[str]:
    """List the names of all files of the checkpoint at *path*, relative to its folder."""
    if path.is_file():
        return [path.name]
    items = (Path(folder) / name for folder, _, names in os.walk(path) for name in names)
    return sorted(str(item.relative_to(path)) for item in items if item != path / SUMS_FILE)
