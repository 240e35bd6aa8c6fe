"""What the file system of a directory can do, tried out in a hidden folder that is removed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from ckptctl.ops.doctor import probes
from ckptctl.ops.doctor.check import Check
from ckptctl.storage import file_system
from ckptctl.storage.paths import real_path
from ckptctl.units import format_bytes, format_seconds

GROUP = "file system"
PREFIX = ".ckptctl-doctor-"
LITTLE = 5 * 10**9
SLOW_SYNC = 0.5
SKEW = 60.0
LARGE = 4 * 2**30 + 1
NETWORK = frozenset(
    ("9p", "afs", "beegfs", "ceph", "cifs", "fuse.sshfs", "glusterfs", "lustre", "nfs", "nfs4")
)
GONE_LATER = {
    "overlay": "inside a container, what is written here goes with it: mount a volume",
    "tmpfs": "what is written here takes memory, and is gone after a restart",
    "ramfs": "what is written here takes memory, and is gone after a restart",
}


def checks(place: Path) -> Iterator[Check]:
    """Yield the checks of this group.

    Args:
        place: A directory.
    """
    yield _kind(real_path(place))
    yield _space(place)
    try:
        before = place.stat()
        with TemporaryDirectory(prefix=PREFIX, dir=place) as folder:
            yield from _probed(Path(folder))
    except OSError as error:
        hint = "checkpoints here can be read, but none can be written"
        yield Check(GROUP, "writing", error.strerror or str(error), "warn", hint)
        return
    with suppress(OSError):
        os.utime(place, ns=(before.st_atime_ns, before.st_mtime_ns))


def _kind(place: Path) -> Check:
    kind = file_system.type_of(place)
    found = f"{place} on {kind or 'unknown'}"
    if kind in GONE_LATER:
        return Check(GROUP, "place", found, "warn", GONE_LATER[kind])
    if kind in NETWORK:
        hint = "a network: others may see files late; run `verify` where they are used"
        return Check(GROUP, "place", found, "warn", hint)
    return Check(GROUP, "place", found)


def _space(place: Path) -> Check:
    free = shutil.disk_usage(place).free
    found = format_bytes(free)
    if free >= LITTLE:
        return Check(GROUP, "free space", found)
    hint = "`ckptctl prune ROOT --keep-last N` removes old checkpoints of a run"
    return Check(GROUP, "free space", found, "warn", hint)


def _probed(folder: Path) -> Iterator[Check]:
    yield _renames(folder)
    yield _large(folder)
    yield _sync(folder)
    yield _locks(folder)
    yield _names(folder)
    yield _clock(folder)
    yield Check(GROUP, "copying", probes.copying(folder))
    yield Check(GROUP, "hard links", _yes(probes.hard_links(folder)))
    yield Check(GROUP, "unnamed files", _yes(probes.unnamed_files(folder)))


def _renames(folder: Path) -> Check:
    missing = probes.missing_renames(folder)
    if not missing:
        return Check(GROUP, "atomic rename", "without replacing, and by exchange")
    hint = "outputs are published under a lock, and `--overwrite` is refused here"
    return Check(GROUP, "atomic rename", f"no {' and no '.join(missing)}", "warn", hint)


def _large(folder: Path) -> Check:
    problem = probes.large_file(folder, LARGE)
    if problem is None:
        return Check(GROUP, "large files", f"above {format_bytes(LARGE - 1)}")
    hint = "`--max-shard-size 4GB` keeps files below 4 GiB; `ulimit -f` shows the shell's limit"
    return Check(GROUP, "large files", f"not above 4 GiB: {problem}", "warn", hint)


def _sync(folder: Path) -> Check:
    try:
        seconds = probes.sync_seconds(folder)
    except OSError as error:
        hint = "what is written may be lost in a power failure: choose another place"
        return Check(GROUP, "sync", error.strerror or str(error), "fail", hint)
    found = f"{format_seconds(seconds)} for 1 MiB"
    if seconds <= SLOW_SYNC:
        return Check(GROUP, "sync", found)
    hint = "each output is synced once per file: large shards are better here"
    return Check(GROUP, "sync", found, "warn", hint)


def _locks(folder: Path) -> Check:
    problem = probes.lock(folder)
    if problem is None:
        return Check(GROUP, "locks", "yes")
    hint = "two runs with the same destination cannot be told apart: mount it with locks"
    return Check(GROUP, "locks", problem, "fail", hint)


def _names(folder: Path) -> Check:
    if probes.tells_case(folder):
        return Check(GROUP, "names", "case matters")
    hint = "files whose names differ in case alone would be one"
    return Check(GROUP, "names", "case does not matter", "warn", hint)


def _clock(folder: Path) -> Check:
    ahead = probes.clock_ahead(folder)
    if abs(ahead) <= SKEW:
        return Check(GROUP, "clock", "agrees with this machine's")
    found = f"{format_seconds(abs(ahead))} {'ahead of' if ahead > 0 else 'behind'} this machine's"
    hint = "`ls` and `prune` judge by times whether a checkpoint is being written: set the clocks"
    return Check(GROUP, "clock", found, "warn", hint)


def _yes(found: bool) -> str:
    return "yes" if found else "no"
