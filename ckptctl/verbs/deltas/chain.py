"""Opened deltas, and chains of deltas that are applied in turn."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from ckptctl import formats
from ckptctl.catalog import Box, Extent, TensorEntry
from ckptctl.dtypes import get_itemsize
from ckptctl.errors import (
    DamagedError,
    RefusedError,
    UnsupportedError,
    UsageError,
    format_command,
    quote_names,
)
from ckptctl.file_identity import FileIdentity
from ckptctl.formats.delta import (
    ASSETS_FOLDER,
    MANIFEST,
    DeltaManifest,
    TensorRecord,
    read_manifest,
)
from ckptctl.formats.sidecar_files import CONFIG_FILES
from ckptctl.numerics.kinds.delta import (
    REPLACING_KINDS,
    BlockCodec,
    BlockEntry,
    BlockError,
    BlockKind,
    damaged_payload_error,
    decode_table,
    get_table_size,
    get_word_dtype,
    view_words,
)
from ckptctl.storage.files import SourceFiles, source_files
from ckptctl.storage.json_reader import parse_json
from ckptctl.storage.safetensors_header import read_safetensors_header
from ckptctl.storage.sources import require_same_files
from ckptctl.tree import TreePath
from ckptctl.units import pluralize

if TYPE_CHECKING:
    from ckptctl.storage.arithmetic import Tensor

COPY_HINT = "copy the delta again from its source"
READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class OpenedDelta:
    """Opened delta.

    Attributes:
        root: Absolute path of the folder.
        manifest: Its manifest.
        payloads: Entry of the payload of each changed tensor, by name.
        identities: Identity of each file when the delta was opened, by relative path.
    """

    root: TreePath
    manifest: DeltaManifest
    payloads: Mapping[str, TensorEntry]
    identities: Mapping[str, FileIdentity]

    def check_files(self) -> None:
        """Read all files, and raise if one does not match its digest, or is no configuration."""
        with source_files(self.root) as files:
            for name, record in self.manifest.files.items():
                digest = hashlib.sha256()
                for start in range(0, record.size, READ_BYTES):
                    digest.update(files.read(name, start, min(READ_BYTES, record.size - start)))
                if digest.hexdigest() != record.sha256:
                    raise self._digest_error(name)
        for name in CONFIG_FILES:
            if name in self.manifest.assets:
                self.read_config(name)

    def require_unchanged(self) -> None:
        """Raise `ChangedError` if a file changed since the delta was opened.

        If it did not, the files that were used are those that were checked.
        """
        require_same_files(self.root, self.identities)

    def read_asset(self, files: SourceFiles, name: str) -> bytes:
        """Read a configuration or tokenizer file, and compare what is returned with its digest."""
        path = f"{ASSETS_FOLDER}/{name}"
        record = self.manifest.files[path]
        content = files.read(path, 0, record.size)
        if hashlib.sha256(content).hexdigest() != record.sha256:
            raise self._digest_error(path)
        return content

    def read_config(self, name: str) -> Mapping[str, object]:
        """Read and parse a configuration file that the delta carries."""
        where = str(self.root / ASSETS_FOLDER / name)
        with source_files(self.root) as files:
            content = self.read_asset(files, name)
        parsed = parse_json(content, where=where, allow_nan=True)
        if not isinstance(parsed, dict):
            raise UnsupportedError(f"`{name}` is not a JSON object", where=where)
        return parsed

    def _digest_error(self, name: str) -> DamagedError:
        return DamagedError(
            "a file of the delta does not match its digest",
            where=str(self.root / name),
            hint=COPY_HINT,
        )


def open_delta(path: str | TreePath) -> OpenedDelta:
    """Open the delta at *path*, and check its manifest, sizes and headers.

    Raises:
        DamagedError: A file is missing, truncated or contradicts the manifest.
        UsageError: The folder is not a delta.
    """
    root = formats.to_existing_path(path)
    if not root.is_dir() or not (root / MANIFEST).is_file():
        raise UsageError(
            "this is not a delta",
            where=str(root),
            why=f"it has no {MANIFEST}",
            hint=f"make one with {format_command('delta', 'make', 'BASE', 'NEW', 'DELTA')}",
        )
    with source_files(root) as files:
        manifest = read_manifest(files)
        identities = {
            name: _identify_file(files, name, record.size)
            for name, record in manifest.files.items()
        }
        payloads = _read_payloads(files, manifest)
    return OpenedDelta(root, manifest, payloads, identities)


def _identify_file(files: SourceFiles, name: str, expected: int) -> FileIdentity:
    """Return the identity of a file, or raise if it is missing or has another size."""
    path = files.root / name
    if not path.is_file():
        raise DamagedError("a file of the delta is missing", where=str(path), hint=COPY_HINT)
    identity = files.read_identity(name)
    if identity.size != expected:
        raise DamagedError(
            "a file of the delta has another size",
            where=str(path),
            why=f"{pluralize(identity.size, 'byte')} instead of {expected:,}",
            hint=COPY_HINT,
        )
    return identity


def _read_payloads(files: SourceFiles, manifest: DeltaManifest) -> dict[str, TensorEntry]:
    names = dict.fromkeys(change.file for change in manifest.tensors.values() if change.file)
    headers = {name: read_safetensors_header(files, name).tensors for name in names if name}
    payloads: dict[str, TensorEntry] = {}
    for name, change in manifest.tensors.items():
        if change.file is None:
            continue
        where = str(files.root / change.file)
        dtype, shape, start, end = headers[change.file].pop(name, ("", (), 0, 0))
        assert change.result is not None
        table = get_table_size(change.result.nbytes, manifest.block_bytes)
        if dtype != "uint8" or len(shape) != 1 or end - start < table:
            raise DamagedError(
                f"the payload of `{name}` is missing or malformed", where=where, hint=COPY_HINT
            )
        extent = Extent(Box.whole(shape), change.file, start, end - start)
        payloads[name] = TensorEntry(name, dtype, shape, (extent,), (name,))
    if extra := [name for header in headers.values() for name in header]:
        raise DamagedError(
            "payloads are not listed in the manifest",
            where=str(files.root),
            why=quote_names(extra),
            hint=COPY_HINT,
        )
    return payloads


@dataclass(frozen=True, slots=True)
class ResolvedTensor:
    """One tensor of the result of a chain.

    Attributes:
        record: The tensor in the result.
        base_name: Name of the tensor of the base whose elements it depends on, or None.
        patches: Deltas that change it, in order, each with the name of the payload.
    """

    record: TensorRecord
    base_name: str | None
    patches: tuple[tuple[OpenedDelta, str], ...] = ()


class Chain:
    """Deltas that are applied in turn.

    Attributes:
        deltas: The deltas, in order.
        base: Records of the tensors of the base, by name.
        tensors: Tensors of the result, by name.
    """

    def __init__(self, deltas: Sequence[OpenedDelta]) -> None:
        """Resolve the chain.

        Raises:
            RefusedError: The result of a delta is not the base of the next one.
        """
        if not deltas:
            raise UsageError("no delta is given")
        self.deltas = tuple(deltas)
        for before, after in pairwise(self.deltas):
            if before.manifest.result_sha256 != after.manifest.base_sha256:
                raise self._broken_error(before, after)
            if before.manifest.block_bytes != after.manifest.block_bytes:
                raise UnsupportedError(
                    "the deltas have blocks of different sizes",
                    where=f"{before.root} and {after.root}",
                    hint="apply them one after another",
                )
        self.block_bytes = self.deltas[0].manifest.block_bytes
        first = self.deltas[0].manifest
        self.base = {name: item.base for name, item in first.tensors.items() if item.base}
        self.tensors = {name: ResolvedTensor(item, name) for name, item in self.base.items()}
        for delta in self.deltas:
            self.tensors = _resolve(self.tensors, delta)

    @property
    def result_sha256(self) -> str:
        """Digest of all tensors of the result."""
        return self.deltas[-1].manifest.result_sha256

    def _broken_error(self, before: OpenedDelta, after: OpenedDelta) -> RefusedError:
        by_base = {delta.manifest.base_sha256: delta for delta in self.deltas}
        results = {delta.manifest.result_sha256 for delta in self.deltas}
        starts = [delta for base, delta in by_base.items() if base not in results]
        order: list[OpenedDelta] = []
        current = starts[0] if len(starts) == 1 else None
        while current is not None and current not in order:
            order.append(current)
            current = by_base.get(current.manifest.result_sha256)
        is_permuted = len(order) == len(self.deltas)
        return RefusedError(
            "the deltas do not follow each other",
            where=f"{before.root} and {after.root}",
            why=f"the first one results in {before.manifest.result_sha256[:12]}, the second one "
            f"applies to {after.manifest.base_sha256[:12]}",
            hint="pass them in this order: " + " ".join(str(delta.root.name) for delta in order)
            if is_permuted
            else "pass all deltas of the chain, in order",
        )


def _resolve(before: Mapping[str, ResolvedTensor], delta: OpenedDelta) -> dict[str, ResolvedTensor]:
    """Return the tensors of the result of *delta*, given those of its base."""
    tensors: dict[str, ResolvedTensor] = {}
    tied: list[tuple[str, TensorRecord]] = []
    for name, change in delta.manifest.tensors.items():
        if change.result is None:
            continue
        previous = before.get(name)
        if change.result.alias_of is not None:
            tied.append((name, change.result))
        elif change.file is None and previous is not None:
            tensors[name] = replace(previous, record=change.result)
        elif change.is_replaced or previous is None:
            tensors[name] = ResolvedTensor(change.result, None, ((delta, name),))
        else:
            patches = (*previous.patches, (delta, name))
            tensors[name] = ResolvedTensor(change.result, previous.base_name, patches)
    for name, record in tied:
        tensors[name] = replace(tensors[record.alias_of or ""], record=record)
    return {name: tensors[name] for name in delta.manifest.tensors if name in tensors}


class PayloadReader:
    """Reader of the blocks of one payload."""

    def __init__(self, delta: OpenedDelta, files: SourceFiles, name: str) -> None:
        change = delta.manifest.tensors[name]
        assert change.result is not None
        self._name, self._files, self._root = name, files, delta.root
        (extent,) = delta.payloads[name].extents
        self._file, self._start = extent.file, extent.offset
        self._word = get_word_dtype(change.result.dtype)
        self._nbytes, self._block_bytes = change.result.nbytes, delta.manifest.block_bytes
        self._codec = BlockCodec.load(delta.manifest.codec, delta.root)
        size = get_table_size(self._nbytes, self._block_bytes)
        try:
            table = files.read(self._file, self._start, size)
            self.entries = decode_table(table, extent.nbytes, self._block_bytes)
        except BlockError as error:
            raise damaged_payload_error(name, delta.root, error) from error

    def apply_block(self, number: int, block: bytearray) -> None:
        """Change *block*, the block *number* of the tensor."""
        entry = self.entries[number]
        if entry.kind is BlockKind.SAME:
            return
        words = view_words(block, self._word)
        change = self.read_block(number, entry)
        if entry.kind in REPLACING_KINDS:
            words.copy_(change)
        else:
            words.add_(change)

    def read_block(self, number: int, entry: BlockEntry) -> Tensor:
        """Decode the block *number*: new elements, or differences."""
        content = self._files.read(self._file, self._start + entry.offset, entry.nbytes)
        nbytes = min(self._block_bytes, self._nbytes - number * self._block_bytes)
        try:
            count = nbytes // get_itemsize(self._word)
            return self._codec.decode(entry.kind, content, count, self._word)
        except BlockError as error:
            raise damaged_payload_error(self._name, self._root, error) from error


def iterate_result_blocks(
    resolved: ResolvedTensor,
    base_blocks: Iterable[bytearray] | None,
    open_root: Callable[[TreePath], SourceFiles],
) -> Iterator[bytearray]:
    """Yield the blocks of a tensor of the result.

    Args:
        resolved: The tensor, which has patches.
        base_blocks: Blocks of the tensor in the base, which are changed in place, or None if the
            tensor does not depend on them.
        open_root: Returns the files of a delta.
    """
    patches = resolved.patches
    readers = [PayloadReader(delta, open_root(delta.root), name) for delta, name in patches]
    block_bytes = patches[0][0].manifest.block_bytes
    nbytes = resolved.record.nbytes
    blocks = base_blocks or (
        bytearray(min(block_bytes, nbytes - start)) for start in range(0, nbytes, block_bytes)
    )
    for number, block in enumerate(blocks):
        for position, reader in enumerate(readers):
            if (
                base_blocks is None
                and position == 0
                and reader.entries[number].kind not in REPLACING_KINDS
            ):
                raise DamagedError(
                    "the payload of a new tensor refers to the base",
                    where=f"{patches[0][0].root}, tensor `{patches[0][1]}`",
                    hint=COPY_HINT,
                )
            reader.apply_block(number, block)
        yield block
