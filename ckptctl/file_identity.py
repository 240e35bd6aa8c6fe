"""Identity of a file, to detect that it was modified or replaced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import os


@dataclass(frozen=True, order=True, slots=True)
class FileIdentity:
    """Stat fields that change when a file or folder is modified or replaced.

    The modification time can be set back by a writer. The time of the last change cannot: every
    write, and every change of mode, owner or links, sets it to the current time.

    Attributes:
        size: Size in bytes.
        mtime_ns: Modification time in nanoseconds.
        ctime_ns: Time of the last change in nanoseconds.
        inode: Inode number.
        device: Device number.
    """

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    device: int

    @classmethod
    def from_stat(cls, status: os.stat_result) -> FileIdentity:
        """Return the identity for a ``stat`` result."""
        times = status.st_mtime_ns, status.st_ctime_ns
        return cls(status.st_size, *times, status.st_ino, status.st_dev)

    def is_same_inode(self, other: FileIdentity) -> bool:
        """Check if both have the same inode, even if its content has changed."""
        return (self.inode, self.device) == (other.inode, other.device)
