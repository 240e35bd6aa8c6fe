"""A leaf that is no tensor as ``torch.save`` writes it, whatever format holds it."""

from __future__ import annotations

from ckptctl.catalog import Blob
from ckptctl.formats.shared.unknown_classes import require_known
from ckptctl.storage.files import SourceFiles
from ckptctl.storage.pickles.writer import dumps
from ckptctl.storage.zips.writer import lay_out


def value_bytes(files: SourceFiles, blob: Blob) -> bytes:
    """Return the zip that ``torch.load`` reads *blob* from.

    Args:
        files: The checkpoint's.
        blob: A leaf; one that lies in a larger file is written anew.

    Raises:
        DamagedError: The file ends before it does.
        UnsafePickleError: It is to be written anew and holds an object of an unknown class.
        RefusedError: Likewise, and it holds tensors inside of objects.
    """
    if blob.file is not None:
        return files.read(blob.file, blob.offset, blob.nbytes)
    require_known([blob])
    layout = lay_out(dumps(blob.value), [], base=0)
    content = bytearray(layout.size)
    for offset, part in layout.frame([]):
        content[offset : offset + len(part)] = part
    return bytes(content)
