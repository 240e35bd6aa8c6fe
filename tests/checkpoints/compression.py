"""Compression of DCP items as torch's ``ZStandard`` does it, for where no package for it is there.

This module stands in for one of those that :data:`ckptctl.storage.zstd.MODULES` names.
"""

from __future__ import annotations

from lzma import LZMADecompressor as ZstdDecompressor
from lzma import LZMAError as ZstdError
from lzma import LZMAFile as ZstdFile
from typing import IO, Any

from torch.distributed.checkpoint._extension import StreamTransformExtension

from ckptctl.storage import zstd

__all__ = ["MAGIC", "Extension", "Unknown", "ZstdDecompressor", "ZstdError", "ZstdFile", "stand_in"]

MAGIC = b"\xfd7zXZ\0"


def stand_in() -> None:
    """Take the place of what decompresses, for good."""
    zstd.MODULES, zstd.MAGIC = (__name__,), MAGIC


class Extension(StreamTransformExtension):
    """An extension that writes what this module reads."""

    @staticmethod
    def from_descriptor(version: str) -> Extension:
        """See ``torch.distributed.checkpoint._extension.Extension``."""
        return Extension()

    @staticmethod
    def registry_name() -> str:
        """See ``torch.distributed.checkpoint._extension.Extension``."""
        return "stream.zstd"

    def get_descriptor(self) -> str:
        """See ``torch.distributed.checkpoint._extension.Extension``."""
        return "stream.zstd/1"

    def transform_to(self, output: IO[bytes]) -> Any:
        """See ``torch.distributed.checkpoint._extension.StreamTransformExtension``."""
        return _Closing(output)

    def transform_from(self, input: IO[bytes]) -> Any:
        """See ``torch.distributed.checkpoint._extension.StreamTransformExtension``."""
        return ZstdFile(input)


class _Closing(ZstdFile):
    def __init__(self, output: IO[bytes]) -> None:
        super().__init__(output, "wb", preset=0)


class Unknown(Extension):
    """Another extension."""

    def get_descriptor(self) -> str:
        """See ``torch.distributed.checkpoint._extension.Extension``."""
        return "stream.secret@example.org/3"
