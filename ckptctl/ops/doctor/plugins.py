"""Formats and model types that other packages add: whether they load, and whether names collide."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from functools import partial
from importlib import metadata

from ckptctl import families, formats
from ckptctl.errors import CkptError
from ckptctl.formats import plugins
from ckptctl.ops.doctor.check import Check

GROUP = "plug-ins"


def checks() -> Iterator[Check]:
    """Yield the checks of this group."""
    yield from _added("format", plugins.ENTRY_POINTS, formats.names(), plugins.load)
    yield from _added("model type", families.GROUP, families.built_in(), families.family)


def _added(
    kind: str, group: str, built_in: Collection[str], load: Callable[[str], object]
) -> Iterator[Check]:
    points = metadata.entry_points(group=group)
    if not points:
        yield Check(GROUP, f"{kind}s", f"{len(built_in):,} built in, none added")
    counts = Counter(point.name for point in points)
    for point in sorted(points, key=lambda one: one.name):
        package = point.dist.name if point.dist else point.module
        name, found = f"{kind} {point.name}", f"added by {package}"
        if point.name in built_in:
            hint = f"it is not used: ckptctl has a {kind} of that name; have it renamed"
            yield Check(GROUP, name, found, "warn", hint)
        elif counts[point.name] > 1:
            hint = "another package adds one of that name: uninstall either"
            yield Check(GROUP, name, found, "warn", hint)
        else:
            yield _loaded(name, found, partial(load, point.name))


def _loaded(name: str, found: str, load: Callable[[], object]) -> Check:
    try:
        load()
    except CkptError as error:
        return Check(GROUP, name, f"{found}, cannot be loaded", "fail", _joined(error))
    return Check(GROUP, name, found)


def _joined(error: CkptError) -> str:
    return "; ".join(filter(None, (error.why, error.hint)))
