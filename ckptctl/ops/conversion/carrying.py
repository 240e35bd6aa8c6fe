"""``--carry``: files beside a checkpoint that travel because they were asked for by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from ckptctl.errors import UsageError, listed
from ckptctl.storage.files import leads_outside
from ckptctl.units import natural

if TYPE_CHECKING:
    from ckptctl.ops.conversion.documents import Assets


def carried(assets: Assets, roots: Sequence[Path], globs: Sequence[str]) -> Assets:
    """Return *assets* with those of the others that one of *globs* matches.

    Args:
        assets: What travels, and what does not.
        roots: The directories that the others lie in; the last that has one counts.
        globs: Of paths relative to them. ``*`` matches slashes, too, and nothing hidden: a name
            that begins with a dot is matched by a glob that says the dot.

    Raises:
        UsageError: One of them matches nothing.
    """
    found = {name: root for root in roots for name in _files(root, assets.others)}
    for glob in globs:
        if not any(_matches(name, glob) for name in (*found, *assets.sizes)):
            raise UsageError(
                f"`--carry {glob}` matches nothing",
                where=", ".join(map(str, roots)),
                why=f"not carried along without it: {listed(natural(assets.others))}"
                if assets.others
                else "all that lies there is carried along without it",
            )
    wanted = {n: root for n, root in found.items() if any(_matches(n, glob) for glob in globs)}
    folders = {f"{name.partition('/')[0]}/" for name in wanted}
    stay = tuple(name for name in found if name not in wanted)
    return replace(
        assets,
        roots={**assets.roots, **{name: str(root) for name, root in wanted.items()}},
        sizes={**assets.sizes, **{n: (root / n).stat().st_size for n, root in wanted.items()}},
        others={
            name: why
            for name, why in assets.others.items()
            if name not in wanted and (name not in folders or any(n.startswith(name) for n in stay))
        },
    )


def _files(root: Path, names: Iterable[str]) -> Iterator[str]:
    """Yield the files among *names*, and those in the folders among them, but no links outwards."""
    for name in names:
        item = root / name
        found = item.rglob("*") if name.endswith("/") and item.is_dir() else (item,)
        for one in found:
            if one.is_file() and not leads_outside(one, root):
                yield str(one.relative_to(root))


def _matches(name: str, glob: str) -> bool:
    """Return whether *glob* matches a path, with the dots of hidden files said."""
    return fnmatchcase(name, glob) and f"/{name}".count("/.") <= f"/{glob}".count("/.")
