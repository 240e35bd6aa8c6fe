"""Nested objects and their flat form: ``{"model": {"w": t}}`` and ``model.w``.

The rules are those of ``torch.distributed.checkpoint._traverse``: dictionaries are always entered,
lists when they hold tensors or dictionaries, tuples when they hold tensors, everything else is a
leaf.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import cast

from ckptctl.catalog import Index, Path, TupleIndex
from ckptctl.errors import UnsupportedError


def flatten(
    root: object, is_tensor: Callable[[object], bool], path: Path = ()
) -> Iterator[tuple[Path, object]]:
    """Yield ``(path, leaf)`` of a nested object.

    Args:
        root: A finite tree, as :func:`ckptctl.storage.pickles.inert.check_tree` proves it.
        is_tensor: Tells tensors from other leaves.
        path: Where *root* lies.
    """
    if isinstance(root, dict) and root and all(isinstance(key, str | int) for key in root):
        for key, value in root.items():
            yield from flatten(value, is_tensor, (*path, key))
    elif isinstance(root, list | tuple) and _is_container(root, is_tensor):
        for position, value in enumerate(root):
            yield from flatten(value, is_tensor, (*path, position_in(root, position)))
    else:
        yield path, root


def position_in(container: object, position: int) -> Index:
    """Return a position in a list or a tuple as paths have it."""
    return TupleIndex(position) if isinstance(container, tuple) else Index(position)


def _is_container(
    node: list[object] | tuple[object, ...], is_tensor: Callable[[object], bool]
) -> bool:
    if isinstance(node, tuple):
        return any(is_tensor(value) for value in node)
    return any(is_tensor(value) or isinstance(value, dict) for value in node)


def nest(leaves: Iterable[tuple[Path, object]]) -> object:
    """Build the nested object that :func:`flatten` yields *leaves* from.

    Raises:
        UnsupportedError: One leaf's path runs through another leaf.
    """
    root: dict[object, object] = {}
    for path, leaf in leaves:
        if not path:
            return leaf
        node = root
        for key in path[:-1]:
            below = node.setdefault(_marked(key), _Level())
            if not isinstance(below, _Level):
                raise UnsupportedError(
                    f"`{join(path)}` lies below something that is not a container"
                )
            node = below
        if _marked(path[-1]) in node:
            raise UnsupportedError(f"`{join(path)}` appears twice")
        node[_marked(path[-1])] = leaf
    return _finished(root)


def join(path: Path) -> str:
    """Return the fully qualified name of *path*."""
    return ".".join(map(str, path))


_Positions = dict[tuple[type[Index], int], object]


class _Level(dict[object, object]):
    """A container under construction."""


def _marked(key: str | int) -> object:
    return (type(key), int(key)) if isinstance(key, Index) else key


def _finished(level: Mapping[object, object]) -> object:
    built = {
        key: _finished(value) if isinstance(value, _Level) else value
        for key, value in level.items()
    }
    if built and all(isinstance(key, tuple) for key in built):
        found = {key[1]: (key[0], value) for key, value in cast("_Positions", built).items()}
        ordered = [found[position] for position in sorted(found)]
        values = [value for _, value in ordered]
        return tuple(values) if ordered[0][0] is TupleIndex else values
    return {key[1] if isinstance(key, tuple) else key: value for key, value in built.items()}
