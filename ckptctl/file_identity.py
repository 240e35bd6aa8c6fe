"""What tells a file from what it was before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import os


@dataclass(frozen=True, order=True, slots=True)
class FileIdentity:
    """What tells a file, or a folder, from what it was before, and from another of its name.

    Whoever writes to a file can set its modification time back, and nobody the time of its last
    change, which any write, and any change of mode, owner or links, sets to now.

    Attributes:
        size: Bytes.
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
    def of(cls, status: os.stat_result) -> FileIdentity:
        """Return the identity of what has *status*."""
        times = status.st_mtime_ns, status.st_ctime_ns
        return cls(status.st_size, *times, status.st_ino, status.st_dev)

    def one_with(self, other: FileIdentity) -> bool:
        """Return whether both are of the same inode, whatever has been written to it."""
        return (self.inode, self.device) == (other.inode, other.device)
