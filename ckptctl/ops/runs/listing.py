"""The checkpoints of a run: which there are, which are complete, what protects them.

A run is a folder whose entries are checkpoints with steps in their names. Whether one is complete
is what ``verify --level fast`` says; nothing is written, and torch is not imported.
"""

from __future__ import annotations

import time as clock
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from ckptctl.ops.runs.entries import RunEntry, entries
from ckptctl.ops.runs.health import Checkpoint, examine
from ckptctl.ops.runs.protections import Protected, RunView, protect
from ckptctl.planner.retention import ordered
from ckptctl.results import Inline, JsonField, Result
from ckptctl.storage.paths import source_path
from ckptctl.storage.tree import TreePath

COMPANIONS = (
    "trainer_state.json",
    "meta.pt",
    "recipe_state.pt",
    "recipe_state/recipe_state.pt",
    "common.pt",
    "random_states_0.pkl",
)
"""What trainers write beside the weights, and after them: transformers, Lightning, torchtune,
Megatron, accelerate."""


@dataclass(frozen=True, slots=True)
class Listed:
    """A checkpoint of a run, and whether it is the newest."""

    checkpoint: Annotated[Checkpoint, Inline()]
    newest: Annotated[
        bool,
        JsonField(
            "whether it is the newest complete checkpoint of its series, which is never pruned"
        ),
    ]


@dataclass(frozen=True, slots=True)
class RunFolder(Result, order="root series checkpoints others"):
    """A folder of checkpoints.

    Attributes:
        checkpoints: By series and step.
    """

    root: Annotated[TreePath, JsonField("path as given")]
    checkpoints: tuple[Checkpoint, ...]
    others: Annotated[tuple[str, ...], JsonField("names of other entries, except hidden ones")] = ()

    @property
    def listed(
        self,
    ) -> Annotated[
        tuple[Listed, ...], JsonField("checkpoints by series and step", name="checkpoints")
    ]:
        """Return the checkpoints, each with whether it is the newest."""
        newest = self.newest
        return tuple(Listed(one, one.name in newest) for one in self.checkpoints)

    @property
    def series(self) -> Annotated[tuple[str, ...], JsonField()]:
        """Common part of the names in each series of checkpoints."""
        return tuple(dict.fromkeys(one.series for one in self.checkpoints))

    @property
    def newest(self) -> frozenset[str]:
        """Return the names of the newest complete one of each series, which are always kept."""
        return frozenset({one.series: one.name for one in self.checkpoints if one.counts}.values())


def read_run(
    root: TreePath,
    now: float | None = None,
    series: str | None = None,
    *,
    in_use: Collection[str] = (),
    branches: bool = True,
    model: bool = True,
) -> RunFolder:
    """Read the checkpoints in *root*.

    Args:
        root: A directory.
        now: Seconds since the epoch; None: what the clock says.
        series: Only those whose names have this in common.
        in_use: Names of those with which a training is at work.
        branches: Whether what the run left behind is left alone.
        model: See ``health``.
    """
    now, root = clock.time() if now is None else now, source_path(root)
    own = [entry for entry in entries(root) if series in (None, entry.named.series)]
    company = Company(own)
    examined = [company.compared(examine(entry, now, model=model)) for entry in own]
    protected = protect(RunView(root, examined, in_use, branches))
    checkpoints = (
        replace(one, **protected.get(one.name, Protected())._asdict()) for one in examined
    )
    names = {item.name for item in root.iterdir()} - {entry.path.name for entry in own}
    others = sorted(name for name in names if not name.startswith("."))
    return RunFolder(root, tuple(ordered(checkpoints)), tuple(others))


class Company:
    """Which of the files that trainers write last the checkpoints of a series have.

    Whoever lacks one may be unfinished, or saved in another way: that is a guess, no evidence.
    """

    def __init__(self, found: Sequence[RunEntry]) -> None:
        own = {one.path: one.named.series for one in found if one.counts and not one.staging}
        self._have = {path: [name for name in COMPANIONS if _has(path, name)] for path in own}
        self._count = Counter(own.values())
        self._having = Counter((own[p], name) for p, names in self._have.items() for name in names)

    def compared(self, found: Checkpoint) -> Checkpoint:
        """Note of a complete one which file it lacks that most others of its series have."""
        if not found.complete:
            return found
        member = found.path in self._have
        have = self._have[found.path] if member else [n for n in COMPANIONS if _has(found.path, n)]
        others = self._count[found.series] - member
        lacks = (
            name
            for name in COMPANIONS
            if name not in have and self._having[found.series, name] * 2 > others
        )
        return replace(found, lacks=next(lacks, ""))


def _has(folder: TreePath, name: str) -> bool:
    try:
        return (folder / name).exists()
    except OSError:
        return False
