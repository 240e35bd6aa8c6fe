"""Checks of files around a checkpoint, such as leftovers and download records of the Hub.

Source: huggingface_hub 2.4.0. For files downloaded to a folder (``_local_folder.py``),
``.cache/huggingface/download/NAME.metadata`` has three lines: commit, ETag, time. In the cache
(``file_download.py``), ``models--ORG--NAME/snapshots/COMMIT/NAME`` is a link to ``blobs/ETAG``,
which ``utils/_shared_blobs.py`` may turn into another link. For a file in LFS or Xet,
the ETag is its SHA-256. For any other file, it is the SHA-1 of the git blob
(``utils/_verification.py``).
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path, PurePath

from ckptctl import formats
from ckptctl.catalog import Catalog, Finding
from ckptctl.errors import CkptError
from ckptctl.formats.base import Listing
from ckptctl.formats.shared.tags import LATEST, LATEST_UNIVERSAL, read_pointer
from ckptctl.formats.sidecar_files import list_trainer_files
from ckptctl.storage.crc import find_digest_algorithm
from ckptctl.storage.destinations import get_staging_directory
from ckptctl.storage.files import SourceFiles, source_files
from ckptctl.storage.paths import find_hub_cache_repository, resolve_links
from ckptctl.storage.stand_ins import explain_incomplete
from ckptctl.tree import TreePath
from ckptctl.units import pluralize
from ckptctl.verbs.verification.digest_lists import FileDigest
from ckptctl.verdict import Severity

HF, SHARDS, SHARDED = "hf", "hf-rank-shards", "sharded"
"""Formats and shard folder of checkpoints that ``HuggingFaceStorageWriter`` consolidates."""
SHARDS_DIFFER = f"the shards in `{SHARDED}` do not match this checkpoint"
SHARD_FINDING: tuple[Severity, str] = ("warning", SHARDED)
MIN_FOLDER_ITEMS = 10_000
FOLDER_ITEMS_PER_FILE = 8
"""Items of a data folder that are listed at most: a minimum, and more per data file."""
DATA_SUFFIXES = (".distcp", ".safetensors")
LEFTOVER_NAME = re.compile(
    r".*\.(tmp|temp|partial|part|incomplete|crdownload|aria2|ckptctl-staging)|tmp-.*|\.tmp.*"
    r"|.*-tmp-\d+",
    re.IGNORECASE,
)


def check_surroundings(
    path: TreePath, catalog: Catalog | None, *, values: bool = False
) -> Iterator[Finding]:
    """Yield findings about files in and next to a checkpoint.

    If *values* is true, elements of a consolidated model are also compared with its shards.
    """
    stage = get_staging_directory(Path(path))
    if stage.is_dir():
        why = (
            f"`{stage.name}` next to it belongs to a command that was interrupted or is still "
            "running"
        )
        yield Finding("partial output exists for this path", why, "warning", str(stage))
    root = catalog.root if catalog else path
    if not path.is_dir():
        return
    for item in iterate_unfinished_downloads(root):
        name = str(item.relative_to(root)) if item.is_relative_to(root) else str(item)
        yield Finding("a download is unfinished", None, "warning", name)
    data_files = catalog.files if catalog else {}
    data_folders = formats.get_format(catalog.format).data_folders if catalog else None
    folders = {root, *((root / name).parent for name in data_files)}
    for top in sorted(root.iterdir()) if data_folders else ():
        if data_folders and data_folders.fullmatch(top.name) and top.is_dir():
            limit = FOLDER_ITEMS_PER_FILE * len(data_files) + MIN_FOLDER_ITEMS
            items = list(islice(top.rglob("*"), limit))
            folders |= {top, *(item for item in items if item.is_dir())}
            if len(items) == limit:
                why = f"only the first {pluralize(limit, 'item')} were listed"
                yield Finding("the folder contains too many items", why, "warning", top.name)
    for folder in sorted(folders):
        yield from _check_stray_files(root, folder, catalog, data_folders)
    yield from _iterate_empty_folders(root, data_files)
    for folder in sorted({path, root}):
        yield from _check_trainer_state(folder, root, data_files)
    # Damaged checkpoints are not compared: their findings would be blamed on the shards.
    undamaged = catalog if catalog and not catalog.findings else None
    if undamaged and undamaged.format == HF and (root / SHARDED).is_dir():
        yield from _compare_shards(root / SHARDED, undamaged, values=values)
    for folder in {root, root.parent}:
        yield from _check_pointers(folder)


def _check_trainer_state(
    folder: TreePath, root: TreePath, data_files: Collection[str]
) -> Iterator[Finding]:
    """Yield findings about truncated trainer state files in *folder*.

    *data_files* are the files in *root* that belong to the checkpoint itself.
    """
    for item in list_trainer_files(folder):
        is_data = folder == root and item.name in data_files
        if not is_data and (why := explain_incomplete(item)):
            message = "a file of the trainer's state was not completely written"
            name = item.name if folder == root else f"../{item.name}"
            yield Finding(message, why, "error", name)


def _compare_shards(folder: TreePath, catalog: Catalog, *, values: bool) -> Iterator[Finding]:
    """Yield findings about differences between a consolidated model and its shards."""
    shards = formats.get_format(SHARDS)
    if not shards.sniff(Listing(folder)):
        return
    try:
        parts = shards.read(folder)
    except CkptError as error:
        yield Finding(f"the shards in `{SHARDED}` are incomplete", error.what, "warning", SHARDED)
        return
    descriptions_here, descriptions_in_shards = (
        {name: f"{entry.dtype} {list(entry.shape)}" for name, entry in catalog_side.tensors.items()}
        for catalog_side in (catalog, parts)
    )
    for name in sorted(descriptions_here.keys() | descriptions_in_shards.keys()):
        in_model, in_shards = (
            descriptions_here.get(name, "missing"),
            descriptions_in_shards.get(name, "missing"),
        )
        if in_model != in_shards:
            yield Finding(
                SHARDS_DIFFER,
                f"`{name}` is {in_shards} in `{SHARDED}`, but {in_model} in this checkpoint",
                *SHARD_FINDING,
                name,
            )
        elif values and not _has_same_elements(catalog, parts, name):
            yield Finding(SHARDS_DIFFER, f"the elements of `{name}` differ", *SHARD_FINDING, name)


def _has_same_elements(catalog: Catalog, parts: Catalog, name: str) -> bool:
    """Return whether a tensor has equal elements in the consolidated model and in its shards.

    Scalars are skipped, because torch sets them to 0. A note of the format states this.
    """
    from ckptctl.storage.compare import are_tensors_equal

    consolidated, sharded = catalog.tensors[name], parts.tensors[name]
    if not consolidated.shape:
        return True
    prefixed_extents = tuple(
        replace(extent, file=f"{SHARDED}/{extent.file}") for extent in sharded.extents
    )
    with source_files(catalog.root) as files:
        return are_tensors_equal(files, consolidated, replace(sharded, extents=prefixed_extents))


def _iterate_empty_folders(root: TreePath, data_files: Collection[str]) -> Iterator[Finding]:
    """Yield findings about empty folders of parameters, which universal checkpoints may contain."""
    above = {Path(name).parent.parent for name in data_files} - {Path()}
    for folder in sorted(above):
        for item in sorted((root / folder).iterdir()):
            if item.is_dir() and not any(item.iterdir()):
                why = "similar folders next to it contain data"
                yield Finding("a folder is empty", why, "error", str(item.relative_to(root)))


def _check_stray_files(
    root: TreePath,
    folder: TreePath,
    catalog: Catalog | None,
    data_folders: re.Pattern[str] | None,
) -> Iterator[Finding]:
    is_data_folder = data_folders and folder != root
    files = catalog.files if catalog else {}
    known_forms = {_normalize_numbers(Path(name).name) for name in files}
    known_files = {*files, *(finding.file for finding in catalog.findings)} if catalog else set()
    for item in sorted(folder.iterdir()) if folder.is_dir() else ():
        name = str(item.relative_to(root))
        if name in known_files:
            continue
        if LEFTOVER_NAME.fullmatch(item.name):
            yield Finding("a leftover of an unfinished save", None, "warning", name)
        elif catalog and name not in catalog.assets:
            is_data = (
                is_data_folder
                or item.suffix in DATA_SUFFIXES
                or _normalize_numbers(item.name) in known_forms
            )
            if is_data and item.is_file() and item.stat().st_size > 0:
                yield Finding("the index does not refer to this file", None, "warning", name)


def _normalize_numbers(name: str) -> str:
    """Replace all numbers in *name* by 0, so that ``rank_0.pt`` and ``rank_1.pt`` are equal."""
    return re.sub(r"\d+", "0", name)


def _check_pointers(folder: TreePath) -> Iterator[Finding]:
    """Yield findings about pointer files in *folder* that name a save that does not exist."""
    for name in (LATEST, LATEST_UNIVERSAL):
        pointer = folder / name
        if not pointer.is_file():
            continue
        try:
            content, is_complete = read_pointer(folder, name)
        except CkptError as error:
            yield Finding("a pointer cannot be read", error.what, "warning", str(pointer))
            continue
        if not is_complete:
            continue
        text = content.decode(errors="replace").strip()
        target = folder / text if text.isprintable() and "\ufffd" not in text else None
        if not text or target is None or not target.is_dir():
            why = f"it contains {text[:100]!r}" if text else "it is empty"
            yield Finding(
                "the pointer names a save that does not exist", why, "warning", str(pointer)
            )


DOWNLOAD_FOLDER = ".cache/huggingface/download"


def iterate_unfinished_downloads(root: TreePath) -> Iterator[TreePath]:
    """Yield partial files of interrupted downloads to *root*."""
    yield from sorted((root / DOWNLOAD_FOLDER).rglob("*.incomplete"))
    repository = find_hub_cache_repository(resolve_links(root))
    if repository is not None:
        yield from sorted((repository / "blobs").glob("*.incomplete"))


RECORD_SUFFIX = ".metadata"
"""Suffix of the download record that huggingface_hub writes for each file."""
MAX_RECORD_BYTES = 4096


def read_hub_digests(
    files: SourceFiles, data_files: Collection[str]
) -> tuple[list[FileDigest], list[Finding]]:
    """Return the digests that the Hub records for files, and findings about these records.

    Files other than *data_files* are included if they are in the same directories or at the top
    level.
    """
    folders = {Path(), *(Path(name).parent for name in data_files)}
    if not files.local:
        return [
            line for folder in sorted(folders) for line in _iterate_remote_digests(files, folder)
        ], []
    digests: list[FileDigest] = []
    findings: list[Finding] = []
    for folder in sorted(folders):
        digests += _iterate_cached_digests(files.root, folder)
        for record, name in _iterate_download_records(files.root, folder):
            line = _parse_record(record, files.root / name, name)
            if line is None:
                message = "the record of a download cannot be read"
                findings.append(Finding(message, None, "warning", str(record)))
            else:
                digests += [line] if line.digest else []
    return digests, findings


def _iterate_remote_digests(files: SourceFiles, folder: PurePath) -> Iterator[FileDigest]:
    """Yield the digests that a remote store reports for the files in *folder*."""
    for item in sorted((files.root / folder).iterdir()):
        name = str(folder / item.name)
        digest = files.find_digest(name) if item.is_file() else None
        algorithm = find_digest_algorithm(digest or "")
        if digest and algorithm:
            yield FileDigest("the Hub", algorithm, name, digest)


def _iterate_cached_digests(root: TreePath, folder: PurePath) -> Iterator[FileDigest]:
    """Yield the digests of files in a snapshot of the Hub cache, where ETags name the blobs."""
    real = resolve_links(Path(root))
    repository = find_hub_cache_repository(real)
    if repository is None or not (real / folder).is_dir():
        return
    for item in sorted((real / folder).iterdir()):
        if item.is_symlink() and item.is_file():
            blob = Path(os.path.normpath(item.parent / item.readlink()))
            algorithm = find_digest_algorithm(blob.name)
            if blob.parent == repository / "blobs" and algorithm:
                yield FileDigest("the Hub's cache", algorithm, str(folder / item.name), blob.name)


def _iterate_download_records(root: TreePath, folder: PurePath) -> Iterator[tuple[TreePath, str]]:
    """Yield the download record of each file in *folder*, and the file's path relative to *root*.

    The download folder may be a parent of *root*, since repositories contain subfolders.
    """
    real = resolve_links(root)
    for top in (real, *real.parents):
        records = top / DOWNLOAD_FOLDER / (real / folder).relative_to(top)
        for record in sorted(records.glob(f"*{RECORD_SUFFIX}")):
            name = str(folder / record.name.removesuffix(RECORD_SUFFIX))
            if (root / name).is_file():
                yield record, name


def _parse_record(record: TreePath, file: TreePath, name: str) -> FileDigest | None:
    """Parse the record of *file*, or return None if it is malformed.

    A small file (stored in git) that changed after its download was edited by the user. Files in
    LFS are not edited.
    """
    try:
        with source_files(record.parent) as files:
            size = min(files.size(record.name), MAX_RECORD_BYTES)
            _, etag, time, *_ = files.read(record.name, 0, size).decode().split("\n")
        changed = file.stat().st_mtime - 1 > float(time)
    except (CkptError, ValueError, OSError):
        return None
    algorithm = find_digest_algorithm(etag)
    if algorithm is None:
        return FileDigest(str(record), "", name, "")
    is_edited = changed and algorithm != "sha256"
    return FileDigest(str(record), algorithm, name, etag, "warning" if is_edited else "error")
