"""What ``--only all`` adds: optimizer state, counters and other leaves around the model.

A moment has its parameter's fully qualified name in its own (``optimizer.state.<fqn>.exp_avg``,
``torch/distributed/checkpoint/state_dict.py``) and follows that parameter's mapping.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ckptctl.catalog import Blob, Catalog, Path, TensorEntry
from ckptctl.errors import RefusedError
from ckptctl.formats.structure import join
from ckptctl.ops.layout_change import Change
from ckptctl.planner.mapping import MappedTensor, View


@dataclass(frozen=True, slots=True)
class Rest:
    """Leaves outside the model, under their names in the output.

    Attributes:
        tensors: What becomes what; source keys are checkpoint-wide names.
        paths: Key path of each target.
        blobs: The leaves that are not tensors.
    """

    tensors: tuple[MappedTensor, ...]
    paths: Mapping[str, Path]
    blobs: tuple[Blob, ...]


def follow(catalog: Catalog, names: Sequence[str], root: str, change: Change) -> Rest:
    """Map the leaves called *names* along with the model.

    Args:
        catalog: The checkpoint.
        names: Leaves outside the model.
        root: The model's prefix, with its dot.
        change: How the model changes.

    Raises:
        RefusedError: Optimizer state cannot follow its parameter.
    """
    renames = _Renames(root, change)
    tensors: list[MappedTensor] = []
    paths: dict[str, Path] = {}
    blobs: list[Blob] = []
    for name in names:
        if name in catalog.tensors:
            entry = catalog.tensors[name]
            mapped, path = renames.tensor(entry)
            tensors.append(mapped)
            paths[mapped.targets[0].key] = path
        else:
            blobs.append(renames.blob(catalog.blobs[name]))
    return Rest(tuple(tensors), paths, tuple(blobs))


class _Renames:
    """Finds parameter names inside other names and replaces them."""

    def __init__(self, root: str, change: Change) -> None:
        self.root = root
        self.identity = change.identity
        self.mapped = {m.sources[0].key: m for m in change.tensors}

    def tensor(self, entry: TensorEntry) -> tuple[MappedTensor, Path]:
        found = None if self.identity else self._parameter(entry.name)
        if found is None:
            if not self.identity and entry.shape and _is_moment(entry.name):
                raise RefusedError(
                    "optimizer state cannot follow its parameter",
                    where=f"tensor `{entry.name}`",
                    why="its name does not say whose it is, or that parameter is left out",
                    hint="`--only model`, or keep the layout",
                )
            return _plain(entry.name, entry.name, entry.shape), entry.path
        mapped = self.mapped[found]
        path = self._path(entry.path, found)
        if not entry.shape or entry.shape == (1,):
            return _plain(entry.name, join(path), entry.shape), path
        if mapped.sources[0].sizes != entry.shape or len(mapped.targets) != 1:
            raise RefusedError(
                "optimizer state has another shape than its parameter",
                where=f"tensor `{entry.name}`",
                why=f"{list(entry.shape)}, `{found}` has {list(mapped.sources[0].sizes)}",
                hint="`--only model`, or keep the layout",
            )
        source = replace(mapped.sources[0], key=entry.name)
        target = replace(mapped.targets[0], key=join(path))
        return replace(mapped, sources=(source,), targets=(target,)), path

    def blob(self, blob: Blob) -> Blob:
        if self.identity:
            return blob
        value, known = blob.value, self.mapped
        if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
            names = [self._target(item) if item in known else item for item in value]
            if names != value:
                blob = replace(blob, value=names, file=None)
        found = self._parameter(blob.name)
        if found is None:
            return blob
        path = self._path(blob.path, found)
        return replace(blob, name=join(path), path=path)

    def _parameter(self, name: str) -> str | None:
        """The longest parameter name that stands in *name* between dots."""
        return next((part for part in _parts(name) if part in self.mapped), None)

    def _target(self, name: str) -> str:
        return self.mapped[name].targets[0].key

    def _path(self, path: Path, found: str) -> Path:
        """Replace the parameter's name in the one component, or the components, that spell it."""
        target = self._target(found)
        for position, key in enumerate(path):
            if isinstance(key, str) and found in _parts(key):
                new = f".{key}.".replace(f".{found}.", f".{target}.").strip(".")
                return (*path[:position], new, *path[position + 1 :])
        return (f".{join(path)}.".replace(f".{found}.", f".{target}.").strip("."),)


def _parts(name: str) -> Iterator[str]:
    """Every run of dotted components, longest first."""
    pieces = name.split(".")
    for length in range(len(pieces), 0, -1):
        for start in range(len(pieces) - length + 1):
            yield ".".join(pieces[start : start + length])


def _is_moment(name: str) -> bool:
    return name.partition(".")[0].lower().startswith("opt") or ".state." in name


def _plain(source: str, target: str, shape: tuple[int, ...]) -> MappedTensor:
    dims = tuple((axis,) for axis in range(len(shape)))
    origin = (0,) * len(shape)
    return MappedTensor(
        target, shape, (View(source, dims, origin, shape),), (View(target, dims, origin, shape),)
    )
