"""What must not be pruned, and policies that say too little."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

from ckptctl import formats
from ckptctl.errors import RefusedError, SourceNotFoundError, UsageError, listed, nearest
from ckptctl.ops.runs.listing import rfc3339
from ckptctl.ops.runs.names import parse
from ckptctl.ops.runs.pointers import pins, unreadable
from ckptctl.planner.retention import Best, Candidate, Policy, disorder
from ckptctl.storage.mounts import mounted_in
from ckptctl.storage.nearby import nearby
from ckptctl.storage.remote.urls import is_url

ENDS = {"min": True, "max": False}
LOW, HIGH = ("loss",), ("accuracy",)


def parse_best(text: str) -> Best:
    """Return what ``METRIC[:min|max]`` means.

    Raises:
        UsageError: It does not say which end is good, and the name does not, either.
    """
    metric, colon, end = text.rpartition(":")
    if colon and end in ENDS and metric:
        return Best(metric, ENDS[end])
    if text.endswith((*LOW, *HIGH)):
        return Best(text, text.endswith(LOW))
    raise UsageError(
        f"`{text}` does not say whether small or large is good",
        hint=f"write `{text}:min` or `{text}:max`",
    )


def require_policy(policy: Policy) -> None:
    """Refuse a policy that keeps nothing.

    Raises:
        RefusedError: It has no rule, or a count of zero.
    """
    if policy.empty:
        raise RefusedError(
            "nothing says which checkpoints are kept",
            why="without a rule all but the newest would be removed",
            hint="say for example `--keep-last 3`",
        )
    for name, value in (("last", policy.last), ("every", policy.every)):
        if value is not None and value < 1:
            raise RefusedError(f"`--keep-{name} {value}` keeps nothing", hint="the least is 1")
    if policy.within is not None and policy.within <= 0:
        raise RefusedError("`--keep-within` with no time at all keeps nothing")


def require_root(root: Path, *, force: bool = False) -> Path:
    """Return the folder whose entries may be removed, resolved.

    Args:
        root: As it was named.
        force: Whether it may be a checkpoint itself.

    Raises:
        SourceNotFoundError: There is no such directory.
        RefusedError: It is a link, ``/``, the home directory or above it, or a checkpoint.
    """
    if is_url(root):
        raise RefusedError(
            "checkpoints behind a URL are not removed",
            where=str(root),
            why="there is no lock and no trash there: a removal that fails half-way stays so",
            hint="object stores have rules for old objects; `ckptctl ls` says what is there",
        )
    if root.is_symlink():
        raise RefusedError(
            "this is a symbolic link", where=str(root), hint=f"name `{root.resolve()}` itself"
        )
    if not root.is_dir():
        raise SourceNotFoundError("no such directory", where=str(root), hint=nearby(root))
    real = root.resolve()
    if any(home.resolve().is_relative_to(real) for home in _homes()):
        raise RefusedError("this folder is not one of checkpoints", where=str(real))
    if not force and _is_checkpoint(real):
        raise RefusedError(
            "this is a checkpoint itself, not a folder of checkpoints",
            where=str(root),
            why=", ".join(f"{n}: {s.evidence}" for n, s in formats.sniff(real).items()),
            hint=f"did you mean `{real.parent}`? `--force` removes checkpoints inside of it",
        )
    return real


def _homes() -> list[Path]:
    """Return the home directory, and ``/``: a process need not have another one."""
    try:
        return [Path.home(), Path("/")]
    except RuntimeError:
        return [Path("/")]


def _is_checkpoint(root: Path) -> bool:
    """Return whether *root* is one, other than by a pointer to an entry of it."""
    if not formats.sniff(root):
        return False
    names = [item.name for item in root.iterdir() if item.is_dir() and parse(item.name)]
    return not pins(root, names)


def require_pointers(root: Path) -> None:
    """Refuse a run of which a pointer cannot be read.

    Raises:
        RefusedError: Nobody knows what it names.
    """
    found = unreadable(root)
    if found:
        path, why = found
        raise RefusedError(
            "a pointer cannot be read",
            where=str(path),
            why=f"{why}: the checkpoint that it names might be removed",
            hint="run it as somebody who may read it",
        )


def require_order(candidates: Iterable[Candidate]) -> None:
    """Refuse where the highest step is not the newest checkpoint.

    Raises:
        RefusedError: Two of them are in disorder.
    """
    found = disorder(candidates)
    if found:
        newer, older = found
        raise RefusedError(
            "the order of steps is not the order in which the checkpoints were written",
            where=f"`{older.name}` and `{newer.name}`",
            why=f"written {rfc3339(older.time)} and {rfc3339(newer.time)}: two runs in one folder?",
            hint="`--force` goes by the steps",
        )


def require_match(candidates: Iterable[Candidate], policy: Policy) -> None:
    """Refuse a policy of patterns and metrics alone of which none matches anything.

    Raises:
        RefusedError: No rule keeps anything, and there is more than the newest one.
    """
    if any(rule is not None for rule in (policy.last, policy.every, policy.within)):
        return
    whole = [one for one in candidates if one.state == "complete"]
    named = any(fnmatchcase(one.name, glob) for one in whole for glob in policy.patterns)
    rated = any(best.value(one) is not None for one in whole for best in policy.best)
    if len(whole) > 1 and not named and not rated:
        asked = [*policy.patterns, *(best.metric for best in policy.best)]
        raise RefusedError(
            f"{listed(asked)} keeps nothing",
            why="no complete checkpoint has such a name, or a number for such a metric",
            hint="`ckptctl ls` shows the names; `--keep-last 1` keeps the newest one",
        )


def with_known_metrics(policy: Policy, candidates: Sequence[Candidate]) -> Policy:
    """Return *policy* with the names that the checkpoints have for its metrics.

    Raises:
        UsageError: No complete checkpoint has one of them.
    """
    whole = (one for one in candidates if one.state == "complete")
    known = sorted({name for one in whole for name in one.metrics})
    return replace(policy, best=tuple(_known(best, known) for best in policy.best))


def _known(best: Best, known: Sequence[str]) -> Best:
    for name in (best.metric, f"eval_{best.metric}"):
        if name in known:
            return replace(best, metric=name)
    close = nearest(best.metric, known)
    raise UsageError(
        f"no complete checkpoint states `{best.metric}`",
        why=f"there are {listed(known)}" if known else "they state no metrics",
        hint=f"did you mean `{close}`?" if close else None,
    )


def require_removable(paths: Iterable[Path]) -> None:
    """Refuse to remove mount points, what holds one, and where this process is.

    Raises:
        RefusedError: One of *paths* is that.
    """
    here = _working_directory()
    for path in paths:
        mounted = mounted_in(path)
        if mounted:
            raise RefusedError(
                "another file system is mounted there",
                where=str(mounted[0]),
                why=f"`{path.name}` would be removed",
                hint="unmount it first, or keep that checkpoint",
            )
        if here and here.is_relative_to(path):
            raise RefusedError(
                "the working directory would be removed", where=str(path), hint="leave it first"
            )


def _working_directory() -> Path | None:
    try:
        return Path.cwd()
    except OSError:
        return None
