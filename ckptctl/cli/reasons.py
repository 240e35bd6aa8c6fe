"""What became of names of a checkpoint, by the reason for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from ckptctl.errors import SHOWN, listed


def by_reason(keys: Mapping[str, str]) -> Iterable[tuple[str, list[str]]]:
    """Return every reason with the names that it is given for."""
    by_reason: dict[str, list[str]] = {}
    for key, reason in keys.items():
        by_reason.setdefault(reason, []).append(key)
    return by_reason.items()


def told(what: str, keys: Mapping[str, str]) -> Iterator[str]:
    """Yield for every reason a line that says *what* became of which names."""
    for reason, names in by_reason(keys):
        yield f"{what}, {reason}: {in_short(names)}"


def in_short(names: Sequence[str]) -> str:
    """Return the names, or where there are many what they begin with."""
    if len(names) <= SHOWN:
        return listed(names)
    heads = list(dict.fromkeys(map(_head, names)))
    return f"{listed(heads)} ({len(names):,} in all)"


def _head(name: str) -> str:
    """Return what stands for *name* and its like: what is no parameter of any module, or its root.

    Names of the former begin with ``_``: each module has its own ``_extra_state``.
    """
    first, *others = (part.partition("/")[0] for part in name.split("."))
    return next((part for part in others if part.startswith("_")), first)
