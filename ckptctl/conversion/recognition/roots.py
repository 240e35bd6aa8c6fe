"""Prefixes of models in a checkpoint, and selection of the leaves under a prefix.

A *root* is a name prefix that ends with a dot, such as ``state_dict.model.``. Containers are
dictionaries (``{"model": {...}}``). Wrappers add a prefix to every name (``module.`` of data
parallelism, ``_orig_mod.`` of ``torch.compile``). Both can be nested to any depth.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal

from ckptctl import formats
from ckptctl.catalog import Blob, Catalog, Path, TensorEntry
from ckptctl.errors import MappingError, UsageError, find_nearest, format_option, quote_names
from ckptctl.formats.base import WritableFormat
from ckptctl.formats.shared.leaves import join_path

ROOT_NAMES = frozenset(
    {
        *("model", "state_dict", "model_state_dict", "module", "model_state", "net", "network"),
        *("weights", "params", "state", "app", "dcp"),
        *("_orig_mod", "_forward_module", "_fsdp_wrapped_module"),
    }
)
"""Names of dictionaries that contain models, and name prefixes that wrappers add."""
TRANSPARENT_ROOTS = frozenset({"state", "app", "dcp"})
"""Names of outer dictionaries that contain a model's dictionary next to other values.

All of them are also in :data:`ROOT_NAMES`.
"""
WRAPPER_NAMES = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Name components that ``torch.compile``, FSDP and activation checkpointing add to layers."""
TRAINING_NAMES = frozenset(
    {
        *("optimizer", "optimizers", "optim", "opt", "optimizer_state_dict", "optimizer_states"),
        *("optimizer_state", "lr_scheduler", "lr_schedulers", "scheduler", "dataloader"),
        *("train_state", "rng", "rng_state", "rng_states", "loops", "callbacks", "hparams"),
        *("hyper_parameters", "step", "epoch", "global_step"),
    }
)
MAX_DEPTH = 4
"""Maximum number of name components in the prefixes of :func:`list_subtree_prefixes`."""
MIN_TENSORS = 3
"""Minimum number of tensors under a prefix of :func:`list_subtree_prefixes`."""
MAX_SUBTREES = 24
"""Maximum number of prefixes that :func:`list_subtree_prefixes` returns."""


def list_possible_roots(catalog: Catalog) -> list[str]:
    """List the prefixes under which a model may be stored, with the most likely prefix first.

    A container dictionary may be one of several. A wrapper prefix must be common to all names
    except training state.
    """
    inner_roots = _find_roots(catalog)
    container_roots = list_container_prefixes(catalog, inner_roots)
    top = [""] if _list_model_names(catalog, "") else []
    return list(dict.fromkeys([*container_roots, *top, *inner_roots])) or [""]


def list_container_prefixes(catalog: Catalog, roots: Sequence[str] | None = None) -> list[str]:
    """List the prefixes of dictionaries whose names suggest a model, with the innermost first."""
    candidates = _find_roots(catalog) if roots is None else roots
    dictionaries = _list_dictionaries(catalog) if candidates else ()
    prefixes = (
        root
        for root in candidates
        if root in dictionaries and root.split(".")[-2].lower() not in TRANSPARENT_ROOTS
    )
    return sorted(prefixes, key=lambda root: -root.count("."))


def list_subtree_prefixes(catalog: Catalog) -> list[str]:
    """List prefixes under which there are enough tensors for a model, with outer prefixes first.

    Prefixes with a numeric component are skipped, because they are layers.
    """
    count: Counter[str] = Counter()
    for name in _list_model_names(catalog, ""):
        parts = name.split(".")[:-1][:MAX_DEPTH]
        for depth, part in enumerate(parts, 1):
            if part.isdecimal():
                break
            count[".".join(parts[:depth]) + "."] += 1
    prefixes = [prefix for prefix, number in count.items() if number >= MIN_TENSORS]
    return sorted(prefixes, key=lambda prefix: prefix.count("."))[:MAX_SUBTREES]


def has_all_weights(catalog: Catalog, root: str) -> bool:
    """Check if all tensors except training state have the prefix *root*."""
    return all(name.startswith(root) for name in _list_model_names(catalog, ""))


def strip_wrappers(catalog: Catalog) -> Catalog:
    """Remove name components that layer wrappers added from all names in *catalog*.

    ``layers.0._orig_mod.wq.weight`` becomes ``layers.0.wq.weight``. Wrapper names at the start of a
    name belong to the root and are kept. If shortened names are not unique, no name is changed.
    """
    leaves = (*catalog.tensors, *catalog.blobs)
    if not any(word in name for name in leaves for word in WRAPPER_NAMES):
        return catalog
    names = {name: _strip_wrappers(name) for name in leaves}
    if all(name == stripped for name, stripped in names.items()):
        return catalog
    if len(set(names.values())) < len(names):
        return catalog
    removed = {part for name in names for part in name.split(".") if part in WRAPPER_NAMES}
    note = f"ignored {quote_names(sorted(removed))} in tensor names (added by layer wrappers)"
    lost = {_strip_wrappers(name): boxes for name, boxes in catalog.lost.items()}
    return replace(rename_leaves(catalog, names), lost=lost, notes=(*catalog.notes, note))


def rename_leaves(catalog: Catalog, names: Mapping[str, str]) -> Catalog:
    """Rename all leaves of *catalog* according to *names*, whose values must be unique."""
    tensors = [_rename_entry(entry, names) for entry in catalog.tensors.values()]
    blobs = [
        replace(
            leaf, name=names[leaf.name], path=_rename_path(leaf.path, leaf.name, names[leaf.name])
        )
        for leaf in catalog.blobs.values()
    ]
    return replace(
        catalog,
        tensors={entry.name: entry for entry in tensors},
        blobs={blob.name: blob for blob in blobs},
        replicas={names[name]: extents for name, extents in catalog.replicas.items()},
        lost={names.get(name, name): boxes for name, boxes in catalog.lost.items()},
    )


def parse_root(catalog: Catalog, root: str) -> str:
    """Convert the value of ``--root`` to a prefix with a trailing dot, or to "" if it is ``.``.

    Raises:
        UsageError: No tensor has the prefix.
    """
    prefix = f"{root.strip('.')}." if root.strip(".") else ""
    if any(name.startswith(prefix) for name in catalog.tensors):
        return prefix
    heads = sorted({name.partition(".")[0] for name in catalog.tensors})
    parts = (f".{name}".partition(f".{prefix}") for name in catalog.tensors)
    ending = next((f"{head}.{prefix}".strip(".") for head, matched, _ in parts if matched), None)
    close = ending or find_nearest(root, heads)
    raise UsageError(
        f"no tensor has the prefix `{root}`",
        where=catalog.path,
        why=f"the top-level names are {quote_names(heads)}",
        hint=f"did you mean {format_option(f'--root {close}')}?"
        if close
        else f"omit {format_option('--root')} to detect the prefix",
    )


def is_training_state(name: str) -> bool:
    """Check if *name* belongs to an optimizer, a scheduler or other training state."""
    head, _, number = name.partition(".")[0].lower().rpartition("_")
    return name.partition(".")[0].lower() in TRAINING_NAMES or (
        number.isdecimal() and head in TRAINING_NAMES
    )


def is_outside_model(catalog: Catalog, name: str) -> bool:
    """Check if the leaf *name* is training state.

    The result is False if the format of *catalog* cannot store training state.
    """
    is_training_blob = formats.get_format(catalog.format).training and name in catalog.blobs
    return bool(is_training_blob) or (
        stores_training_state(catalog.format) and is_training_state(name)
    )


def stores_training_state(format: str) -> bool:
    """Check if checkpoints in *format* can contain training state."""
    known_format = formats.get_format(format)
    return (
        bool(known_format.training)
        or not isinstance(known_format, WritableFormat)
        or known_format.nested
    )


def _find_roots(catalog: Catalog) -> list[str]:
    """Find the prefixes of container dictionaries and wrappers, with outer prefixes first."""
    dictionaries = _list_dictionaries(catalog)
    roots: list[str] = []
    pending = [("", _list_model_names(catalog, ""))]
    for prefix, names in pending:
        heads = dict.fromkeys(name[len(prefix) :].partition(".")[0] for name in names)
        for head in (head for head in heads if head.lower() in ROOT_NAMES):
            root = f"{prefix}{head}."
            inner_names = [name for name in names if name.startswith(root)]
            if inner_names and (len(heads) == 1 or root in dictionaries):
                roots.append(root)
                pending.append((root, _list_model_names(catalog, root, inner_names)))
    return roots


def _list_model_names(catalog: Catalog, root: str, names: Iterable[str] | None = None) -> list[str]:
    """Return the names in *names* that are under *root* and are not training state.

    If *names* is None, the names of all tensors are used.
    """
    names = catalog.tensors if names is None else names
    if not stores_training_state(catalog.format):
        return list(names)
    return [name for name in names if not is_training_state(name[len(root) :])]


def _list_dictionaries(catalog: Catalog) -> frozenset[str]:
    """List the prefixes of all dictionaries that contain tensors."""
    heads = {entry.path[:-1] for entry in catalog.tensors.values()}
    return frozenset(
        f"{join_path(head[:length])}." for head in heads for length in range(1, len(head) + 1)
    )


def _strip_wrappers(name: str) -> str:
    """Remove the components that layer wrappers added to *name*, except those at the start."""
    parts = name.split(".")
    first = next((n for n, part in enumerate(parts) if part.lower() not in ROOT_NAMES), len(parts))
    return ".".join(
        (*parts[:first], *(part for part in parts[first:] if part not in WRAPPER_NAMES))
    )


def _rename_entry(entry: TensorEntry, names: Mapping[str, str]) -> TensorEntry:
    alias = entry.alias_of and names[entry.alias_of]
    path = _rename_path(entry.path, entry.name, names[entry.name])
    return replace(entry, name=names[entry.name], path=path, alias_of=alias)


def _rename_path(path: Path, name: str, new_name: str) -> Path:
    """Return the key path of a leaf after it is renamed from *name* to *new_name*."""
    if name == new_name:
        return path
    head = path[:-1]
    prefix = f"{join_path(head)}." if head else ""
    return (*head, new_name[len(prefix) :]) if new_name.startswith(prefix) else (new_name,)


@dataclass(frozen=True, slots=True)
class ModelLeaves:
    """Leaves that belong to the model, by name without the model's prefix.

    Attributes:
        root: Prefix of the model's leaf names in the checkpoint, ending with a dot, or an empty
            string if the names have no prefix.
        tensors: Tensors of the model. Each entry keeps its full name in the checkpoint.
        blobs: Non-tensor values of the model.
        rest: Names of all leaves in the checkpoint that do not belong to the model.
    """

    root: str
    tensors: Mapping[str, TensorEntry]
    blobs: Mapping[str, Blob]
    rest: tuple[str, ...]


def select_model(catalog: Catalog, root: str) -> ModelLeaves:
    """Select the leaves under *root*.

    If *root* is empty, all leaves except training state are selected.
    """
    leaves = (*catalog.tensors, *catalog.blobs)
    if root:
        inner_names = {n: n.removeprefix(root) for n in leaves if n.startswith(root) and n != root}
    else:
        has_training_state = stores_training_state(catalog.format)
        inner_names = {
            n: n for n in leaves if not (has_training_state and is_outside_model(catalog, n))
        }
    return ModelLeaves(
        root,
        {
            inner_names[name]: entry
            for name, entry in catalog.tensors.items()
            if name in inner_names
        },
        {inner_names[name]: blob for name, blob in catalog.blobs.items() if name in inner_names},
        tuple(n for n in leaves if n not in inner_names),
    )


def select_by_globs(
    selection: ModelLeaves,
    include: Sequence[str],
    exclude: Sequence[str],
    include_training_state: bool,
    missing_names: Sequence[str] = (),
) -> tuple[ModelLeaves, tuple[str, ...]]:
    """Apply ``--include`` and ``--exclude`` to leaf names without the model's prefix.

    Args:
        selection: Leaves to select from.
        include: Globs of leaves to keep, or an empty sequence to keep all.
        exclude: Globs of leaves to skip.
        include_training_state: Whether leaves outside the model are selected as well.
        missing_names: Names of missing tensors, which a pattern may match instead of a leaf.

    Returns:
        The selected leaves, and the names of the leaves that are not selected.

    Raises:
        MappingError: A pattern matches no name.
    """
    if not (include or exclude):
        return selection, ()
    inner = [*selection.tensors, *selection.blobs]
    root = selection.root
    outer = selection.rest if include_training_state else ()
    names = [*(root + name for name in inner), *outer]
    for pattern in (*include, *exclude):
        candidates = (*names, *(root + name for name in missing_names))
        if not any(_matches_any(name, root, (pattern,)) for name in candidates):
            raise unmatched_pattern_error([pattern], [*inner, *outer])
    wanted_names = {
        name
        for name in names
        if (not include or _matches_any(name, root, include))
        and not _matches_any(name, root, exclude)
    }
    selected = replace(
        selection,
        tensors={n: entry for n, entry in selection.tensors.items() if root + n in wanted_names},
        blobs={n: blob for n, blob in selection.blobs.items() if root + n in wanted_names},
        rest=tuple(
            name for name in selection.rest if name in wanted_names or not include_training_state
        ),
    )
    return selected, tuple(name for name in names if name not in wanted_names)


def is_selected(
    catalog: Catalog,
    name: str,
    root: str,
    include: Sequence[str],
    exclude: Sequence[str],
    include_training_state: bool,
) -> bool:
    """Check if :func:`select_model` and :func:`select_by_globs` would select the leaf *name*."""
    is_inside = name.startswith(root) and (bool(root) or not is_outside_model(catalog, name))
    return (
        (is_inside or include_training_state)
        and (not include or _matches_any(name, root, include))
        and not _matches_any(name, root, exclude)
    )


def unmatched_pattern_error(patterns: Sequence[str], names: Sequence[str]) -> MappingError:
    """Build the error for patterns that match none of *names*."""
    return MappingError(
        f"no tensor matches {quote_names(patterns)}",
        why=f"there are {len(names):,} names, such as {quote_names(names, 2)}",
        hint="patterns must match whole names; `*` also matches dots",
    )


def _matches_any(name: str, root: str, patterns: Iterable[str]) -> bool:
    """Return whether a pattern matches *name*, with or without the prefix *root* of the model."""
    inner_name = name.removeprefix(root)
    return any(
        fnmatchcase(inner_name, pattern) or fnmatchcase(name, pattern) for pattern in patterns
    )


# ------------------------------------------------------------ parts of a training checkpoint

Part = Literal["model", "optimizer", "scheduler", "loader", "rest"]
FOLDED_PARTS: tuple[Part, ...] = ("optimizer", "scheduler", "loader")
"""Kinds of training state that are shown after the model, in this order, with one line each."""
_WORDS: dict[Part, re.Pattern[str]] = {
    "optimizer": re.compile(r"optim|opt(_\d+)?$"),
    "scheduler": re.compile(r".*scheduler"),
    "loader": re.compile(r".*(loader|sampler)"),
}
_CONTAINER = re.compile(r"extra_state|rank_\d+")


def classify_leaf(name: str, root: str, format: str) -> Part:
    """Classify the leaf *name* of a checkpoint in *format* whose model has the prefix *root*.

    The result is ``rest`` for RNG states, callbacks and other models.
    """
    if name.startswith(root) and (
        root or not (stores_training_state(format) and is_training_state(name))
    ):
        return "model"
    words = name.lower().split(".")
    word = next((w for w in words if w not in ROOT_NAMES and not _CONTAINER.fullmatch(w)), "")
    return next((part for part, pattern in _WORDS.items() if pattern.match(word)), "rest")
