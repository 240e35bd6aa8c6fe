"""Refusals of ``prune``: folders that are no runs, and policies that say too little."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

from ckptctl import formats
from ckptctl.errors import (
    RefusedError,
    SourceNotFoundError,
    UsageError,
    listed,
    nearest,
    spell_option,
)
from ckptctl.ops.runs.entries import entry_at, is_run
from ckptctl.ops.runs.health import Checkpoint, rfc3339
from ckptctl.ops.runs.protections import points_inside
from ckptctl.planner.retention import Best, Policy, Retainable, disorder
from ckptctl.storage.file_system import mounted_in
from ckptctl.storage.paths import path_hint, real_path
from ckptctl.storage.run_store import run_store
from ckptctl.storage.tree import TreePath
from ckptctl.storage.two_phase_delete import TRASH


def require_policy(policy: Policy) -> None:
    """Refuse a policy that keeps nothing: it has no rule, or a count of zero."""
    if policy.empty:
        raise RefusedError(
            "no keep rule given",
            why="without one, all checkpoints except the newest would be removed",
            hint=f"pass one, for example {spell_option('--keep-last 3')}",
        )
    for name in ("last", "every", "closest"):
        value = getattr(policy, name)
        if value is not None and value < 1:
            raise RefusedError(
                f"{spell_option(f'--keep-{name} {value}')} keeps nothing",
                hint=f"{spell_option(f'--keep-{name}')} must be at least 1",
            )
    for name in ("within", "interval"):
        seconds = getattr(policy, name)
        if seconds is not None and seconds <= 0:
            said = "nothing" if name == "within" else "every checkpoint"
            raise RefusedError(f"{spell_option(f'--keep-{name} 0')} keeps {said}")


def require_root(root: TreePath, *, force: bool = False) -> TreePath:
    """Resolve the folder whose entries may be removed, or refuse it.

    It may not be a link, ``/``, the home directory or above it, nor, without *force*, a checkpoint;
    and no file may be where what is removed goes.
    """
    store = run_store(root)
    store.require_changeable()
    store.refresh()
    if root.is_symlink():
        raise RefusedError(
            "this is a symbolic link", where=str(root), hint=f"pass its target, `{real_path(root)}`"
        )
    if not root.is_dir():
        raise SourceNotFoundError("no such directory", where=str(root), hint=path_hint(root))
    real = real_path(root)
    if any(real_path(home).is_relative_to(real) for home in _homes()):
        raise RefusedError(
            "refusing to remove anything from the home directory, `/`, or a parent of them",
            where=str(real),
        )
    _require_trash(real)
    # A pointer to an entry of it alone does not make it a checkpoint.
    if not force and formats.sniff(real) and not points_inside(real):
        raise RefusedError(
            "this is a checkpoint, not a folder of checkpoints",
            where=str(root),
            why=", ".join(f"{n}: {s.evidence}" for n, s in formats.sniff(real).items()),
            hint=_instead(real),
        )
    return real


def _require_trash(real: TreePath) -> None:
    folder = real / TRASH
    if os.path.lexists(folder) and not folder.is_symlink() and not folder.is_dir():
        raise RefusedError(
            f"`{TRASH}` is not a folder",
            where=str(folder),
            why="removed checkpoints are first moved into a folder of that name",
            hint="move or remove it; ckptctl did not create it",
        )


def _instead(real: TreePath) -> str:
    """Return a hint at the run that may have been meant."""
    run = f"did you mean the run `{real.parent}`? " if entry_at(real) else ""
    inside = (
        f"pass {spell_option('--force')} to remove checkpoints inside `{real}`"
        if is_run(real)
        else ""
    )
    return (run + inside).rstrip() or "pass the folder that contains the checkpoints"


def _homes() -> list[TreePath]:
    """Return the home directory, and ``/``: a process need not have another one."""
    try:
        return [Path.home(), Path("/")]
    except RuntimeError:
        return [Path("/")]


def require_order(checkpoints: Sequence[Checkpoint]) -> None:
    """Refuse a run in which the highest step is not the newest checkpoint."""
    found = disorder(checkpoints)
    if found:
        newer, older = found
        raise RefusedError(
            "step order and modification times disagree",
            where=f"`{older.name}` and `{newer.name}`",
            why=f"written {rfc3339(older.time)} and {rfc3339(newer.time)}; the folder may contain "
            f"two runs, or `{newer.entry.newest}` was added to `{newer.name}` later",
            hint=f"pass {spell_option('--force')} to use the order of the steps",
        )


def require_match(
    checkpoints: Sequence[Retainable], policy: Policy, *, growing: bool = False
) -> None:
    """Refuse a policy with a pattern that matches nothing, or of which no rule keeps anything.

    That is so where patterns and metrics alone are asked for and there is more than the newest one.
    In a run that is *growing* there may be no name yet that a pattern means.
    """
    names = [one.name for one in checkpoints]
    if not policy.counts:
        _require_any(checkpoints, policy)
    for pattern in () if growing else policy.patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            close = nearest(pattern, names)
            raise RefusedError(
                f"{spell_option(f'--keep {pattern}')} matches no checkpoint",
                why=f"the checkpoints are {listed(names, 3)}",
                hint=f"did you mean `{close}`?" if close else "correct or omit the pattern",
            )


def _require_any(checkpoints: Sequence[Retainable], policy: Policy) -> None:
    whole = [one for one in checkpoints if one.counts]
    named = any(fnmatchcase(one.name, glob) for one in whole for glob in policy.patterns)
    rated = any(best.value(one) is not None for one in whole for best in policy.best)
    if len(whole) > 1 and not named and not rated:
        asked = [*policy.patterns, *(best.metric for best in policy.best)]
        raise RefusedError(
            f"{listed(asked)} keeps nothing",
            why="no complete checkpoint matches by name or has a number for the metric",
            hint=f"choose among {listed([one.name for one in whole], 3)}, or pass "
            f"{spell_option('--keep-last 1')} to keep the newest checkpoint",
        )


def with_known_metrics(policy: Policy, checkpoints: Sequence[Retainable]) -> Policy:
    """Return *policy* with the names that the checkpoints have for its metrics and patterns."""
    whole = (one for one in checkpoints if one.counts)
    known = sorted({name for one in whole for name in one.metrics})
    names = [one.name for one in checkpoints]
    return replace(
        policy,
        best=tuple(_known(best, known) for best in policy.best),
        patterns=tuple(_of_names(pattern, names) for pattern in policy.patterns),
    )


def _of_names(pattern: str, names: Sequence[str]) -> str:
    """Return the name at the end of a path as shells complete it: ``runs/a/step-2/``."""
    if any(fnmatchcase(name, pattern) for name in names):
        return pattern
    return pattern.rstrip("/").rpartition("/")[2] or pattern


def _known(best: Best, known: Sequence[str]) -> Best:
    for name in (best.metric, f"eval_{best.metric}"):
        if name in known:
            return replace(best, metric=name)
    close = nearest(best.metric, known)
    raise UsageError(
        f"no complete checkpoint has a metric `{best.metric}`",
        why=f"known metrics: {listed(known)}" if known else "they have no metrics",
        hint=f"did you mean `{close}`?" if close else None,
    )


def require_removable(paths: Iterable[TreePath]) -> None:
    """Refuse to remove a mount point, what holds one, or the working directory."""
    here: Path | None = None
    with suppress(OSError):
        here = Path.cwd()
    for path in paths:
        mounted = mounted_in(Path(path))
        if mounted:
            raise RefusedError(
                "another file system is mounted inside a checkpoint",
                where=str(mounted[0]),
                why=f"`{path.name}` would be removed",
                hint="unmount it, or keep that checkpoint",
            )
        if here and here.is_relative_to(path):
            raise RefusedError(
                "the working directory would be removed",
                where=str(path),
                hint="change to another directory first",
            )
