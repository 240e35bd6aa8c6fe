"""Writer of the files of a delta."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from ckptctl.errors import UnsupportedError, wrap_os_errors
from ckptctl.formats.delta import (
    ASSETS_FOLDER,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    PAYLOAD_FILE,
    PAYLOAD_NAMES,
    DeltaManifest,
    FileRecord,
)
from ckptctl.numerics.kinds.delta import BlockKind, encode_table
from ckptctl.storage.file_system import sync_directory, write_file
from ckptctl.storage.safetensors_header import encode_safetensors_header
from ckptctl.storage.writing import LOCK_NAME
from ckptctl.tree import TreePath
from ckptctl.units import pluralize

MAX_FILE_BYTES = 5_000_000_000
"""Maximum size of the payloads in one file, except that a payload is never split."""
SPOOL_BYTES = 8 << 20
"""Size in bytes up to which the payload of a tensor is kept in memory while it is encoded."""
COPY_BYTES = 1 << 20
METADATA = {"format": "ckptctl.delta"}


def is_delta(path: TreePath) -> bool:
    """Return whether *path* is a delta without unrelated files, so it may be replaced."""
    if not path.is_dir() or not (path / MANIFEST).is_file():
        return False
    return all(
        item.name in (MANIFEST, ASSETS_FOLDER, LOCK_NAME) or PAYLOAD_NAMES.fullmatch(item.name)
        for item in path.iterdir()
    )


class Payload:
    """Encoded blocks of one tensor, in an unnamed file if they are large.

    Args:
        folder: Folder of the unnamed file.
        stack: Stack that discards the blocks if nobody has.
    """

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        stack.callback(self.close)
        self._blocks: list[tuple[BlockKind, int]] = []
        self._content: IO[bytes] = tempfile.SpooledTemporaryFile(  # noqa: SIM115
            SPOOL_BYTES, dir=str(folder)
        )

    @property
    def is_unchanged(self) -> bool:
        """Whether no block stores a change."""
        return all(kind is BlockKind.SAME for kind, _ in self._blocks)

    def add(self, kind: BlockKind, content: bytes) -> None:
        """Append a block."""
        self._blocks.append((kind, len(content)))
        self._content.write(content)

    def iterate_content(self) -> Iterator[bytes]:
        """Yield the table and the blocks, and discard them."""
        yield encode_table(self._blocks)
        yield from self._iterate_stored()

    def _iterate_stored(self) -> Iterator[bytes]:
        self._content.seek(0)
        while piece := self._content.read(COPY_BYTES):
            yield piece
        self.close()

    def close(self) -> None:
        """Discard the blocks."""
        self._blocks = []
        self._content.close()


@dataclass(slots=True)
class DeltaWriter:
    """Writer of payloads, assets and manifest into a staged folder.

    Attributes:
        folder: The staged folder.
        files: Records of the files that are complete, by relative path.
    """

    folder: Path
    files: dict[str, FileRecord] = field(default_factory=dict)
    _pending: list[tuple[str, int]] = field(default_factory=list)
    _data: IO[bytes] | None = None
    _data_bytes: int = 0
    _number: int = 1

    def add_payload(self, name: str, content: Iterable[bytes]) -> str:
        """Append the payload of the tensor *name*, and return the name of its file."""
        file = PAYLOAD_FILE.format(self._number)
        with wrap_os_errors("write", self.folder / file):
            if self._data is None:
                self._data = tempfile.TemporaryFile(dir=self.folder)  # noqa: SIM115
            nbytes = 0
            for piece in content:
                self._data.write(piece)
                nbytes += len(piece)
        self._pending.append((name, nbytes))
        self._data_bytes += nbytes
        if self._data_bytes >= MAX_FILE_BYTES:
            self._finish_file()
        return file

    def build_metadata(self, names: Iterable[str]) -> Mapping[str, str]:  # noqa: ARG002
        """Return the strings of ``__metadata__`` of the file with the payloads *names*."""
        return METADATA

    def add_asset(self, name: str, content: bytes) -> None:
        """Write a configuration or tokenizer file."""
        relative = f"{ASSETS_FOLDER}/{name}"
        path = self.folder / relative
        with wrap_os_errors("create", path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, content)
        for parent in path.parents:
            sync_directory(parent)
            if parent == self.folder:
                break
        self.files[relative] = FileRecord(len(content), hashlib.sha256(content).hexdigest())

    def finish(self, manifest: DeltaManifest) -> int:
        """Write the manifest, and return the size of the delta in bytes."""
        content = manifest.encode()
        if len(content) > MAX_MANIFEST_BYTES:
            raise UnsupportedError(
                "the manifest would be larger than readers accept",
                where=MANIFEST,
                why=f"it would have {pluralize(len(content), 'byte')}, and the limit is "
                f"{MAX_MANIFEST_BYTES:,}",
            )
        write_file(self.folder / MANIFEST, content)
        sync_directory(self.folder)
        return len(content) + manifest.nbytes

    def finish_payloads(self) -> None:
        """Write the last file of payloads."""
        if self._pending:
            self._finish_file()

    def close(self) -> None:
        """Discard unfinished data."""
        if self._data is not None:
            with suppress(OSError):
                self._data.close()

    def _finish_file(self) -> None:
        name = PAYLOAD_FILE.format(self._number)
        tensors = [(key, "uint8", (nbytes,)) for key, nbytes in self._pending]
        head, _ = encode_safetensors_header(
            tensors, self.build_metadata(key for key, _ in self._pending)
        )
        path, digest = self.folder / name, hashlib.sha256()
        assert self._data is not None
        with wrap_os_errors("write", path), path.open("xb") as file, self._data as data:
            data.seek(0)
            writer = _HashingWriter(file, digest)
            writer.write(head)
            shutil.copyfileobj(data, writer, COPY_BYTES)
            file.flush()
            os.fsync(file.fileno())
        self.files[name] = FileRecord(len(head) + self._data_bytes, digest.hexdigest())
        self._pending, self._data, self._data_bytes = [], None, 0
        self._number += 1


class _HashingWriter:
    def __init__(self, file: IO[bytes], digest: hashlib._Hash) -> None:
        self._file, self._digest = file, digest

    def write(self, content: bytes) -> int:
        self._digest.update(content)
        return self._file.write(content)
