"""What only the data can prove before a conversion: that what is dropped is not missed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from ckptctl.errors import MappingError
from ckptctl.ops.conversion.plan import ConversionPlan
from ckptctl.ops.conversion.tile_embeddings import require_regular
from ckptctl.ops.ranks.coordinator import Coordinator
from ckptctl.ops.ranks.sharing import portion
from ckptctl.ops.verification.replicas import portion_of
from ckptctl.ops.verification.replicas import require_equal as replicas_equal
from ckptctl.storage.compare import Readable, all_zero, equal
from ckptctl.storage.computed import open_reader

Proof = tuple[int, Callable[[], None]]
"""Bytes that are read, and what raises if something does not hold."""


def require_equal(plan: ConversionPlan, ranks: Coordinator) -> None:
    """Prove that tensors which are dropped hold what the kept ones hold, or nothing at all.

    Args:
        plan: What is going to be done.
        ranks: Those that share the work, each of which proves its part.

    Raises:
        DamagedError: Replicas that are to be compared differ.
        MappingError: A tensor that is dropped would be missed.
    """
    if plan.replicated is not None:
        replicas_equal(portion_of(plan.replicated, ranks))
    with open_reader(plan.source) as files:
        found = [*_zeros(plan, files), *_equals(plan, files)]
        for _, prove in portion(ranks, found, lambda proof: proof[0]):
            prove()


def _zeros(plan: ConversionPlan, files: Readable) -> Iterator[Proof]:
    root = plan.recognition.root

    def prove(name: str) -> None:
        if not all_zero(files, plan.source.tensors[root + name]):
            raise MappingError(
                f"`{name}` has no place in layout `{plan.to_layout}` and is not zero",
                where=plan.source.path,
                why="leaving it out would change the model",
                hint=f"`--exclude {name}` leaves it out all the same",
            )

    for name in plan.change.must_be_zero:
        yield plan.source.tensors[root + name].nbytes, partial(prove, name)


def _equals(plan: ConversionPlan, files: Readable) -> Iterator[Proof]:
    def prove(kept: str, dropped: str) -> None:
        if not equal(files, *(plan.source.tensors[name] for name in (kept, dropped))):
            raise _differ(plan, kept, dropped)

    root = plan.recognition.root
    for tiling in plan.change.tilings:
        yield 1, partial(require_regular, files, plan.source, root, tiling)
    for kept, dropped in plan.must_equal:
        yield plan.source.tensors[kept].nbytes, partial(prove, kept, dropped)


def _differ(plan: ConversionPlan, kept: str, dropped: str) -> MappingError:
    tied = dropped.removeprefix(plan.recognition.root) in plan.dropped
    return MappingError(
        f"`{dropped}` is tied to `{kept}` but holds other values"
        if tied
        else f"`{dropped}` and `{kept}` hold different values",
        where=plan.source.path,
        why="the configuration or the model type says that the two are one"
        if tied
        else f"in layout `{plan.to_layout}` one tensor stands for both",
        hint="`--untie` keeps both" if tied else None,
    )
