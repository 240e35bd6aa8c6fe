"""Comparison of the keys of a checkpoint and a state, to find missing and unexpected keys."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace

from ckptctl.catalog import Catalog
from ckptctl.catalog import Path as Keys
from ckptctl.conversion.recognition.roots import is_training_state, list_container_prefixes
from ckptctl.errors import MappingError, find_nearest, quote_names
from ckptctl.formats.dcp.dcp_reader import COMPANION_FILE
from ckptctl.formats.shared.leaves import is_empty_dict
from ckptctl.numerics.quantized import find_quantized_tensors
from ckptctl.planner.mapping.mapped import ComposedTensor
from ckptctl.save_load.loading.load_options import LoadReport, Strict
from ckptctl.save_load.loading.state_mapping import StateMapping, replace_prefix

RANK_KEY = re.compile(r"rank_(?P<rank>\d+)\.(?P<name>.+)", re.DOTALL)


def build_load_report(
    compared: LoadReport,
    mapping: StateMapping,
    loaded: tuple[str, ...],
    cast: Mapping[str, tuple[str, str]],
) -> LoadReport:
    """Build the report of a load from the comparison of its keys."""
    return replace(
        compared,
        loaded=loaded,
        cast=cast,
        notes=(*mapping.catalog.notes, *mapping.notes.get_texts()),
        format=mapping.catalog.format,
        model_type=None if mapping.layout is None else mapping.model_type,
        from_layout=mapping.from_layout,
        layout=mapping.layout,
    )


def apply_strictness(report: LoadReport, strict: Strict, mapping: StateMapping) -> LoadReport:
    """Return *report* without missing and unexpected keys that *strict* does not reject."""
    if strict is True or not (report.missing or report.unexpected):
        return report
    if not strict:
        return replace(report, missing=(), unexpected=())
    if strict == "state":
        return replace(report, unexpected=())
    root, prefix = mapping.root, mapping.prefix
    if root == prefix == "":
        root = prefix = next(iter(list_container_prefixes(mapping.catalog)), "")

    def is_in_model(name: str, model: str) -> bool:
        return name.startswith(model) if model else not is_training_state(name)

    return replace(
        report,
        missing=tuple(name for name in report.missing if is_in_model(name, prefix)),
        unexpected=tuple(name for name in report.unexpected if is_in_model(name, root)),
    )


def require_equal_keys(report: LoadReport, mapping: StateMapping) -> None:
    """Raise if the report has missing or unexpected keys."""
    if not report.missing and not report.unexpected:
        return
    sides = (
        (report.missing, "only in the state"),
        (report.unexpected, "only in the checkpoint"),
    )
    counts = [f"{len(names):,} {side}" for names, side in sides if names]
    side_texts = [f"{side}: {quote_names(names)}" for names, side in sides if names]
    suggestions = [find_nearest(name, list(mapping.tensors)) for name in report.missing[:1]]
    hints = [f"did you mean `{suggestions[0]}`?" if suggestions and suggestions[0] else ""]
    if find_quantized_tensors(mapping.catalog):
        hints.append('the checkpoint is quantized: pass `dequantize="bf16"` to dequantize it')
    if not report.missing and all(".state." in f".{name}" for name in report.unexpected):
        hints.append(
            "a new optimizer has no state to load into: use `get_state_dict` of "
            "`torch.distributed.checkpoint.state_dict`, which initializes it"
        )
    if not report.missing:
        hints.append('pass `strict="state"` to load only the keys of the state')
    hints.append("pass `strict=False` to load the common keys and report the rest")
    hints += mapping.notes.get_texts()
    raise MappingError(
        f"the keys of the state and the checkpoint differ: {', '.join(counts)}",
        where=mapping.catalog.path,
        why="; ".join(side_texts),
        hint="; ".join(filter(None, hints)),
    )


def compare_keys(
    mapping: StateMapping, tensors: Mapping[str, Keys], values: Mapping[str, Keys]
) -> LoadReport:
    """Compare the keys of the checkpoint and the state, before anything is loaded.

    A state with training state, such as a step or an optimizer, is loaded to resume, so every key
    of the checkpoint that is not in the state is unexpected. For other states, keys of training
    state are not unexpected, nor are keys in containers from which the state has no key.
    """
    catalog, offered = mapping.catalog, mapping.tensors
    missing = [name for name in tensors if name not in offered]
    missing += [name for name in values if not find_stored_name(mapping, name, 0)]
    paths = {name: stored.path for name, stored in catalog.tensors.items()}
    paths |= {name: stored.path for name, stored in catalog.blobs.items()}
    read = {key for name in tensors if name in offered for key in offered[name].keys}
    read |= {replace_prefix(name, mapping.prefix, mapping.root) for name in values}
    state_paths = (*tensors.values(), *values.values())
    containers = {_get_container(keys) for keys in state_paths}
    if mapping.root and not mapping.prefix:
        containers.discard("")  # a flat state corresponds to the keys below the root
    containers |= {_get_container(keys) for name, keys in paths.items() if name in read}
    heads, rank_keys = {_get_head(keys) for keys in state_paths}, list_rank_keys(catalog)
    resumes = any(map(is_training_state, (*tensors, *values, *read)))

    def explain_skipped_key(name: str, keys: Keys) -> str | None:
        """Return the reason why a key may be skipped, or None if it is unexpected."""
        if name in rank_keys:
            return "it belongs to a single rank"
        blob = catalog.blobs.get(name)
        if blob and is_empty_dict(blob):
            return "it is an empty dictionary"
        entry = catalog.tensors.get(name)
        if entry and entry.alias_of in read:
            return f"it shares memory with `{entry.alias_of}`, which is read"
        if resumes:
            # Lightning's `meta.pt`, which its strategies read themselves.
            if catalog.format == "dcp" and _is_in_meta_file(catalog, name):
                return "it is stored in a file of its own, outside of the saved state"
            return None
        if _get_container(keys) not in containers:
            return "the state has no other keys with the same parent"
        if is_training_state(name) and _get_head(keys) not in heads:
            return "the state contains only a model"
        return None

    unexpected: list[str] = []
    dropped = mapping.notes.get_reasons("dropped")
    left_out = {name: why for name, why in dropped.items() if name not in read}
    for name, keys in paths.items():
        if name in read or name in left_out or name in catalog.computed:
            continue
        why = explain_skipped_key(name, keys)
        if why:
            left_out[name] = why
        else:
            unexpected.append(name)
    return LoadReport(missing=tuple(missing), unexpected=tuple(unexpected), left_out=left_out)


def _is_in_meta_file(catalog: Catalog, name: str) -> bool:
    """Return whether a value is stored in ``meta.pt``, next to the files of a DCP checkpoint."""
    if blob := catalog.blobs.get(name):
        return blob.file is None
    file_names = {extent.file for extent in catalog.tensors[name].extents}
    return bool(file_names) and all(
        file.rpartition("/")[2] == COMPANION_FILE for file in file_names
    )


def require_same_kinds(
    mapping: StateMapping, tensors: Collection[str], values: Collection[str]
) -> None:
    """Raise if a key is a tensor in the checkpoint but not in the state, or vice versa."""
    offered, blobs = mapping.tensors, mapping.catalog.blobs
    state_tensors = [
        name for name in tensors if name not in offered and find_stored_name(mapping, name, 0)
    ]
    stored_tensors = [
        name
        for name in values
        if name in offered and replace_prefix(name, mapping.prefix, mapping.root) not in blobs
    ]
    if not state_tensors and not stored_tensors:
        return
    summary = (
        f"`{state_tensors[0]}` is a tensor in the state, but not a tensor in the checkpoint"
        if state_tensors
        else f"`{stored_tensors[0]}` is a tensor in the checkpoint, but not a tensor in the state"
    )
    more_count = len(state_tensors) + len(stored_tensors) - 1
    raise MappingError(
        summary + (f" (and {more_count:,} more)" if more_count else ""),
        where=quote_names([*state_tensors, *stored_tensors]),
        hint="use the type that was saved, or omit the name from the state",
    )


def find_stored_name(
    mapping: StateMapping,
    name: str,
    rank: int,
    values: Collection[str] = (),
    rank_keys: Collection[str] = (),
) -> str | None:
    """Return the checkpoint's key for a non-tensor value of the state, or None if it has none.

    Args:
        mapping: Mapping from the checkpoint to the state.
        name: Key of the value in the state.
        rank: Rank whose value is preferred if ranks have different values.
        values: Keys of all values of the state, which do not count as per-rank keys of other
            values.
        rank_keys: Per-rank keys of the checkpoint, from :func:`list_rank_keys`.
    """
    shared_name = replace_prefix(name, mapping.prefix, mapping.root)
    rank_name = f"rank_{rank}.{shared_name}"
    if (
        rank_name in rank_keys
        and replace_prefix(rank_name, mapping.root, mapping.prefix) not in values
    ):
        return rank_name
    return shared_name if shared_name in mapping.catalog.blobs else None


def with_rank_tensors(
    mapping: StateMapping, unsharded: Collection[str], rank: int, state: Collection[str]
) -> StateMapping:
    """Return a copy of *mapping* that reads the versions of tensors that one rank saved.

    Args:
        mapping: Mapping from the checkpoint to the state.
        unsharded: Tensors of the state that are not sharded across ranks.
        rank: Rank whose versions of the tensors are read.
        state: All keys of the state, which do not count as per-rank keys of other tensors.
    """
    rank_keys = list_rank_keys(mapping.catalog) if rank else ()
    rank_tensors: dict[str, ComposedTensor] = {}
    for name in unsharded if rank_keys else ():
        composed = mapping.tensors.get(name)
        if composed is None or not composed.is_rename:
            continue
        rank_name = f"rank_{rank}.{composed.sources[0].key}"
        if (
            rank_name in rank_keys
            and replace_prefix(rank_name, mapping.root, mapping.prefix) not in state
        ):
            rank_tensors[name] = ComposedTensor.from_unchanged(
                rank_name, name, mapping.catalog.tensors[rank_name].shape
            )
    if not rank_tensors:
        return mapping
    return replace(
        mapping, tensors={**mapping.tensors, **rank_tensors}, rank_tensors=frozenset(rank_tensors)
    )


def list_inherited_values(
    mapping: StateMapping, state: Collection[str], rank: int
) -> tuple[str, ...]:
    """List the per-rank values that a rank takes from the lowest rank because it saved none.

    If the checkpoint does not record its world size, the highest rank with a per-rank value
    determines it.
    """
    matched = [
        rank_match for n in list_rank_keys(mapping.catalog) if (rank_match := RANK_KEY.fullmatch(n))
    ]
    world = mapping.catalog.world or 1 + max((int(match["rank"]) for match in matched), default=0)
    differing = {match["name"] for match in matched}
    if rank < world or not differing:
        return ()
    return tuple(n for n in state if replace_prefix(n, mapping.prefix, mapping.root) in differing)


def list_rank_keys(catalog: Catalog) -> set[str]:
    """List the per-rank keys of a checkpoint, such as ``rank_1.name``.

    The value of the lowest rank keeps its key, so the shared key always exists, and rank 0 never
    has per-rank keys. The state of a user may also contain a key ``rank_1``. If any key below
    ``rank_1`` cannot be a per-rank version of a shared key, all keys below it belong to the user.
    """
    matched = ((name, RANK_KEY.fullmatch(name)) for name in (*catalog.blobs, *catalog.tensors))
    candidates = [(name, match["rank"], match["name"]) for name, match in matched if match]
    users = {"0"} | {
        rank
        for name, rank, shared_name in candidates
        if not _can_be_rank_copy(catalog, name, shared_name)
    }
    return {name for name, rank, _ in candidates if rank not in users}


def _can_be_rank_copy(catalog: Catalog, name: str, shared_name: str) -> bool:
    """Return whether *name* can be a per-rank version of *shared_name*."""
    rank_entry, shared_entry = catalog.tensors.get(name), catalog.tensors.get(shared_name)
    if rank_entry and shared_entry:
        return (rank_entry.dtype, rank_entry.shape) == (shared_entry.dtype, shared_entry.shape)
    return not rank_entry and shared_name in catalog.blobs


def _get_container(keys: Keys) -> str:
    return str(keys[0]) if len(keys) > 1 else ""


def _get_head(keys: Keys) -> str:
    """Return the first key of a path, up to its first dot."""
    return str(keys[0]).partition(".")[0]
