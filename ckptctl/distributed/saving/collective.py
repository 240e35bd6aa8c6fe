"""One save of all ranks together, as one of them goes through it.

Where plans hold there is one exchange before a byte is written, in which ranks agree that they do,
and one afterwards, in which rank 0 learns that all are done and publishes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ckptctl.catalog import Blob
from ckptctl.distributed.plan_cache import PlanCache
from ckptctl.distributed.saving.options import SaveOptions
from ckptctl.distributed.saving.place import Place, place_at
from ckptctl.distributed.saving.plans import SavedPlan
from ckptctl.distributed.saving.rank_output import Held, held
from ckptctl.distributed.state import State, StateDict
from ckptctl.errors import StorageError
from ckptctl.formats.base import OutputTensor
from ckptctl.formats.dcp.metadata import Item, Origin
from ckptctl.ops.ranks.agreement import (
    Statement,
    first_to_say,
    generation,
    new_nonce,
    require_agreement,
    unchanged,
)
from ckptctl.ops.ranks.coordinator import Coordinator, sendable, through_first
from ckptctl.ops.saving.decision import Decision, Share, decide
from ckptctl.ops.saving.files import RankFiles, RankItems, metadata, tensor_files, with_values
from ckptctl.ops.saving.holdings import Packed, digest, pack
from ckptctl.ops.saving.values import (
    group_digests,
    path_of,
    tensor_apart,
    unpack_groups,
    written_now,
)

VERSION = 1
"""Of what the key of a plan is made of."""

LayOut = Callable[[], RankFiles]
"""Lays out a rank's files; nothing that can fail on one rank alone happens before."""


class Written(NamedTuple):
    """What a rank says when it is done.

    Attributes:
        sizes: Of its files.
        values: Its leaves that are no tensors, and tensors that it keeps apart; where they lie.
        items: Where its tensors lie; None: where they did the last time.
    """

    sizes: dict[str, int]
    values: list[tuple[OutputTensor | Blob, Item]]
    items: RankItems | None


def plan_key(own: Held, packed: Packed, ranks: Coordinator, options: SaveOptions) -> bytes:
    """Return a digest of all that a rank's plan depends on.

    Args:
        own: What the rank holds.
        packed: The same, as it is sent.
        ranks: The group.
        options: How it saves.
    """
    boxes = [[(box.offsets, box.sizes) for box in boxes] for boxes in packed.boxes]
    here = (VERSION, ranks.rank, ranks.world, options.files)
    return digest((here, packed.identity, boxes, packed.which, own.steps))


class CollectiveSave:
    """One save.

    Args:
        ranks: The group.
        path: Where the checkpoint will appear.
        options: How.
        plans: Where plans are kept.
        stack: Removes what was staged when it closes.
    """

    _held: Held
    _packed: Packed
    _key: bytes
    _place: Place
    _decision: Decision
    _save_id: str

    def __init__(
        self,
        ranks: Coordinator,
        path: Path,
        options: SaveOptions,
        plans: PlanCache[SavedPlan],
        stack: ExitStack,
    ) -> None:
        self._ranks = ranks
        self._target = path
        self._options = options
        self._plans = plans
        self._stack = stack
        self._plan: SavedPlan | None = None
        self._new = False
        self._error: BaseException | None = None

    def prepare(self, state: State | StateDict | Held) -> Statement:
        """Find out what this rank holds; on rank 0 also make room beside the destination."""
        try:
            self._place = place_at(self._target, self._options)
            self._target = self._place.target
            self._hold(held(state, trusted=self._options.trusted))
            if self._ranks.rank == 0:
                self._place.make_room(self._stack)
            return self._statement()
        except BaseException as error:
            self._error = error
            return Statement(str(self._target), problem=sendable(error))

    def agree(self, said: Sequence[Statement]) -> None:
        """Go on only if all ranks do, and mean the same.

        Raises:
            CkptError: They do not; on every rank.
        """
        if self._error is not None:
            raise self._error
        require_agreement(said, self._ranks.rank)
        self._save_id = generation(said).hex()

    def planned(self, said: Sequence[Statement]) -> LayOut:
        """Return how this rank lays out its files, by the plan that all have or by a new one."""
        if self._plan and unchanged(said):
            return partial(self._again, self._plan, said)
        share = self._share(first_to_say(said, self._ranks.rank))
        return partial(self._anew, share, generation(said))

    def carry_out(self, lay_out: LayOut) -> Path:
        """Write this rank's files; rank 0 adds the metadata and publishes when all are done.

        Args:
            lay_out: Of :meth:`planned`.

        Raises:
            CkptError: Nothing was published; on every rank.
        """
        through_first(self._ranks, lambda: self._write(lay_out()), self._publish)
        assert self._plan
        self._plans.put(self._key, self._plan)
        return self._target

    def _again(self, plan: SavedPlan, said: Sequence[Statement]) -> RankFiles:
        rank, groups = self._ranks.rank, [one.groups for one in said]
        written = written_now(rank, plan.groups, self._held.holding, groups)
        return with_values(rank, plan.files, written, self._held.values)

    def _anew(self, share: Share, made: bytes) -> RankFiles:
        rank, held = self._ranks.rank, self._held
        files = tensor_files(rank, held.holding, share, held.steps, self._options.files)
        groups = unpack_groups(list(held.holding.paths), share.groups)
        self._plan, self._new = SavedPlan(made, files, groups), True
        return with_values(rank, files, share.values, held.values)

    def _hold(self, own: Held) -> None:
        self._held = own
        self._packed = pack(self._held.holding)
        self._key = plan_key(own, self._packed, self._ranks, self._options)
        self._plan = self._plans.get(self._key)

    def _statement(self) -> Statement:
        how = {"files": self._options.files, "overwrite": self._options.overwrite}
        plan, values = self._plan, self._held.holding.values
        return Statement(
            str(self._target),
            how,
            new_nonce(),
            self._packed.identity,
            plan.generation if plan else b"",
            group_digests(plan.groups, values) if plan else {},
        )

    def _share(self, first: bool) -> Share:
        packed = self._packed if first else self._packed.shortened()

        def answer(found: list[Packed]) -> Sequence[Share]:
            self._decision = decide(found)
            return self._decision.shares

        return through_first(self._ranks, lambda: packed, answer)

    def _write(self, files: RankFiles) -> Written:
        self._place.fill(files.plan, self._held.pieces)
        values = [(self._leaf(*one), files.items[one[1]]) for one in files.values.items()]
        sizes = {file.path: file.size for file in files.plan.files}
        return Written(sizes, values, files.tensors.items if self._new else None)

    def _leaf(self, name: str, under: str) -> OutputTensor | Blob:
        """Return what is written under another name than the tensors that all ranks share."""
        rank, holding = self._ranks.rank, self._held.holding
        if name in holding.tensors:
            return tensor_apart(rank, under, holding.tensors[name])
        return Blob(under, path_of(rank, name, under, holding.paths))

    def _publish(self, written: list[Written]) -> Sequence[None]:
        plan = self._plan
        assert plan
        self._require_files(written)
        items = [one.items for one in written if one.items is not None]
        if items:
            plan.metadata = metadata(self._decision, items)
        assert plan.metadata
        values = [value for one in written for value in one.values]
        content = plan.metadata.complete(values, Origin(self._save_id, self._ranks.world))
        self._place.publish(content)
        return [None] * len(written)

    def _require_files(self, written: Sequence[Written]) -> None:
        """Make sure that rank 0 sees what the others wrote."""
        for rank, one in enumerate(written):
            for name, size in one.sizes.items():
                if self._place.size(name) != size:
                    raise StorageError(
                        f"what rank {rank} wrote is not there",
                        where=f"{self._target}, {name}",
                        why="rank 0 does not see it, or not all of it",
                        hint="save to a file system that all ranks share, or with "
                        "collectives=False",
                    )
