"""Flatten nested objects such as ``{"model": {"w": t}}`` into leaves such as ``model.w``.

Dictionaries are always flattened. Lists are flattened if they contain tensors or dictionaries at
any depth of lists and tuples, and tuples if they contain tensors at any depth. All other objects
are leaves. ``torch.distributed.checkpoint._traverse`` treats dictionaries and lists in the same
way.

A leaf may be any object that a trainer saves. Reading it executes no code, but an object of an
unknown class must not be written, because loading the output would execute code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, cast

from ckptctl.catalog import Blob, Index, Path, TupleIndex
from ckptctl.errors import (
    RefusedError,
    UnsafePickleError,
    UnsupportedError,
    exclude_hint,
    format_option,
    quote_names,
)
from ckptctl.storage.files import SourceFiles
from ckptctl.storage.pickles.inert import Global, Inert, walk_values
from ckptctl.storage.pickles.torch_globals import TORCH_TABLE
from ckptctl.units import pluralize

if TYPE_CHECKING:
    from ckptctl.storage.zstd import MemoryBudget

_Positions = dict[tuple[type[Index], int], object]
UNSAFE_MODULES = frozenset(
    {
        *("os", "posix", "nt", "subprocess", "shutil", "pty", "sys", "ctypes", "socket"),
        *("importlib", "runpy", "code", "codeop", "webbrowser", "multiprocessing"),
    }
)
"""Names of modules whose functions run commands, load code, or access files or the network."""
UNSAFE_BUILTINS = frozenset(
    {"eval", "exec", "compile", "open", "input", "breakpoint", "__import__"}
)
"""Names of functions in ``builtins`` that execute code, or access files or the terminal."""
FREE_NAME_CHARS = 1 << 23
MEAN_NAME_CHARS = 512
"""Length per name, so that N names have at most ``FREE_NAME_CHARS + N * MEAN_NAME_CHARS``."""


def flatten_object(
    root: object, is_tensor: Callable[[object], bool], path: Path = (), *, where: str
) -> Iterator[tuple[Path, object]]:
    """Yield the path and value of every leaf of the nested object *root*.

    Args:
        root: Nested object to flatten.
        is_tensor: Function that returns whether an object is a tensor.
        path: Keys to prepend to the path of every leaf.
        where: File that contains the object, for error messages.

    Raises:
        UnsupportedError: The names are too long in total. A small file can cause this, because each
            name repeats the keys of all dictionaries that contain the leaf.
    """
    should_flatten = _FlattenPredicate(is_tensor)
    leaves, length = 0, 0

    def walk_node(node: object, path: Path, name_length: int) -> Iterator[tuple[Path, object]]:
        nonlocal leaves, length
        if isinstance(node, dict) and node and all(isinstance(key, str | int) for key in node):
            for key, value in node.items():
                yield from walk_node(value, (*path, key), name_length + len(str(key)) + 1)
        elif isinstance(node, list | tuple) and should_flatten(node):
            kind = TupleIndex if isinstance(node, tuple) else Index
            for position, value in enumerate(node):
                yield from walk_node(
                    value, (*path, kind(position)), name_length + len(str(position)) + 1
                )
        else:
            leaves, length = leaves + 1, length + name_length
            if length > FREE_NAME_CHARS + MEAN_NAME_CHARS * leaves:
                raise UnsupportedError(
                    "the names of the values are too long",
                    where=where,
                    why=f"{pluralize(length, 'character')} in the first "
                    f"{pluralize(leaves, 'name')}",
                )
            yield path, node

    yield from walk_node(root, path, len(join_path(path)))


class _FlattenPredicate:
    """Predicate that decides whether to flatten a list or tuple.

    Results are cached by id, so the objects must stay alive.
    """

    def __init__(self, is_tensor: Callable[[object], bool]) -> None:
        self._is_tensor = is_tensor
        self._cache: dict[int, tuple[bool, bool]] = {}

    def __call__(self, node: list[object] | tuple[object, ...]) -> bool:
        return self._inspect(node)[1]

    def _inspect(self, node: object) -> tuple[bool, bool]:
        """Return whether *node* is or contains a tensor, and whether to flatten it."""
        if isinstance(node, dict):
            return any(self._inspect(value)[0] for value in node.values()), True
        if not isinstance(node, list | tuple):
            return (self._is_tensor(node),) * 2
        if id(node) not in self._cache:
            results = [self._inspect(value) for value in node]
            has_tensor = any(has_tensors for has_tensors, _ in results)
            self._cache[id(node)] = (
                has_tensor,
                has_tensor or (isinstance(node, list) and any(entered for _, entered in results)),
            )
        return self._cache[id(node)]


def build_nested_object(leaves: Iterable[tuple[Path, object]]) -> object:
    """Build a nested object from *leaves*, as the inverse of :func:`flatten_object`.

    A list or tuple of which only some items are in *leaves* becomes a dictionary by position, so
    that all items keep their positions.
    """
    root: dict[object, object] = {}
    for path, leaf in leaves:
        if not path:
            return leaf
        node = root
        for key in path[:-1]:
            child = node.setdefault(_mark_index(key), _Container())
            if not isinstance(child, _Container):
                raise UnsupportedError(f"the parent of `{join_path(path)}` is not a container")
            node = child
        if _mark_index(path[-1]) in node:
            raise UnsupportedError(f"`{join_path(path)}` appears twice")
        node[_mark_index(path[-1])] = leaf
    return _build_container(root)


def join_path(path: Path) -> str:
    """Join the keys in *path* with dots into a fully qualified name."""
    return ".".join(map(str, path))


class _Container(dict[object, object]):
    """Dictionary that is converted to a dict, list or tuple once all of its items are added."""


def _mark_index(key: str | int) -> object:
    return (type(key), int(key)) if isinstance(key, Index) else key


def _build_container(level: Mapping[object, object]) -> object:
    built = {
        key: _build_container(value) if isinstance(value, _Container) else value
        for key, value in level.items()
    }
    if built and all(isinstance(key, tuple) for key in built):
        by_position = {key[1]: (key[0], value) for key, value in cast("_Positions", built).items()}
        if max(by_position) == len(built) - 1:
            ordered = [by_position[position] for position in sorted(by_position)]
            values = [value for _, value in ordered]
            return tuple(values) if ordered[0][0] is TupleIndex else values
    return {key[1] if isinstance(key, tuple) else key: value for key, value in built.items()}


def flatten_mappings(blobs: Iterable[Blob]) -> Iterator[Blob]:
    """Yield *blobs*, with a separate value for each item of dictionaries and counters.

    Keys become strings. :func:`flatten_object` keeps dictionaries that have other keys than strings
    and integers, and DCP saves of torch 2.3 and earlier store dictionaries as values.
    """
    pending = [*blobs][::-1]
    while pending:
        blob = pending.pop()
        if items := _get_items(blob.value):
            leaves = flatten_object(items, lambda _: False, blob.path, where=blob.name)
            pending += [Blob(join_path(path), path, value=leaf) for path, leaf in leaves][::-1]
        else:
            yield blob


def _get_items(value: object) -> dict[object, object]:
    """Return the items of a dictionary or counter with strings as keys.

    The result is empty if *value* is neither, or if two keys would become the same string.
    """
    if isinstance(value, Inert) and (value.module, value.name) == ("collections", "Counter"):
        value = value.args[0] if value.args else None
    if not isinstance(value, dict):
        return {}
    items: dict[object, object] = {str(key): item for key, item in value.items()}
    return items if len(items) == len(value) else {}


def is_empty_dict(blob: Blob) -> bool:
    """Return whether *blob* is an empty dictionary, or False if its value has not been read.

    ``dcp.save`` stores no empty dictionaries, because it stores only the items of a dictionary.
    """
    return isinstance(blob.value, dict) and not blob.value


def add_rank_prefix(rank: int, path: Path) -> Path:
    """Prepend the key ``rank_N`` to *path*, where N is *rank*."""
    return (f"rank_{rank}", *path)


def list_differing_value_notes(names: Iterable[str]) -> tuple[str, ...]:
    """Return a note that the values *names* differ between ranks, or no note if there are none."""
    unique_names = list(dict.fromkeys(names))
    if not unique_names:
        return ()
    return (
        f"values differ between ranks; each is kept under `rank_N.`: {quote_names(unique_names)}",
    )


def _find_unknown_class(value: object) -> str | None:
    """Return the first class or function in *value* that torch cannot load, or None."""
    for node in walk_values(value):
        if isinstance(node, Inert | Global) and (node.module, node.name) not in TORCH_TABLE:
            return f"{node.module}.{node.name}"
    return None


def require_harmless_values(blobs: Iterable[Blob], where: str) -> None:
    """Raise UnsafePickleError if a value refers to a dangerous function, such as ``os.system``."""
    for blob in blobs:
        for node in walk_values(blob.value):
            if not isinstance(node, Inert | Global):
                continue
            module, name = node.module.partition(".")[0], node.name
            if module in UNSAFE_MODULES or (module == "builtins" and name in UNSAFE_BUILTINS):
                raise UnsafePickleError(
                    f"`{blob.name}` would execute `{node.module}.{name}`",
                    where=where,
                    why="no checkpoint needs this call, and unpickling the file executes it",
                    hint="check where this file comes from (nothing was executed)",
                )


def list_unknown_class_notes(blobs: Iterable[Blob]) -> Iterator[str]:
    """Yield a note if *blobs* contain objects of unknown classes, which cannot be written."""
    unknown_classes = {
        blob.name: name for blob in blobs if (name := _find_unknown_class(blob.value))
    }
    if unknown_classes:
        names = quote_names([f"{leaf}: {name}" for leaf, name in unknown_classes.items()])
        yield f"objects of unknown classes can be read but not written: {names}"


def require_known_classes(blobs: Iterable[Blob], *, verbatim: bool = False) -> None:
    """Raise if a value contains objects of unknown classes, or tensors inside other objects.

    If *verbatim* is set, values that are copied together with their file may contain tensors.
    """
    from ckptctl.storage.zips.zip_reader import StoredTensor

    hidden: list[Blob] = []
    for blob in blobs:
        name = _find_unknown_class(blob.value)
        if name is not None:
            raise UnsafePickleError(
                f"`{blob.name}` references `{name}`, which is not allowed",
                why="loading the output would execute it",
                hint=exclude_hint(blob.name),
            )
        tensors = (isinstance(node, StoredTensor) for node in walk_values(blob.value))
        if not (verbatim and blob.file) and any(tensors):
            hidden.append(blob)
    if hidden:
        can_copy = all(blob.file for blob in hidden)
        copying = f", or copy DCP items with {format_option('--to dcp')}" if can_copy else ""
        raise RefusedError(
            f"{pluralize(len(hidden), 'value contains', 'values contain')} tensors inside of "
            "objects",
            where=quote_names([blob.name for blob in hidden]),
            hint=f"skip them with {format_option('--exclude GLOB', command='convert')}{copying}",
        )


def read_value_bytes(files: SourceFiles, blob: Blob, budget: MemoryBudget) -> bytes:
    """Return the ``torch.save`` zip of *blob*, which is read from its file or built in memory.

    *budget* limits the memory for decompression.
    """
    if blob.extension and blob.file is not None:
        from ckptctl.storage.zstd import decompress_value

        return decompress_value(files, blob.file, blob.offset, blob.nbytes, blob.extension, budget)
    if blob.file is not None:
        return files.read(blob.file, blob.offset, blob.nbytes)
    # Only writing needs these modules.
    from ckptctl.storage.pickles.pickle_writer import dump_pickle
    from ckptctl.storage.zips.zip_writer import compute_zip_layout

    require_known_classes([blob])
    layout = compute_zip_layout(dump_pickle(blob.value), [], base=0)
    content = bytearray(layout.size)
    for offset, part in layout.iterate_frame([]):
        content[offset : offset + len(part)] = part
    return bytes(content)
