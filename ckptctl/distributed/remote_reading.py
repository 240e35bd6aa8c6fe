"""Reading a DCP directory below a URL through the executor: its files are memory to a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import cast

from ckptctl.catalog import Box, memory_key
from ckptctl.errors import DamagedError
from ckptctl.formats.dcp.remote import locate, remote_catalog
from ckptctl.ops.state_mapping import StateMapping
from ckptctl.ops.wanted import Wanted
from ckptctl.storage.remote import RemoteFiles, RemoteMemory


class Remote:
    """One DCP directory below a URL.

    Args:
        url: The directory.

    Attributes:
        catalog: Its index.
    """

    def __init__(self, url: str) -> None:
        self.files = RemoteFiles(url)
        self.catalog = remote_catalog(self.files)
        self._versions: dict[str, object] = {}

    def located(
        self, mapping: StateMapping, wanted: Mapping[str, Wanted]
    ) -> tuple[StateMapping, dict[str, memoryview], bool]:
        """Return *mapping* over what is wanted, and the memory that its files are.

        Also return whether all of each tensor is in it.

        Args:
            mapping: How the directory becomes the state.
            wanted: What is to be read.

        Raises:
            DamagedError: An item is not what the metadata says.
        """
        entries = mapping.catalog.tensors
        chosen = [one for one in mapping.tensors if any(v.key in wanted for v in one.targets)]
        whole = not all(one.renames for one in chosen)
        boxes: dict[str, list[Box]] = {}
        for one in chosen:
            for view in one.sources:
                targets = wanted[one.targets[0].key].targets if not whole else ()
                found = [target.box for target in targets] or [Box.whole(entries[view.key].shape)]
                boxes.setdefault(view.key, []).extend(found)
        located = locate(self.files, mapping.catalog, boxes)
        names = {extent.file for entry in located.values() for extent in entry.extents}
        memory = {name: self._memory(memory_key(name)) for name in sorted(names)}
        catalog = replace(mapping.catalog, tensors={**entries, **located})
        return replace(mapping, catalog=catalog), memory, whole

    def require_unchanged(self) -> None:
        """Make sure that what was read is what was planned.

        Raises:
            DamagedError: A file is another one.
        """
        for name, version in self._versions.items():
            if self.files.version(name) != version:
                raise DamagedError(
                    f"`{name}` changed while it was being read",
                    where=self.files.url,
                    hint="try again once nothing writes to it",
                )

    def _memory(self, name: str) -> memoryview:
        self._versions[name] = self.files.version(name)
        return cast(memoryview, RemoteMemory(self.files, name))
