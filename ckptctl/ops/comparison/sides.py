"""The two sides of a comparison: what is opened, and what of each is compared."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal, TypeVar

from ckptctl import formats
from ckptctl.catalog import Catalog
from ckptctl.errors import CkptError, MappingError, RefusedError, UsageError, listed
from ckptctl.formats.base import Weights
from ckptctl.ops.comparison.options import DiffOptions
from ckptctl.ops.conversion.leaves import unpacked
from ckptctl.ops.loading.options import LoadOptions
from ckptctl.ops.loading.state_mapping import StateMapping, map_state
from ckptctl.ops.recognition.dequantise import dequantised
from ckptctl.ops.saving.local_shards import TensorMeta
from ckptctl.ops.sources import open_source
from ckptctl.options import renaming
from ckptctl.storage.paths import path_at

T = TypeVar("T")
_OPTIONS = ("from", "weights", "tag", "root", "from-layout")
_ELSEWHERE = {"from": "format", "from-layout": "layout"}


def option_names(side: str) -> dict[str, str]:
    """Return what options that are about one checkpoint are called for side ``a`` or ``b``."""
    return {f"--{name}": f"--{_ELSEWHERE.get(name, name)}-{side}" for name in _OPTIONS}


@dataclass(frozen=True, slots=True)
class _Chosen:
    side: str
    path: str | Path
    format: str | None
    model_type: str | None
    weights: Weights | None
    tag: str | None
    rules: str | Path | None = None

    def open(self, rules: str | Path | None) -> Catalog:
        with renaming(option_names(self.side)):
            return open_source(self.path, replace(self, rules=rules))


def open_sides(a: str | Path, b: str | Path, options: DiffOptions) -> list[Catalog]:
    """Return the indices of both checkpoints."""
    kind = options.model_type
    chosen = (
        _Chosen("a", a, options.format_a, kind, options.weights_a, options.tag_a),
        _Chosen("b", b, options.format_b, kind, options.weights_b, options.tag_b),
    )
    opened = _by_rules(chosen, options.rules) if options.rules else [c.open(None) for c in chosen]
    return _plain(opened, options.dequantize) if options.dequantize else opened


def _by_rules(chosen: Sequence[_Chosen], rules: str | Path) -> list[Catalog]:
    def without(one: _Chosen, error: UsageError) -> Catalog:
        try:
            return one.open(None)
        except CkptError:
            raise error from None

    return _meant_for_some(chosen, lambda one: one.open(rules), without)


def _plain(opened: Sequence[Catalog], dtype: str) -> list[Catalog]:
    return _meant_for_some(opened, lambda one: dequantised(one, dtype), lambda one, _: one)


def _meant_for_some(
    sides: Sequence[T],
    with_it: Callable[[T], Catalog],
    without: Callable[[T, UsageError], Catalog],
) -> list[Catalog]:
    """Return what something that was said makes of each side; one of them may refuse it."""
    found: list[Catalog] = []
    refused: list[UsageError] = []
    for side in sides:
        try:
            found.append(with_it(side))
        except UsageError as error:
            refused.append(error)
            found.append(without(side, error))
    if len(refused) == len(sides):
        raise refused[0]
    return found


@dataclass(frozen=True, slots=True)
class Scope:
    """The part that is compared; no globs in *include*: all."""

    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    only: Literal["model", "all"] = "all"

    def chosen(self, name: str) -> bool:
        """Return whether the globs take *name*."""
        taken = not self.include or any(fnmatchcase(name, glob) for glob in self.include)
        return taken and not any(fnmatchcase(name, glob) for glob in self.exclude)

    def require_used(self, names: Collection[str]) -> None:
        """Refuse a glob that matches nothing."""
        for glob in (*self.include, *self.exclude):
            if not any(fnmatchcase(name, glob) for name in names):
                raise MappingError(
                    f"no tensor matches `{glob}`",
                    why=f"among {len(names):,} names, such as {listed(sorted(names), 2)}",
                    hint="patterns match whole names: `*` stands for anything, dots included",
                )


def map_other(a: Catalog, b: Catalog, options: LoadOptions) -> StateMapping:
    """Map *b* to the layout of *a*, as a whole, or else as far as it goes.

    A configuration that only *a* has says the sizes of both.
    """
    state = {n: TensorMeta(e.dtype, e.shape, e.path) for n, e in a.tensors.items()}
    if a.documents and not b.documents:
        options = replace(options, assets=path_at(a.root))
    try:
        whole = map_state(b, state, options)
        if state.keys() <= whole.offered:
            return whole
    except (MappingError, RefusedError):
        return map_state(b, state, replace(options, partial=True))
    try:
        part = map_state(b, state, replace(options, partial=True))
    except (MappingError, UsageError):
        return whole
    better = len(part.offered & state.keys()) > len(whole.offered & state.keys())
    return part if better else whole


def read_leaves(catalog: Catalog) -> Catalog:
    """Return *catalog* with the values of its other leaves, and tensors in them as tensors."""
    read = formats.resolve(replace(catalog, tensors={}, replicas={}))
    blobs = {**catalog.blobs, **read.blobs}
    return unpacked(replace(catalog, blobs=blobs), tuple(blobs))[0]
