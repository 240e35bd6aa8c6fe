"""Read the optimizer moments and settings and the trainer state of a DeepSpeed checkpoint.

Names follow ``torch.distributed.checkpoint.state_dict``: ``optimizer.state.<name>.<key>`` and
``optimizer.param_groups``, whose ``params`` are parameter names. The trainer state of the first
rank is read, and values of other ranks are added if they differ. For stage 3, every rank writes
model states with its own ``client_state`` (``deepspeed/runtime/engine.py``, ``save_checkpoint``).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from ckptctl.catalog import Blob, TensorEntry
from ckptctl.errors import UnsupportedError, quote_names
from ckptctl.formats.deepspeed.partitions import (
    FlatVector,
    Segment,
    Shapes,
    is_flat,
    locate_extents,
)
from ckptctl.formats.deepspeed.states import MODEL_KEYS, ModelState, OptimState
from ckptctl.formats.deepspeed.zero import ZeroSave, build_flat_vectors
from ckptctl.formats.shared.leaves import add_rank_prefix, join_path, list_differing_value_notes
from ckptctl.formats.shared.stored_leaves import Leaves, make_stored_entry
from ckptctl.storage.compare import has_same_checksum, have_same_elements
from ckptctl.storage.files import SourceFiles
from ckptctl.storage.pickles.inert import Inert, is_same_value
from ckptctl.storage.zips.zip_reader import StoredTensor
from ckptctl.tree import TreePath

OPTIMIZER = "optimizer"
_COUNTERS = {"float32": "<f", "int64": "<q", "int32": "<i"}
INNER_KEY = "optimizer_state_dict"
NUMBERED_NOTE = (
    "optimizer states are numbered instead of named, because neither `param_names` nor "
    "`param_shapes` maps them to parameters"
)


def extract_non_model_entries(model: ModelState) -> dict[str, object]:
    """Return the entries of a model-state file except the model and an ``optimizer`` of None."""
    rest = {key: value for key, value in model.content.items() if key not in MODEL_KEYS}
    if rest.get(OPTIMIZER, model) is None:
        del rest[OPTIMIZER]
    return rest


def add_other_rank_leaves(
    leaves: Leaves, models: Sequence[ModelState], model: ModelState, files: SourceFiles
) -> None:
    """Add the leaves of other ranks that differ from *leaves*, with the rank as a name prefix."""
    differing: list[str] = []
    for rank, other_model in enumerate(models):
        if other_model is model or other_model.is_placeholder:
            continue
        other_leaves = Leaves()
        other_leaves.add_object(
            extract_non_model_entries(other_model),
            (),
            other_model.file,
            str(files.root / other_model.file),
        )
        differing_leaves: list[TensorEntry | Blob] = []
        for name, blob in other_leaves.blobs.items():
            existing = leaves.blobs.get(name)
            if existing is None or not is_same_value(existing.value, blob.value):
                differing_leaves.append(blob)
        for name, entry in other_leaves.tensors.items():
            first = leaves.tensors.get(name)
            if first is None or not have_same_elements(
                files,
                first,
                entry,
                of_any_size=has_same_checksum(first.extents[0], entry.extents[0]),
            ):
                differing_leaves.append(entry)
        for leaf in differing_leaves:
            path = add_rank_prefix(rank, leaf.path)
            leaves.add_leaf(replace(leaf, name=join_path(path), path=path))
            differing.append(leaf.name)
    leaves.notes += list_differing_value_notes(differing)


def _list_step_notes(leaves: Leaves, files: SourceFiles) -> Iterator[str]:
    """Yield a note if the step counts of the optimizer and the model file differ.

    Either the files belong to different saves, or the optimizer was reset.
    """
    values = {name: blob.value for name, blob in leaves.blobs.items()}
    global_steps, skipped = values.get("global_steps"), values.get("skipped_steps")
    if type(global_steps) is not int:
        return
    expected = global_steps - (skipped if type(skipped) is int else 0)
    for name, entry in leaves.tensors.items():
        if not name.endswith(".step") or entry.shape or entry.dtype not in _COUNTERS:
            continue
        extent = entry.extents[0]
        stored = files.read(extent.file, extent.offset, extent.nbytes)
        (steps,) = struct.unpack(_COUNTERS[entry.dtype], stored)
        if steps != expected:
            yield (
                f"the optimizer is at step {steps:g}, the model file at step {expected}; unless "
                "the optimizer was reset, the files belong to different saves"
            )
        return


def _name_optimizer_state(
    optimizer: Mapping[str, object], groups: Sequence[Shapes] | None, module: Mapping[str, object]
) -> dict[str, object] | None:
    """Replace parameter numbers in an optimizer state with parameter names.

    Returns None if the names are unknown or their shapes do not match.
    """
    inner = optimizer.get(INNER_KEY, optimizer)
    state = inner.get("state") if isinstance(inner, dict) else None
    settings = inner.get("param_groups") if isinstance(inner, dict) else None
    if not isinstance(inner, dict) or not isinstance(state, dict) or not isinstance(settings, list):
        return None
    names = dict(_match_parameter_names(settings, groups))
    numbers = [g.get("params") if isinstance(g, dict) else None for g in settings]
    count = sum(len(group_numbers) for group_numbers in numbers if isinstance(group_numbers, list))
    if None in numbers or not count == len(names) == len(set(names.values())):
        return None
    if not state.keys() <= names.keys():
        return None
    if not all(_is_shape_match(state[number], module.get(names[number])) for number in state):
        return None
    rest = {key: value for key, value in {**optimizer, **inner}.items() if key != INNER_KEY}
    return {
        **rest,
        "state": {names[number]: value for number, value in state.items()},
        "param_groups": [
            {**group, "params": [names[number] for number in group["params"]]} for group in settings
        ],
    }


def _match_parameter_names(
    settings: Sequence[object], groups: Sequence[Shapes] | None
) -> Iterator[tuple[object, str]]:
    """Yield ``(parameter number, parameter name)`` for each parameter whose name is known."""
    shapes_by_group = (
        groups if groups is not None and len(groups) == len(settings) else [{}] * len(settings)
    )
    for group, shapes in zip(settings, shapes_by_group, strict=True):
        numbers = group.get("params") if isinstance(group, dict) else None
        recorded_names = group.get("param_names") if isinstance(group, dict) else None
        names = recorded_names if isinstance(recorded_names, list) else [*shapes]
        if isinstance(numbers, list) and len(numbers) == len(names):
            pairs = zip(numbers, names, strict=True)
            yield from ((n, name) for n, name in pairs if type(n) is int and isinstance(name, str))


def _is_shape_match(state: object, parameter: object) -> bool:
    """Return whether all moments in *state*, except 0-d tensors, have the parameter's shape."""
    if not isinstance(state, dict) or not isinstance(parameter, StoredTensor):
        return False
    moments = (v for k, v in state.items() if isinstance(v, StoredTensor) and k != "step")
    return all(not value.shape or value.shape == parameter.shape for value in moments)


def extract_training_state(save: ZeroSave, files: SourceFiles) -> Leaves:
    """Return all leaves of a save except the model, with the optimizer state by parameter name."""
    leaves = Leaves()
    model, root = save.model, files.root
    rest = extract_non_model_entries(model)
    optimizer = rest.get(OPTIMIZER)
    if isinstance(optimizer, dict) and not save.optims:
        named_optimizer = _name_optimizer_state(optimizer, model.groups, model.module)
        leaves.notes += [] if named_optimizer else [NUMBERED_NOTE]
        rest[OPTIMIZER] = named_optimizer or optimizer
    leaves.add_object(rest, (), model.file, str(root / model.file))
    add_other_rank_leaves(leaves, save.models, model, files)
    if save.optims:
        _add_optimizer_states(save, files, leaves)
        first = save.optim
        owners = ((name, part.group_number) for name, part in save.locations.items())
        settings = build_optimizer_settings(first.other_entries, first.param_groups, owners)
        leaves.add_object(settings, (OPTIMIZER,), first.file, str(root / first.file))
        leaves.notes += _list_step_notes(leaves, files)
    return leaves


def build_optimizer_settings(
    rest: Mapping[str, object], groups: Sequence[object], group_numbers: Iterable[tuple[str, int]]
) -> dict[str, object]:
    """Return the optimizer's settings without objects of DeepSpeed's classes.

    Args:
        rest: Entries of the optimizer's state dict except the states and ``param_groups``.
        groups: ``param_groups`` with parameter numbers, which are replaced with names.
        group_numbers: ``(parameter name, number)`` pairs. ``params`` in *groups* contains the
            number, which may stand for several parameters.
    """
    members: dict[object, list[str]] = {}
    for name, owner in group_numbers:
        members.setdefault(owner, []).append(name)
    named_groups = [
        _name_group_parameters(group, members) for group in groups if isinstance(group, dict)
    ]
    settings = dict(rest)
    for key, value in rest.items():
        # Replace a loss scaler by its attributes, since loading the object requires DeepSpeed.
        if isinstance(value, Inert) and value.module.startswith("deepspeed."):
            settings[key] = value.state if isinstance(value.state, dict) else value
    return {**({"param_groups": named_groups} if named_groups else {}), **settings}


def _name_group_parameters(
    group: Mapping[str, object], members: Mapping[object, Sequence[str]]
) -> dict[str, object]:
    numbers = group.get("params")
    valid_numbers = (
        [number for number in numbers if type(number) is int] if isinstance(numbers, list) else []
    )
    return {
        **group,
        "params": [name for number in valid_numbers for name in members.get(number, ())],
    }


def _add_optimizer_states(save: ZeroSave, files: SourceFiles, leaves: Leaves) -> None:
    """Add the moments and step counters of every parameter to *leaves*."""
    _require_equal_settings(save, files.root)
    states = save.optim.states
    owners = range(len(states))
    keys = dict.fromkeys(key for owner in owners for key in states[owner])
    for key in keys:
        owners_with_key = {owner for owner in owners if key in states[owner]}
        values = [states[owner][key] for owner in owners_with_key]
        if key == "step" or not any(isinstance(v, StoredTensor) and v.shape for v in values):
            for owner in sorted(owners_with_key):
                _require_equal_values(save, owner, key, files)
            _add_counters(save, key, owners_with_key, leaves, files.root)
        else:
            _add_moments(save, key, owners_with_key, leaves)


def _require_equal_settings(save: ZeroSave, root: TreePath) -> None:
    """Raise if the ranks have different kinds of state, or different settings of a group."""
    first, *others = (optim for optim in save.optims if not optim.is_placeholder)
    for optim in others:
        for state, other_state in zip(first.states, optim.states, strict=False):
            for key in sorted(state.keys() ^ other_state.keys()):
                without = first if key in other_state else optim
                raise _other_save_error(
                    root / without.file, f"its optimizer's state has no `{key}`, unlike other ranks"
                )
        for group, other_group in zip(first.param_groups, optim.param_groups, strict=False):
            if isinstance(group, dict) and isinstance(other_group, dict):
                for key in sorted(group.keys() | other_group.keys()):
                    values = group.get(key), other_group.get(key)
                    is_tensor = any(isinstance(value, StoredTensor) for value in values)
                    if key != "params" and not is_tensor and not is_same_value(*values):
                        raise _other_save_error(
                            root / optim.file,
                            f"the optimizer's `{key}` differs from that of `{first.file}`",
                        )


def _other_save_error(where: TreePath, why: str) -> UnsupportedError:
    return UnsupportedError(
        "the ranks do not belong to one save",
        where=where,
        why=why,
        hint="check for a file of an earlier save under the same tag",
    )


def _require_equal_values(save: ZeroSave, owner: int, key: str, files: SourceFiles) -> None:
    optims = [optim for optim in save.optims if not optim.is_placeholder]
    values: list[object] = []
    for optim in optims:
        value = optim.states[owner].get(key)
        if isinstance(value, StoredTensor):
            stored = files.read(optim.file, value.offset, value.nbytes)
            value = value.dtype, value.shape, stored
        values.append(value)
    for optim, value in zip(optims, values, strict=True):
        if value != values[0]:
            raise _other_save_error(
                files.root / optim.file,
                f"the optimizer's `{key}` differs from that of `{optims[0].file}`",
            )


def _add_counters(
    save: ZeroSave, key: str, owners_with_key: set[int], leaves: Leaves, root: TreePath
) -> None:
    first = save.optim
    for name, location in save.locations.items():
        if location.group_number not in owners_with_key:
            continue
        path = (OPTIMIZER, "state", name, key)
        value = first.states[location.group_number][key]
        if isinstance(value, StoredTensor):
            leaves.tensors[join_path(path)] = make_stored_entry(path, value, first.file)
        else:
            leaves.add_object(value, path, first.file, str(root / first.file))


def _add_moments(save: ZeroSave, key: str, owners_with_key: set[int], leaves: Leaves) -> None:
    vectors = _build_moment_vectors(save, key, sorted(owners_with_key))
    names = [
        name
        for name, location in save.locations.items()
        if location.group_number in owners_with_key
    ]
    if not vectors:
        leaves.notes.append(
            f"skipped `{key}` of the optimizer's state, which does not have one value per "
            f"element of the parameter: {quote_names(names)}"
        )
        return
    for name in names:
        location, path = save.locations[name], (OPTIMIZER, "state", name, key)
        dtype = vectors[location.spans[0][0] if location.spans else 0].dtype
        boxes = locate_extents(location, vectors)
        leaves.tensors[join_path(path)] = TensorEntry(
            join_path(path), dtype, location.shape, boxes, path
        )


def _build_moment_vectors(save: ZeroSave, key: str, owners: Sequence[int]) -> Sequence[FlatVector]:
    """Return the moment *key* as flat vectors that are aligned with the fp32 partitions.

    Returns an empty sequence if they are not aligned. Groups without this moment get the vector of
    another group as a placeholder.
    """
    by_rank = [list(_iterate_segments(optim, owners, key)) for optim in save.optims]
    ranked, groups = save.stage == 3, len(save.optims[0].partitions)
    if any(len(segments) < len(owners) for segments in by_rank) or (
        ranked and len(owners) < groups
    ):
        return ()
    vectors = build_flat_vectors(by_rank, ranked=ranked)
    if any(
        segment.tensor.dtype != vector.dtype for vector in vectors for segment in vector.segments
    ):
        return ()
    if ranked:
        return vectors
    placed = dict(zip(owners, vectors, strict=True))
    return [placed.get(owner, vectors[0]) for owner in range(groups)]


def _iterate_segments(optim: OptimState, owners: Sequence[int], key: str) -> Iterator[Segment]:
    """Yield the flat moments *key* of a rank, skipping those that do not fit its partitions.

    For stages 1 and 2, a moment may be longer than its partition because of padding.
    """
    for owner in owners:
        value, partition = optim.states[owner].get(key), optim.partitions[owner]
        if is_flat(value):
            surplus = value.shape[0] - partition.numel
            if surplus >= 0 and (surplus == 0 or optim.stage < 3):
                yield Segment(optim.file, value)
