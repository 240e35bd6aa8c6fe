"""Which part of a checkpoint is the model, and which part of that is wanted."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from ckptctl import formats
from ckptctl.catalog import Blob, Catalog, Path, TensorEntry
from ckptctl.errors import MappingError, UsageError, listed, nearest
from ckptctl.formats.base import WritableFormat

MODEL_ROOTS = (
    "model",
    "state_dict",
    "model_state_dict",
    "module",
    "model_state",
    "app.model",
    "net",
    "weights",
    "params",
)
_NUMBER = re.compile(r"_\d+$", re.ASCII)
"""Of several: Lightning's `optimizer_0`."""
TRAINING = (
    "optimizer",
    "optimizers",
    "optim",
    "opt",
    "optimizer_state_dict",
    "optimizer_states",
    "optimizer_state",
    "lr_scheduler",
    "lr_schedulers",
    "scheduler",
    "dataloader",
    "train_state",
    "rng",
    "rng_state",
    "rng_states",
    "loops",
    "callbacks",
    "hparams",
    "hyper_parameters",
    "step",
    "epoch",
    "global_step",
)
WRAPPERS = ("_orig_mod.", "module.", "_forward_module.", "model.")


@dataclass(frozen=True, slots=True)
class Selection:
    """The model's own leaves under their names inside the model.

    Attributes:
        root: Prefix that the names had in the checkpoint, with its dot; ``""`` at the top.
        tensors: The model's tensors; their entries keep their checkpoint-wide names.
        blobs: The model's other leaves.
        rest: Names of all leaves outside the model.
    """

    root: str
    tensors: Mapping[str, TensorEntry]
    blobs: Mapping[str, Blob]
    rest: tuple[str, ...]


def containers(catalog: Catalog) -> list[str]:
    """Return the prefixes of the containers that are called as models are: ``model.``, ..."""
    heads = dict.fromkeys(_container(entry.path) for entry in catalog.tensors.values())
    return [head for head in heads if head]


def roots(catalog: Catalog) -> list[str]:
    """Return the prefixes under which a model may lie, the most likely first.

    A container (``{"model": {...}}``) counts by its path. A prefix that is only part of the names
    (``module.`` of a wrapper) counts when every tensor outside the training state has it.
    """
    own = [name for name in catalog.tensors if not _outside(catalog, name)]
    wrapped = [prefix for prefix in WRAPPERS if own and all(n.startswith(prefix) for n in own)]
    top = [""] if own else []
    return list(dict.fromkeys([*containers(catalog), *top, *wrapped])) or [""]


def is_training(name: str) -> bool:
    """Return whether *name* belongs to an optimizer, a scheduler or another trainer part."""
    return _NUMBER.sub("", name.partition(".")[0].lower()) in TRAINING


def _outside(catalog: Catalog, name: str) -> bool:
    """Whether *name* is a trainer's own, in a format that has room for a trainer's state."""
    found = formats.get(catalog.format)
    model_only = isinstance(found, WritableFormat) and not found.nested
    return not model_only and is_training(name)


def select(catalog: Catalog, root: str) -> Selection:
    """Return what lies under *root*; at the top, all but the trainer's own state."""
    inside = {
        name: name.removeprefix(root)
        for name in (*catalog.tensors, *catalog.blobs)
        if name.startswith(root) and (name != root if root else not _outside(catalog, name))
    }
    return Selection(
        root,
        {inside[name]: entry for name, entry in catalog.tensors.items() if name in inside},
        {inside[name]: blob for name, blob in catalog.blobs.items() if name in inside},
        tuple(n for n in (*catalog.tensors, *catalog.blobs) if n not in inside),
    )


def checked_root(catalog: Catalog, root: str) -> str:
    """Return a user's ``--root`` with its dot.

    Raises:
        UsageError: Nothing lies under it.
    """
    prefix = f"{root.strip('.')}." if root.strip(".") else ""
    if any(name.startswith(prefix) for name in catalog.tensors):
        return prefix
    heads = sorted({name.partition(".")[0] for name in catalog.tensors})
    close = nearest(root, heads)
    raise UsageError(
        f"no tensor lies under `{root}`",
        where=catalog.path,
        why=f"the checkpoint has {listed(heads)}",
        hint=f"did you mean `--root {close}`?" if close else None,
    )


def chosen(
    selection: Selection, include: Sequence[str], exclude: Sequence[str], everything: bool
) -> tuple[Selection, tuple[str, ...]]:
    """Apply ``--include`` and ``--exclude`` to the names inside the model.

    Args:
        selection: What there is.
        include: Globs; none: all.
        exclude: Globs.
        everything: Whether what lies outside the model travels and is chosen from, too.

    Returns:
        What is wanted, and the names that are not.

    Raises:
        MappingError: A pattern matches nothing.
    """
    inner = [*selection.tensors, *selection.blobs]
    names = [*inner, *(selection.rest if everything else ())]
    for pattern in (*include, *exclude):
        if not any(_matches(name, selection.root, (pattern,)) for name in names):
            raise MappingError(
                f"no tensor matches `{pattern}`",
                why=f"among {len(names):,} names, such as {listed(names, 2)}",
                hint="patterns match whole names: `*` stands for anything, dots included",
            )
    wanted = {
        name
        for name in names
        if (not include or _matches(name, selection.root, include))
        and not _matches(name, selection.root, exclude)
    }
    kept = replace(
        selection,
        tensors={name: entry for name, entry in selection.tensors.items() if name in wanted},
        blobs={name: blob for name, blob in selection.blobs.items() if name in wanted},
        rest=tuple(name for name in selection.rest if name in wanted or not everything),
    )
    left = (selection.root + name for name in inner if name not in wanted)
    outer = (name for name in selection.rest if everything and name not in wanted)
    return kept, (*left, *outer)


def wanted(
    catalog: Catalog,
    name: str,
    root: str,
    include: Sequence[str],
    exclude: Sequence[str],
    everything: bool,
) -> bool:
    """Return whether :func:`select` and :func:`chosen` would take a leaf that is not there.

    Args:
        catalog: What there is.
        name: The leaf's name in the checkpoint.
        root: The model's prefix.
        include: Globs; none: all.
        exclude: Globs.
        everything: Whether what lies outside the model travels, too.
    """
    inside = name.startswith(root) and (bool(root) or not _outside(catalog, name))
    return (
        (inside or everything)
        and (not include or _matches(name.removeprefix(root), root, include))
        and not _matches(name.removeprefix(root), root, exclude)
    )


def _matches(name: str, root: str, patterns: Iterable[str]) -> bool:
    return any(
        fnmatchcase(name, pattern) or fnmatchcase(root + name, pattern) for pattern in patterns
    )


def _container(path: Path) -> str:
    """The dotted path of the container that a tensor lies in; ``""`` for the top."""
    head = path[:-1]
    for length in range(len(head), 0, -1):
        name = ".".join(map(str, head[:length]))
        if name.lower() in MODEL_ROOTS:
            return f"{name}."
    return ""
