"""Nested objects and their flat form: ``{"model": {"w": t}}`` and ``model.w``.

The rules are those of ``torch.distributed.checkpoint._traverse``: dictionaries are always entered,
lists when they hold tensors or dictionaries, everything else is a leaf.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import cast

from ckptctl.catalog import Index, Path
from ckptctl.errors import DamagedError

MAX_DEPTH = 64


def flatten(
    root: object, is_tensor: Callable[[object], bool], limit: int
) -> Iterator[tuple[Path, object]]:
    """Yield ``(path, leaf)`` of a nested object.

    Args:
        root: What the restricted unpickler returned.
        is_tensor: Tells tensors from other leaves.
        limit: The most nodes to visit: the pickle's length is plenty, and refuses objects that
            refer to themselves or multiply by sharing.

    Raises:
        DamagedError: The object is too deep or too large for its pickle.
    """
    budget = [limit]

    def visit(node: object, path: Path) -> Iterator[tuple[Path, object]]:
        budget[0] -= 1
        if budget[0] < 0 or len(path) > MAX_DEPTH:
            raise DamagedError("a nested object is deeper or larger than its file can hold")
        if isinstance(node, dict) and node and all(isinstance(k, str | int) for k in node):
            for key, value in node.items():
                yield from visit(value, (*path, key))
        elif isinstance(node, list | tuple) and _is_container(node, is_tensor):
            for position, value in enumerate(node):
                yield from visit(value, (*path, Index(position)))
        else:
            yield path, node

    yield from visit(root, ())


def _is_container(
    node: list[object] | tuple[object, ...], is_tensor: Callable[[object], bool]
) -> bool:
    if isinstance(node, tuple):
        return any(is_tensor(value) for value in node)
    return any(is_tensor(value) or isinstance(value, dict) for value in node)


def nest(leaves: Iterable[tuple[Path, object]]) -> object:
    """Build the nested object that :func:`flatten` yields *leaves* from.

    Raises:
        DamagedError: One leaf's path runs through another leaf.
    """
    root: dict[object, object] = {}
    for path, leaf in leaves:
        if not path:
            return leaf
        node = root
        for key in path[:-1]:
            below = node.setdefault(_marked(key), _Level())
            if not isinstance(below, _Level):
                raise DamagedError(f"`{join(path)}` lies below something that is not a container")
            node = below
        if _marked(path[-1]) in node:
            raise DamagedError(f"`{join(path)}` appears twice")
        node[_marked(path[-1])] = leaf
    return _finished(root)


def join(path: Path) -> str:
    """Return the fully qualified name of *path*."""
    return ".".join(map(str, path))


class _Level(dict[object, object]):
    """A container under construction."""


def _marked(key: str | int) -> object:
    return ("index", int(key)) if isinstance(key, Index) else key


def _finished(level: Mapping[object, object]) -> object:
    built = {
        key: _finished(value) if isinstance(value, _Level) else value
        for key, value in level.items()
    }
    if built and all(isinstance(key, tuple) for key in built):
        ordered = sorted(cast("dict[tuple[str, int], object]", built).items())
        return [value for _, value in ordered]
    return {key[1] if isinstance(key, tuple) else key: value for key, value in built.items()}
