"""The files that one thread has open."""

from __future__ import annotations

import os
from collections import OrderedDict
from contextlib import ExitStack
from pathlib import Path

from ckptctl.errors import StorageError
from ckptctl.storage.execution.target_files import open_target
from ckptctl.storage.files import SourceFiles

MAX_OPEN = 64
Key = tuple[SourceFiles | None, str]


class Descriptors:
    """The last few files that one thread used.

    Args:
        root: Directory of the output files.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._open: OrderedDict[Key, int] = OrderedDict()

    def source(self, files: SourceFiles, name: str) -> int:
        """Return a descriptor to read *name* from."""
        key = (files, name)
        found = self._open.get(key)
        return found if found is not None else self._keep(key, files.descriptor(name))

    def target(self, name: str) -> int:
        """Return a descriptor to write *name* to."""
        key = (None, name)
        found = self._open.get(key)
        return found if found is not None else self._keep(key, open_target(self._root / name))

    def close(self) -> None:
        """Close all of them.

        Raises:
            StorageError: One said only now that what was written to it is lost, as over NFS.
        """
        with ExitStack() as stack:
            for _ in self._open:
                stack.callback(self._close_oldest)

    def _keep(self, key: Key, descriptor: int) -> int:
        while len(self._open) >= MAX_OPEN:
            self._close_oldest()
        self._open[key] = descriptor
        return descriptor

    def _close_oldest(self) -> None:
        (files, name), descriptor = self._open.popitem(last=False)
        try:
            os.close(descriptor)
        except OSError as error:
            path = (files.root if files else self._root) / name
            raise StorageError.from_os_error(error, "close", str(path)) from error
