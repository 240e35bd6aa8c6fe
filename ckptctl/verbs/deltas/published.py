"""Weight updates as slime, miles and SGLang publish them, read and written.

A folder per version, ``weight_v000001``, looks like a Hugging Face checkpoint. Its index states in
``metadata`` the keys ``version``, ``base_version``, ``delta_encoding``, ``compression_format`` and
``checksum_format``. A tensor is the XOR of its bytes before and after the update, as one zstd
frame; ``__metadata__`` of the file has the checksum of its bytes after the update.

Sources: ``update_weight_from_disk_delta.py`` and ``utils/disk_delta.py`` of slime (#2089);
``/pull_weights`` of SGLang (#30366).
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptctl.errors import DamagedError, RefusedError, UnsupportedError
from ckptctl.formats.hf.hf_files import INDEX_SUFFIX
from ckptctl.numerics.kinds.delta import view_words
from ckptctl.storage.file_system import sync_directory, write_file
from ckptctl.storage.files import SourceFiles, source_files
from ckptctl.storage.json_reader import read_json
from ckptctl.storage.safetensors_header import read_safetensors_header
from ckptctl.storage.schema import Schema, read_as, read_nested_or_none, wrap_malformed_errors
from ckptctl.storage.writing import LOCK_NAME
from ckptctl.storage.zstd import import_zstd, iterate_decompressed
from ckptctl.tree import TreePath
from ckptctl.verbs.deltas.delta_files import DeltaWriter, Payload

INDEX = f"model{INDEX_SUFFIX}"
LEVEL = 1
_PAYLOAD_NAME = re.compile(r"model-\d+-of-\d+\.safetensors")
SUPPORTED = {"delta_encoding": "xor", "compression_format": "zstd", "checksum_format": "adler32"}


def is_weight_update(path: TreePath) -> bool:
    """Return whether *path* is a published update of weights."""
    if not path.is_dir() or not (path / INDEX).is_file():
        return False
    with source_files(path) as files:
        return _read_encoding(read_json(files, INDEX)) is not None


def is_replaceable_update(path: TreePath) -> bool:
    """Return whether *path* is an update without unrelated files, so it may be replaced."""
    return is_weight_update(path) and all(
        item.name in (INDEX, LOCK_NAME) or _PAYLOAD_NAME.fullmatch(item.name)
        for item in path.iterdir()
    )


def _read_encoding(index: object) -> str | None:
    return read_nested_or_none(str, index, "metadata", "delta_encoding")


# ---------------------------------------------------------------------------------- reading


@dataclass(frozen=True, slots=True)
class _UpdateIndex(Schema):
    weight_map: dict[str, str]


@dataclass(frozen=True, slots=True)
class PublishedWeights:
    """Opened update.

    Attributes:
        root: Absolute path of the folder.
        spans: File, offset and size of each payload, by tensor name.
        checksums: Adler-32 of each changed tensor after the update, by name.
    """

    root: TreePath
    spans: Mapping[str, tuple[str, int, int]]
    checksums: Mapping[str, str]

    @property
    def nbytes(self) -> int:
        """Size of all payloads in bytes."""
        return sum(nbytes for _, _, nbytes in self.spans.values())

    def iterate_new_blocks(
        self, files: SourceFiles, name: str, blocks: Iterable[bytearray]
    ) -> Iterator[bytearray]:
        """Yield the blocks of a tensor after the update, given those before it.

        Raises:
            DamagedError: The payload is damaged.
            RefusedError: The result does not match its checksum, so the base is another one.
        """
        where = f"{self.root}, tensor `{name}`"
        pieces = iterate_decompressed(files, *self.spans[name])
        pending, checksum = bytearray(), 1
        for block in blocks:
            while len(pending) < len(block):
                piece = next(pieces, None)
                if piece is None:
                    raise DamagedError("the update has fewer bytes than the tensor", where=where)
                pending += piece
            words = view_words(bytearray(block), "int8")
            words ^= view_words(pending[: len(block)], "int8")
            del pending[: len(block)]
            new = bytearray(len(block))
            view_words(new, "int8").copy_(words)
            checksum = zlib.adler32(new, checksum)
            yield new
        if pending or next(pieces, None):
            raise DamagedError("the update has more bytes than the tensor", where=where)
        if f"{checksum:08x}" != self.checksums[name]:
            raise RefusedError(
                "the update does not match the base",
                where=where,
                why=f"the checksum of the result is {checksum:08x}, not {self.checksums[name]}",
                hint="pass the version that the update was made from",
            )


def open_weight_update(path: TreePath) -> PublishedWeights:
    """Open the update in the folder *path*.

    Raises:
        UnsupportedError: It is malformed, or has another encoding.
        DamagedError: Tensors or files are missing in it, or in its index.
    """
    where = str(path / INDEX)
    with source_files(path) as files, wrap_malformed_errors("malformed weight update", where):
        index = read_json(files, INDEX)
        for key, expected in SUPPORTED.items():
            value = read_nested_or_none(str, index, "metadata", key)
            if value != expected:
                raise UnsupportedError(
                    f"the `{key}` of a weight update is `{str(value)[:40]}`",
                    where=where,
                    why=f"only `{expected}` is supported",
                )
        weight_map = read_as(_UpdateIndex, index).weight_map
        spans: dict[str, tuple[str, int, int]] = {}
        checksums: dict[str, str] = {}
        for file in dict.fromkeys(weight_map.values()):
            header = read_safetensors_header(files, file)
            for name, (_, _, start, end) in header.tensors.items():
                if weight_map.get(name) != file or name not in header.metadata:
                    raise DamagedError(
                        f"`{name}` is not in the index, or has no checksum",
                        where=str(path / file),
                    )
                spans[name] = (file, start, end - start)
                checksums[name] = header.metadata[name]
    if missing := weight_map.keys() - spans.keys():
        raise DamagedError("tensors of the index are missing", where=where, why=min(missing))
    payloads = {item.name for item in path.iterdir() if _PAYLOAD_NAME.fullmatch(item.name)}
    if unlisted := payloads.difference(weight_map.values()):
        raise DamagedError(f"the index does not list `{min(unlisted)}`", where=where)
    return PublishedWeights(path, spans, checksums)


# ---------------------------------------------------------------------------------- writing


class XorPayload(Payload):
    """XOR of two tensors as one zstd frame, and the checksum of the second one."""

    def __init__(self, folder: Path, stack: ExitStack, nbytes: int) -> None:
        super().__init__(folder, stack)
        module = import_zstd("the weight update", writes=True)
        self._checksum = 1
        self._frame: Any
        if hasattr(module, "ZstdFile"):
            self._frame = module.ZstdCompressor(level=LEVEL)
        else:
            self._frame = module.ZstdCompressor(level=LEVEL).compressobj(size=nbytes)

    @property
    def checksum(self) -> str:
        """Adler-32 of the new tensor, as hexadecimal digits."""
        return f"{self._checksum:08x}"

    def add_blocks(self, base: bytearray, new: bytearray) -> None:
        """Append the XOR of two blocks."""
        difference = bytearray(len(new))
        words = view_words(new, "int8") ^ view_words(base, "int8")
        view_words(difference, "int8").copy_(words)
        self._content.write(self._frame.compress(bytes(difference)))
        self._checksum = zlib.adler32(new, self._checksum)

    def iterate_content(self) -> Iterator[bytes]:
        """See :meth:`Payload.iterate_content`. There is no table."""
        self._content.write(self._frame.flush())
        yield from self._iterate_stored()


@dataclass(slots=True)
class PublishedWriter(DeltaWriter):
    """Writer of an update into a staged folder.

    Attributes:
        checksums: Checksum of each changed tensor, by name.
    """

    checksums: dict[str, str] = field(default_factory=dict)

    def build_metadata(self, names: Iterable[str]) -> Mapping[str, str]:
        """See :meth:`DeltaWriter.build_metadata`."""
        return {name: self.checksums[name] for name in names}

    def finish_version(self, version: int, weight_map: Mapping[str, str]) -> int:
        """Name the files, write the index, and return the size of the update in bytes."""
        names = {
            file: f"model-{number:05d}-of-{len(self.files):05d}.safetensors"
            for number, file in enumerate(self.files)
        }
        for file, name in names.items():
            (self.folder / file).rename(self.folder / name)
        index = {
            "metadata": {
                "version": f"{version:06d}",
                "base_version": f"{version - 1:06d}",
                **SUPPORTED,
            },
            "weight_map": {key: names[file] for key, file in weight_map.items()},
        }
        content = json.dumps(index, indent=1).encode()
        write_file(self.folder / INDEX, content)
        sync_directory(self.folder)
        return len(content) + sum(record.size for record in self.files.values())
