"""References, which determine the tensors of models that no table describes.

A reference is an installed package that knows the tensors of a model from its config.json. Its
functions are imported when they are called, so the core does not depend on the package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any, TypeVar

from ckptctl.conversion.recognition.model import DEFAULT_REFERENCE
from ckptctl.errors import format_option
from ckptctl.installed import require_package
from ckptctl.options import require_choice
from ckptctl.planner.config_facts import Json
from ckptctl.ranks.coordinator import RankCollectives, run_and_all_gather, run_on_all_ranks
from ckptctl.ranks.sharing import hash_repr

T = TypeVar("T")

Shapes = Mapping[str, tuple[int, ...] | None]
"""Shapes of tensors by name, or None if the shape of a tensor is unknown."""


@dataclass(frozen=True, slots=True)
class ReferenceResult:
    """Result of comparing tensors with a reference.

    Attributes:
        source: Package, version and class of the reference, or an empty string if the package does
            not know the model, or if comparing failed.
        missing_names: Names of missing tensors, limited to the first ones if many are missing.
        more: Number of further missing tensors that *missing_names* does not include.
        unexpected_names: Names of tensors that the model does not have.
        shapes: Description of each shape that differs, by tensor name.
        failure: Reason why the tensors cannot be compared, or an empty string.
    """

    source: str = ""
    missing_names: tuple[str, ...] = ()
    more: int = 0
    unexpected_names: tuple[str, ...] = ()
    shapes: Mapping[str, str] = field(default_factory=dict)
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Reference:
    """Package that knows which tensors a model has.

    Attributes:
        name: Name of the reference, and of the optional dependencies that install it.
        packages: Names of the packages that must be installed.
        compare: Function that compares tensors with the model that a config.json describes.
    """

    name: str
    packages: tuple[str, ...]
    compare: Callable[[Json, Shapes], ReferenceResult]

    @property
    def is_installed(self) -> bool:
        """Whether all packages are installed, without importing them."""
        specs = map(find_spec, self.packages)
        return all(spec is not None and spec.origin is not None for spec in specs)


def _defer_import(target: str) -> Callable[..., Any]:
    """Return a wrapper that imports the function at *target* on the first call, and calls it."""

    def call_function(*arguments: object) -> Any:
        module, _, function = target.partition(":")
        return getattr(import_module(f"ckptctl.{module}"), function)(*arguments)

    return call_function


BUILT_IN = (
    Reference(
        "transformers",
        ("transformers", "torch"),
        _defer_import("references.transformers:compare_with_transformers"),
    ),
)


def select_reference(name: str) -> Reference | None:
    """Return the reference *name*, or the first installed one for ``default``, or None.

    Raises:
        MissingPackageError: The reference is not installed.
    """
    if name == DEFAULT_REFERENCE:
        return next((reference for reference in BUILT_IN if reference.is_installed), None)
    references = {reference.name: reference for reference in BUILT_IN}
    selected = references[require_choice(name, "reference", list(references))]
    for package in selected.packages:
        require_package(package, format_option(f"--reference {name}"))
    return selected


# ------------------------------------------------------------------------------- several ranks


class PendingComparisonError(Exception):
    """Request for a comparison that another rank makes. Never reaches the user."""


@dataclass(slots=True)
class _SharedComparisons:
    """Comparisons of a plan that several ranks build.

    Attributes:
        results: Results so far, by hash of the request.
        is_deferred: Whether this process raises instead of comparing.
    """

    results: dict[str, ReferenceResult] = field(default_factory=dict)
    is_deferred: bool = False


_SHARED: ContextVar[_SharedComparisons | None] = ContextVar("shared comparisons", default=None)


@contextmanager
def _share_comparisons(shared: _SharedComparisons) -> Iterator[None]:
    token = _SHARED.set(shared)
    try:
        yield
    finally:
        _SHARED.reset(token)


def compare_with_reference(reference: Reference, config: Json, shapes: Shapes) -> ReferenceResult:
    """Compare tensors with *reference*, unless another rank has done so.

    Raises:
        PendingComparisonError: Another rank compares. See :func:`plan_on_all_ranks`.
    """
    shared = _SHARED.get()
    if shared is None:
        return reference.compare(config, shapes)
    request = hash_repr((reference.name, config, sorted(shapes.items())))
    if request not in shared.results:
        if shared.is_deferred:
            raise PendingComparisonError
        shared.results[request] = reference.compare(config, shapes)
    return shared.results[request]


def plan_on_all_ranks(ranks: RankCollectives, build_plan: Callable[[], T]) -> T:
    """Call *build_plan* on every rank, and compare with references on rank 0 only.

    Ranks that need a comparison wait for the results of rank 0, then call *build_plan* again. If it
    fails on any rank, all ranks raise.
    """
    if ranks.world == 1:
        return build_plan()
    shared = _SharedComparisons(is_deferred=ranks.rank > 0)

    def try_to_plan() -> tuple[list[T], dict[str, ReferenceResult] | bool]:
        try:
            with _share_comparisons(shared):
                plans = [build_plan()]
        except PendingComparisonError:
            plans = []
        return plans, shared.results if ranks.rank == 0 else not plans

    plans, answers = run_and_all_gather(ranks, try_to_plan)
    results, *is_pending = answers
    if not any(is_pending):
        return plans[0]
    assert isinstance(results, dict)

    def finish_plan() -> T:
        with _share_comparisons(_SharedComparisons(dict(results))):
            return plans[0] if plans else build_plan()

    return run_on_all_ranks(ranks, finish_plan)
