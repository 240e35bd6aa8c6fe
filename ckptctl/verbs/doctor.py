"""Checks of the installation, the plug-ins, a directory and the environment.

torch is not imported. Test files are removed, and nothing else is changed. The status of a check is
``ok``, ``warn`` if something is slow or unavailable, or ``fail`` if something is broken.
"""

from __future__ import annotations

import fcntl
import os
import platform
import re
import resource
import shutil
import stat
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Literal

from ckptctl import families, formats
from ckptctl.conversion import steps
from ckptctl.errors import CkptError, SourceNotFoundError
from ckptctl.installed import get_package_name
from ckptctl.option_checks import STEP_GROUP
from ckptctl.results import JsonField, Result
from ckptctl.storage import crc, file_system
from ckptctl.storage.destinations import require_local_path
from ckptctl.storage.file_system import sync_directory
from ckptctl.storage.paths import build_path_hint, expand_home, resolve_links
from ckptctl.units import format_bytes, format_seconds, pluralize
from ckptctl.version import __version__

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Check(Result, order="group name status found hint"):
    """Result of one check."""

    name: Annotated[str, JsonField("name of the check")]
    found: Annotated[str, JsonField("human-readable result of the check")]
    status: Annotated[
        Status, JsonField("`ok`, `warn` (slower, or a feature is unavailable) or `fail` (broken)")
    ] = "ok"
    hint: Annotated[str | None, JsonField("suggested action")] = None
    group: Annotated[
        str, JsonField("`installation`, `plug-ins`, `file system` or `surroundings`")
    ] = ""


@dataclass(frozen=True, slots=True)
class Diagnosis(Result, order="directory healthy warnings failures checks"):
    """Results of all ``ckptctl doctor`` checks."""

    directory: Annotated[Path, JsonField("path as given")]
    checks: Annotated[tuple[Check, ...], JsonField("results of all checks")]

    @property
    def healthy(self) -> Annotated[bool, JsonField()]:
        """Whether all checks passed; the exit code is 0 if true, else 1."""
        return not self.failures

    @property
    def warnings(self) -> Annotated[int, JsonField()]:
        """Number of warnings."""
        return sum(check.status == "warn" for check in self.checks)

    @property
    def failures(self) -> Annotated[int, JsonField()]:
        """Number of failed checks."""
        return sum(check.status == "fail" for check in self.checks)


def _build_check(
    name: str, found: str, passed: bool, hint: str, failed_status: Status = "warn"
) -> Check:
    return Check(name, found) if passed else Check(name, found, failed_status, hint)


def diagnose_directory(directory: Path) -> Diagnosis:
    """Check this environment and *directory*, a folder of checkpoints."""
    require_local_path(directory)
    path = expand_home(directory).absolute()
    if not path.is_dir():
        raise SourceNotFoundError(
            "no such directory", where=str(directory), hint=build_path_hint(path)
        )
    groups = {
        "installation": _check_installation(),
        "plug-ins": _check_plug_ins(),
        "file system": _check_file_system(path),
        "surroundings": _check_environment(),
    }
    checks = (
        replace(check, group=name)
        for name, checks_of_group in groups.items()
        for check in checks_of_group
    )
    return Diagnosis(directory, tuple(checks))


# ----------------------------------------------------------------------------------- installation

NAME = "ckptctl"
REQUIREMENTS = ("typer", "rich", "safetensors", "huggingface_hub", "fsspec", "pyyaml", "isal")
"""Required packages, for a source checkout, which has no package metadata."""
OPTIONAL = {
    "torch": "required for casts, dequantization, merges, transposes, statistics, `--nan` and "
    "training: `pip install torch`",
    "isal": None,
}
"""Optional packages, each with a hint that is shown if the package is missing."""
SLOW_START_SECONDS = 0.5
HEAVY_PACKAGES = ("torch", "numpy")
_EXTRA = re.compile(r"extra == (?!['\"]torch['\"])")
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)\s*(?:>=\s*([0-9.]+))?")


def _check_installation() -> Iterator[Check]:
    """Check that packages are installed in sufficient versions, and measure the start-up time."""
    yield _check_startup_time(time.process_time())
    yield _check_version()
    yield Check("python", f"{platform.python_version()} at {sys.executable}")
    for name, least in _list_requirements():
        version = _find_version(name)
        install = f"`pip install '{name}>={least}'`" if least else f"`pip install {name}`"
        if version is None:
            status: Status = "warn" if name in OPTIONAL else "fail"
            yield Check(name, "not installed", status, OPTIONAL.get(name) or install)
        elif least and _parse_version(version) < _parse_version(least):
            yield Check(name, f"{version}, older than {least}", "fail", install)
        else:
            yield Check(name, version)
    fast = crc.crc32 is not zlib.crc32
    hint = "`pip install isal` makes checksums about ten times faster"
    yield _build_check("checksums", f"computed by {'isal' if fast else 'zlib'}", fast, hint)


def _check_startup_time(seconds: float) -> Check:
    imported_early = [name for name in HEAVY_PACKAGES if name in sys.modules]
    result = f"{seconds:.2f} s of CPU time"
    if imported_early:
        result += f", {' and '.join(imported_early)} already imported"
    hint = (
        "list what is imported before ckptctl with `python -X importtime -m ckptctl --version`; "
        "check *.pth files in site-packages and sitecustomize.py"
    )
    return _build_check("start", result, seconds <= SLOW_START_SECONDS and not imported_early, hint)


def _check_version() -> Check:
    result = f"{__version__} at {Path(__file__).parents[1]}"
    installed = _find_version(NAME)
    if installed in (None, __version__):
        return Check(NAME, result)
    hint = "reinstall it, or run from another directory"
    return Check(NAME, f"{result}, but {installed} is installed", "warn", hint)


def _list_requirements() -> list[tuple[str, str]]:
    """List required packages, each with its minimum version or an empty string."""
    try:
        requirements = metadata.requires(NAME) or []
    except metadata.PackageNotFoundError:
        requirements = [*REQUIREMENTS, "torch"]
    matches = (_REQUIREMENT.match(text) for text in requirements if _EXTRA.search(text) is None)
    return [(match[1], match[2] or "") for match in matches if match]


def _find_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _parse_version(version: str) -> list[int]:
    release = re.match(r"[0-9.]*", version)
    return [int(part) for part in (release[0] if release else "").split(".") if part]


# --------------------------------------------------------------------------------------- plug-ins


def _check_plug_ins() -> Iterator[Check]:
    """Check whether plug-ins can be loaded and have unique names."""
    yield from _check_entry_points(
        "format", formats.ENTRY_POINTS, formats.list_format_names(), formats.load_plugin_format
    )
    yield from _check_entry_points("step", STEP_GROUP, (), steps.load_added_step)
    yield from _check_entry_points(
        "model type", families.ENTRY_POINT_GROUP, families.list_built_in_types(), families.family
    )


def _check_entry_points(
    kind: str, group: str, built_in: Collection[str], load: Callable[[str], object]
) -> Iterator[Check]:
    points = metadata.entry_points(group=group)
    if not points and built_in:
        yield Check(f"{kind}s", f"{len(built_in):,} built in, none added")
    counts = Counter(point.name for point in points)
    for point in sorted(points, key=lambda entry_point: entry_point.name):
        name, result = f"{kind} {point.name}", f"added by {get_package_name(point)}"
        if point.name in built_in:
            hint = f"ignored, because ckptctl has a {kind} of that name; rename it in the package"
            yield Check(name, result, "warn", hint)
        elif counts[point.name] > 1:
            hint = "another package adds the same name; uninstall one of them"
            yield Check(name, result, "warn", hint)
        else:
            try:
                load(point.name)
                yield Check(name, result)
            except CkptError as error:
                why = "; ".join(filter(None, (error.why, error.hint)))
                yield Check(name, f"{result}, cannot be loaded", "fail", why)


# ------------------------------------------------------------------------------------ file system

PREFIX = ".ckptctl-doctor-"
MIN_FREE_BYTES = 5 * 10**9
SLOW_SYNC_SECONDS = 0.5
MAX_SKEW_SECONDS = 60.0
LARGE_FILE_BYTES = 4 * 2**30 + 1
NETWORK_KINDS = frozenset(
    ("9p", "afs", "beegfs", "ceph", "cifs", "fuse.sshfs", "glusterfs", "lustre", "nfs", "nfs4")
)
TEMPORARY_KINDS = {
    "overlay": "files written here are lost with the container; mount a volume",
    "tmpfs": "files written here use memory and are lost at a restart",
    "ramfs": "files written here use memory and are lost at a restart",
}


def _check_file_system(directory: Path) -> Iterator[Check]:
    """Check the file system of *directory* in a hidden folder, which is removed afterwards."""
    type_name = file_system.find_type(resolve_links(directory))
    hint = TEMPORARY_KINDS.get(
        type_name or "",
        "network file system: other machines may see files late; run `verify` where files are read",
    )
    is_durable = type_name not in TEMPORARY_KINDS and type_name not in NETWORK_KINDS
    yield _build_check("location", f"{directory} on {type_name or 'unknown'}", is_durable, hint)
    free = shutil.disk_usage(directory).free
    hint = "remove old checkpoints of a run with `ckptctl prune ROOT --keep-last N`"
    yield _build_check("free space", format_bytes(free), free >= MIN_FREE_BYTES, hint)
    try:
        status_before = directory.stat()
        with TemporaryDirectory(prefix=PREFIX, dir=directory) as folder:
            yield from _probe_folder(Path(folder))
    except OSError as error:
        hint = "checkpoints can be read here, but not written"
        yield Check("writing", error.strerror or str(error), "warn", hint)
        return
    with suppress(OSError):
        os.utime(directory, ns=(status_before.st_atime_ns, status_before.st_mtime_ns))


def _probe_folder(folder: Path) -> Iterator[Check]:
    missing = list_unsupported_renames(folder)
    result = f"no {' and no '.join(missing)}" if missing else "no-replace and exchange"
    hint = "outputs are published under a lock, and `--overwrite` is not supported here"
    yield _build_check("atomic rename", result, not missing, hint)
    problem = find_large_file_problem(folder, LARGE_FILE_BYTES)
    result = (
        f"not above 4 GiB: {problem}" if problem else f"above {format_bytes(LARGE_FILE_BYTES - 1)}"
    )
    hint = "pass `--max-shard-size 4GB` to keep files below 4 GiB; check the limit with `ulimit -f`"
    yield _build_check("large files", result, problem is None, hint)
    try:
        seconds = measure_sync_seconds(folder)
        hint = "syncing is slow, and each output file is synced once; use large shards here"
        result = f"{format_seconds(seconds)} for 1 MiB"
        yield _build_check("sync", result, seconds <= SLOW_SYNC_SECONDS, hint)
    except OSError as error:
        hint = "files may be lost in a power failure; choose another file system"
        yield Check("sync", error.strerror or str(error), "fail", hint)
    problem = find_lock_problem(folder)
    hint = "two runs with the same destination cannot detect each other; enable file locks"
    yield _build_check("locks", problem or "yes", problem is None, hint, "fail")
    is_sensitive = is_case_sensitive(folder)
    hint = "file names that differ only in case would collide"
    yield _build_check(
        "names", f"case-{'sensitive' if is_sensitive else 'insensitive'}", is_sensitive, hint
    )
    ahead = measure_clock_skew(folder)
    result = f"{format_seconds(abs(ahead))} {'ahead of' if ahead > 0 else 'behind'} the local clock"
    agrees = abs(ahead) <= MAX_SKEW_SECONDS
    hint = "synchronize the clocks; `ls` and `prune` use times to detect unfinished saves"
    yield _build_check("clock", "agrees with the local clock" if agrees else result, agrees, hint)
    yield Check("copying", describe_copying(folder))
    yield Check("hard links", "yes" if has_hard_link_support(folder) else "no")
    yield Check("unnamed files", "yes" if has_unnamed_file_support(folder) else "no")


# ------------------------------------------ probes in an empty folder

FICLONE = 0x40049409
"""Number of the ioctl ``FICLONE``, from ``linux/fs.h`` (man 2 ioctl_ficlone)."""
SYNC_BYTES = 1 << 20


def list_unsupported_renames(folder: Path) -> list[str]:
    """List rename modes that publishing needs but *folder* does not support (man 2 rename)."""
    a, b = folder / "rename-a", folder / "rename-b"
    a.touch()
    unsupported = []
    for flags, name in (
        (file_system.NOREPLACE, "rename without replacing"),
        (file_system.EXCHANGE, "exchange"),
    ):
        try:
            file_system.rename_atomically(a, b, flags)
        except (file_system.UnsupportedRenameError, OSError):
            unsupported.append(name)
        a.touch()
        b.touch()
    return unsupported


def find_large_file_problem(folder: Path, nbytes: int) -> str | None:
    """Return the reason why a sparse file of *nbytes* cannot be created, or None if it can."""
    path = folder / "large"
    try:
        with path.open("wb") as file:
            file.truncate(nbytes)
    except OSError as error:
        return error.strerror or str(error)
    finally:
        path.unlink(missing_ok=True)
    return None


def measure_sync_seconds(folder: Path) -> float:
    """Measure how long it takes to write and sync a file of 1 MiB, in seconds."""
    start = time.perf_counter()
    with (folder / "sync").open("wb") as file:
        file.write(bytes(SYNC_BYTES))
        file.flush()
        os.fsync(file.fileno())
    sync_directory(folder)
    return time.perf_counter() - start


def find_lock_problem(folder: Path) -> str | None:
    """Return the reason why files in *folder* cannot be locked (man 2 flock), or None."""
    try:
        with (folder / "lock").open("wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.strerror or str(error)
    return None


def is_case_sensitive(folder: Path) -> bool:
    """Return whether file names in *folder* that differ only in case denote different files."""
    (folder / "case").touch()
    return not (folder / "CASE").exists()


def measure_clock_skew(folder: Path) -> float:
    """Measure by how many seconds the file system's clock is ahead of the local clock."""
    path = folder / "clock"
    path.touch()
    return path.stat().st_mtime - time.time()


def describe_copying(folder: Path) -> str:
    """Describe how the file system copies byte ranges between files."""
    source, target = folder / "copy-a", folder / "copy-b"
    source.write_bytes(bytes(4096))
    with source.open("rb") as a, target.open("wb") as b:
        try:
            fcntl.ioctl(b.fileno(), FICLONE, a.fileno())
            return "by reference (reflinks)"
        except OSError:
            pass
        try:
            os.copy_file_range(a.fileno(), b.fileno(), 4096, 0, 0)
            return "in the kernel (copy_file_range)"
        except OSError:
            return "through memory"


def has_hard_link_support(folder: Path) -> bool:
    """Return whether the file system of *folder* supports hard links."""
    (folder / "link-a").touch()
    try:
        os.link(folder / "link-a", folder / "link-b")
    except OSError:
        return False
    return True


def has_unnamed_file_support(folder: Path) -> bool:
    """Return whether the file system of *folder* supports ``O_TMPFILE`` (man 2 open)."""
    try:
        os.close(os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600))
    except OSError:
        return False
    return True


# ----------------------------------------------------------------------------------- surroundings

MIN_OPEN_FILES = 1024
TOKEN_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")


def _check_environment() -> Iterator[Check]:
    """Check the terminal, resource limits, rank variables, and the Hub's cache and token."""
    encoding = (sys.stdout.encoding or "ascii").lower()
    hint = "other characters are escaped; `export PYTHONUTF8=1`, or set LANG to a UTF-8 locale"
    utf8 = encoding.replace("-", "").replace("_", "") == "utf8"
    yield _build_check("encoding", encoding, utf8, hint)
    yield _check_terminal()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = "unlimited" if hard == resource.RLIM_INFINITY else hard
    hint = f"checkpoints of many ranks have more files; raise the limit with `ulimit -n {most}`"
    unlimited = soft == resource.RLIM_INFINITY
    result = "no limit" if unlimited else f"up to {soft:,}"
    yield _build_check("open files", result, unlimited or soft >= MIN_OPEN_FILES, hint)
    yield _check_ranks()
    yield _check_hub_cache()
    yield _check_hub_token()


def _check_terminal() -> Check:
    if not sys.stdout.isatty():
        return Check("terminal", "none (output is tab-separated)")
    is_colorless = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    width = shutil.get_terminal_size().columns
    return Check("terminal", f"{pluralize(width, 'column')}, {'no ' if is_colorless else ''}color")


def _check_ranks() -> Check:
    world = os.environ.get("WORLD_SIZE", "1")
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if world in ("", "0", "1") or not missing:
        return Check("ranks", f"{world or 1}")
    hint = "unset WORLD_SIZE, pass `--single-process`, or start ckptctl with torchrun"
    result = f"WORLD_SIZE is {world}, not set: {', '.join(missing)}"
    return Check("ranks", result, "warn", hint)


def _find_hub_home() -> Path:
    """Return the cache folder of Hugging Face libraries, as ``huggingface_hub.constants`` does.

    That module is not imported, because its import would take most of the start-up time.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or f"{cache}/huggingface"
    return Path(os.path.expandvars(home)).expanduser()


def _check_hub_cache() -> Check:
    configured_path = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    place = (
        Path(os.path.expandvars(configured_path)).expanduser()
        if configured_path
        else _find_hub_home() / "hub"
    )
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    result = f"{place}{', offline' if offline else ''}"
    existing_folder = next(parent for parent in (place, *place.parents) if parent.exists())
    if place.exists() or os.access(existing_folder, os.W_OK):
        return Check("Hub cache", result + ("" if place.exists() else ", does not exist yet"))
    hint = f"{existing_folder} is not writable; set HF_HOME to another folder"
    return Check("Hub cache", result, "warn", hint)


def _check_hub_token() -> Check:
    """Check whether a Hub token is stored, and where, without reading its value."""
    variable = next((name for name in TOKEN_VARIABLES if os.environ.get(name)), None)
    if variable:
        return Check("Hub token", f"from {variable}")
    configured_path = os.environ.get("HF_TOKEN_PATH")
    path = (
        Path(os.path.expandvars(configured_path)).expanduser()
        if configured_path
        else _find_hub_home() / "token"
    )
    try:
        mode = path.stat().st_mode
    except OSError:
        return Check("Hub token", "none (private and gated repositories are not accessible)")
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        hint = f"other users can read it; run `chmod 600 {path}`"
        return Check("Hub token", f"in {path}", "warn", hint)
    return Check("Hub token", f"in {path}")
