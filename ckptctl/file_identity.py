"""Identity of a file, which is compared to detect that the file was modified or replaced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import os


@dataclass(frozen=True, order=True, slots=True)
class FileIdentity:
    """Stat fields that change when a file or folder is modified or replaced.

    A program can set the modification time to an earlier value. It cannot set the change time
    (``ctime``), which every write and every change of mode, owner or links updates.

    Attributes:
        size: Size in bytes.
        mtime_ns: Modification time in nanoseconds.
        ctime_ns: Change time in nanoseconds.
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
        """Build the identity of a file from its ``stat`` result."""
        times = status.st_mtime_ns, status.st_ctime_ns
        return cls(status.st_size, *times, status.st_ino, status.st_dev)

    def is_same_inode(self, other: FileIdentity) -> bool:
        """Check if *other* has the same inode and device, even if the contents have changed."""
        return (self.inode, self.device) == (other.inode, other.device)
