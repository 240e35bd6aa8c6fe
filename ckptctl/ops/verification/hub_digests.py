"""What the Hugging Face Hub says of its files, and said of a download, as its cache keeps it.

Source: huggingface_hub 2.4.0. ``_local_folder.py``: beside files that were downloaded to a folder,
``.cache/huggingface/download/NAME.metadata`` has three lines: commit, ETag, time. In the cache
(``file_download.py``) ``models--ORG--NAME/snapshots/COMMIT/NAME`` is a link to ``blobs/ETAG``,
which ``utils/_shared_blobs.py`` may make a link in turn. The ETag is the SHA-256 of a file in LFS
or Xet, and git's own SHA-1 of any other (``utils/_verification.py``).
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path

from ckptctl.catalog import Finding
from ckptctl.errors import CkptError
from ckptctl.ops.verification.digest_lists import Listed
from ckptctl.storage.contained import real_path
from ckptctl.storage.crc import algorithm_of
from ckptctl.storage.files import SourceFiles, hub_repository, source_files

DOWNLOADS = ".cache/huggingface/download"


def unfinished(root: Path) -> Iterator[Path]:
    """Yield the parts of files whose download to *root* was interrupted."""
    yield from sorted((root / DOWNLOADS).rglob("*.incomplete"))
    repository = hub_repository(real_path(root))
    if repository is not None:
        yield from sorted((repository / "blobs").glob("*.incomplete"))


METADATA = ".metadata"
MAX_METADATA = 4096


def downloaded(files: SourceFiles, used: Collection[str]) -> tuple[list[Listed], list[Finding]]:
    """Return what is known of files of the Hub, and what is wrong with that.

    Args:
        files: Files of the checkpoint.
        used: Its data files; other files count in the same directories, and at the top.
    """
    folders = {Path(), *(Path(name).parent for name in used)}
    if not files.local:
        return [line for folder in sorted(folders) for line in _told(files, folder)], []
    found: list[Listed] = []
    findings: list[Finding] = []
    for folder in sorted(folders):
        found += _linked(files.root, folder)
        for record, name in _recorded(files.root, folder):
            line = _read(record, files.root / name, name)
            if line is None:
                what = "what is recorded of a download cannot be read"
                findings.append(Finding(what, None, "warning", str(record)))
            else:
                found += [line] if line.digest else []
    return found, findings


def _told(files: SourceFiles, folder: Path) -> Iterator[Listed]:
    """Yield the files behind a URL whose place says what their digest is."""
    for item in sorted((files.root / folder).iterdir()):
        name = str(folder / item.name)
        digest = files.digest(name) if item.is_file() else None
        algorithm = algorithm_of(digest or "")
        if digest and algorithm:
            yield Listed("the Hub", algorithm, name, digest)


def _linked(root: Path, folder: Path) -> Iterator[Listed]:
    """Yield the files of a snapshot in the cache; the name of its blob is the ETag of a file."""
    real = real_path(root)
    repository = hub_repository(real)
    if repository is None or not (real / folder).is_dir():
        return
    for item in sorted((real / folder).iterdir()):
        if item.is_symlink() and item.is_file():
            blob = Path(os.path.normpath(item.parent / item.readlink()))
            algorithm = algorithm_of(blob.name)
            if blob.parent == repository / "blobs" and algorithm:
                yield Listed("the Hub's cache", algorithm, str(folder / item.name), blob.name)


def _recorded(root: Path, folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield the record of each downloaded file in a folder, and the file below *root*.

    The folder that was downloaded to may be one above: repositories have folders, too.
    """
    real = real_path(root)
    for top in (real, *real.parents):
        records = top / DOWNLOADS / (real / folder).relative_to(top)
        for record in sorted(records.glob(f"*{METADATA}")):
            name = str(folder / record.name.removesuffix(METADATA))
            if (root / name).is_file():
                yield record, name


def _read(record: Path, file: Path, name: str) -> Listed | None:
    """Return what *record* says of *file*; None: nothing that can be understood.

    A file in git that was changed after its download is somebody's own; one in LFS never is.
    """
    try:
        with source_files(record.parent) as files:
            size = min(files.size(record.name), MAX_METADATA)
            _, etag, time, *_ = files.read(record.name, 0, size).decode().split("\n")
        changed = file.stat().st_mtime - 1 > float(time)
    except (CkptError, ValueError, OSError):
        return None
    algorithm = algorithm_of(etag)
    if algorithm is None:
        return Listed(str(record), "", name, "")
    own = changed and algorithm != "sha256"
    return Listed(str(record), algorithm, name, etag, "warning" if own else "error")
