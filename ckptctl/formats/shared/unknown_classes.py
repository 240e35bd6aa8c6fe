"""Leaves that are no tensors as they are written; those of unknown classes never are.

A file of states may hold anything that its trainer put there. Nothing of it is run to read it, so
it does not stop the tensors beside it; but to write it would hand it to a reader that runs it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ckptctl.catalog import Blob
from ckptctl.errors import RefusedError, UnsafePickleError, excluding, listed
from ckptctl.storage.files import SourceFiles
from ckptctl.storage.pickles.inert import Global, Inert, walk
from ckptctl.storage.pickles.torch_globals import TORCH_TABLE
from ckptctl.storage.pickles.writer import dumps
from ckptctl.storage.zips.reader import StoredTensor
from ckptctl.storage.zips.writer import lay_out


def _unknown_class(value: object) -> str | None:
    """Return the first class or function in *value* that plain torch does not load."""
    for node in walk(value):
        if isinstance(node, Inert | Global) and (node.module, node.name) not in TORCH_TABLE:
            return f"{node.module}.{node.name}"
    return None


def unknown_notes(blobs: Iterable[Blob]) -> Iterator[str]:
    """Yield which of *blobs* cannot be written."""
    found = {blob.name: name for blob in blobs if (name := _unknown_class(blob.value))}
    if found:
        names = listed([f"{leaf}: {name}" for leaf, name in found.items()])
        yield f"objects of classes that are not known can be read, not written: {names}"


def require_known(blobs: Iterable[Blob], *, verbatim: bool = False) -> None:
    """Refuse to write what plain torch does not load."""
    inside: list[str] = []
    for blob in blobs:
        name = _unknown_class(blob.value)
        if name is not None:
            raise UnsafePickleError(
                f"`{blob.name}` asks for `{name}`, which is not allowed",
                why="whoever loads the output would run it",
                hint=excluding(blob.name),
            )
        if not (verbatim and blob.file) and _holds_tensors(blob.value):
            inside.append(blob.name)
    if inside:
        raise RefusedError(
            f"{len(inside):,} values hold tensors inside of objects",
            where=listed(inside),
            hint="`convert --exclude PATTERN` leaves them out; `--to dcp` copies DCP items",
        )


def _holds_tensors(value: object) -> bool:
    return any(isinstance(node, StoredTensor) for node in walk(value))


def value_bytes(files: SourceFiles, blob: Blob) -> bytes:
    """Return the zip that ``torch.load`` reads *blob* from."""
    if blob.file is not None:
        return files.read(blob.file, blob.offset, blob.nbytes)
    require_known([blob])
    layout = lay_out(dumps(blob.value), [], base=0)
    content = bytearray(layout.size)
    for offset, part in layout.frame([]):
        content[offset : offset + len(part)] = part
    return bytes(content)
