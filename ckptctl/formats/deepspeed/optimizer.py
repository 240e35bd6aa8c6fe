"""State other than the model: optimizer moments by parameter, settings and trainer state.

The names are those of ``torch.distributed.checkpoint.state_dict``: ``optimizer.state.<name>.<key>``
and ``optimizer.param_groups``, whose ``params`` are names. Trainer state is that of the first rank,
and of other ranks if it differs. For stage 3, every rank writes model states with its own
``client_state`` (``deepspeed/runtime/engine.py``, ``save_checkpoint``).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from ckptctl.catalog import Blob, TensorEntry
from ckptctl.errors import UnsupportedError, quote_names
from ckptctl.formats.deepspeed.partitions import Segment, Shapes, Strip, extents, is_flat
from ckptctl.formats.deepspeed.states import INDEX, ModelState, OptimState
from ckptctl.formats.deepspeed.zero import Save, strips_of
from ckptctl.formats.shared.leaves import below_rank, join, kept_apart
from ckptctl.formats.shared.rank_merge import same_value
from ckptctl.formats.shared.stored_leaves import Leaves, stored_entry
from ckptctl.storage.compare import has_same_checksum, have_same_elements
from ckptctl.storage.files import SourceFiles
from ckptctl.storage.pickles.inert import Inert
from ckptctl.storage.zips.zip_reader import StoredTensor
from ckptctl.tree import TreePath

OPTIMIZER = "optimizer"
_COUNTERS = {"float32": "<f", "int64": "<q", "int32": "<i"}
INNER = "optimizer_state_dict"
NUMBERED = (
    "optimizer states are numbered instead of named, because neither `param_names` nor "
    "`param_shapes` maps them to parameters"
)


def rest_of(model: ModelState) -> dict[str, object]:
    """Return the entries of model states other than the model, without an empty optimizer."""
    rest = {key: value for key, value in model.content.items() if key not in INDEX}
    if rest.get(OPTIMIZER, model) is None:
        del rest[OPTIMIZER]
    return rest


def add_other_ranks(
    found: Leaves, models: Sequence[ModelState], model: ModelState, files: SourceFiles
) -> None:
    """Add leaves of other ranks that differ from those in *found*, under new names."""
    differing: list[str] = []
    for rank, other in enumerate(models):
        if other is model or other.absent:
            continue
        theirs = Leaves()
        theirs.add(rest_of(other), (), other.file, str(files.root / other.file))
        own: list[TensorEntry | Blob] = []
        for name, blob in theirs.blobs.items():
            known = found.blobs.get(name)
            if known is None or not same_value(known.value, blob.value):
                own.append(blob)
        for name, entry in theirs.tensors.items():
            first = found.tensors.get(name)
            if first is None or not have_same_elements(
                files,
                first,
                entry,
                of_any_size=has_same_checksum(first.extents[0], entry.extents[0]),
            ):
                own.append(entry)
        for leaf in own:
            path = below_rank(rank, leaf.path)
            found.put(replace(leaf, name=join(path), path=path))
            differing.append(leaf.name)
    found.notes += kept_apart(differing)


def _other_steps(found: Leaves, files: SourceFiles) -> Iterator[str]:
    """Yield a note if the step counts of the optimizer and the model file differ.

    Either the files belong to different saves, or the optimizer was reset.
    """
    values = {name: blob.value for name, blob in found.blobs.items()}
    done, skipped = values.get("global_steps"), values.get("skipped_steps")
    if type(done) is not int:
        return
    expected = done - (skipped if type(skipped) is int else 0)
    for name, entry in found.tensors.items():
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


def _named_optimizer(
    optimizer: Mapping[str, object], groups: Sequence[Shapes] | None, module: Mapping[str, object]
) -> dict[str, object] | None:
    """Replace parameter numbers in an optimizer state by names, or return None if unknown."""
    inner = optimizer.get(INNER, optimizer)
    state = inner.get("state") if isinstance(inner, dict) else None
    settings = inner.get("param_groups") if isinstance(inner, dict) else None
    if not isinstance(inner, dict) or not isinstance(state, dict) or not isinstance(settings, list):
        return None
    names = dict(_names(settings, groups))
    numbers = [g.get("params") if isinstance(g, dict) else None for g in settings]
    count = sum(len(held) for held in numbers if isinstance(held, list))
    if None in numbers or not count == len(names) == len(set(names.values())):
        return None
    if not state.keys() <= names.keys():
        return None
    if not all(_fits(state[number], module.get(names[number])) for number in state):
        return None
    rest = {key: value for key, value in {**optimizer, **inner}.items() if key != INNER}
    return {
        **rest,
        "state": {names[number]: value for number, value in state.items()},
        "param_groups": [
            {**group, "params": [names[number] for number in group["params"]]} for group in settings
        ],
    }


def _names(
    settings: Sequence[object], groups: Sequence[Shapes] | None
) -> Iterator[tuple[object, str]]:
    """Yield number and name of each parameter that has both."""
    known = groups if groups is not None and len(groups) == len(settings) else [{}] * len(settings)
    for group, shapes in zip(settings, known, strict=True):
        numbers = group.get("params") if isinstance(group, dict) else None
        said = group.get("param_names") if isinstance(group, dict) else None
        names = said if isinstance(said, list) else [*shapes]
        if isinstance(numbers, list) and len(numbers) == len(names):
            pairs = zip(numbers, names, strict=True)
            yield from ((n, name) for n, name in pairs if type(n) is int and isinstance(name, str))


def _fits(state: object, parameter: object) -> bool:
    """Return whether all moments have the shape of the parameter, except 0-d counters."""
    if not isinstance(state, dict) or not isinstance(parameter, StoredTensor):
        return False
    moments = (v for k, v in state.items() if isinstance(v, StoredTensor) and k != "step")
    return all(not value.shape or value.shape == parameter.shape for value in moments)


def surroundings(save: Save, files: SourceFiles) -> Leaves:
    """Return all leaves other than the model, preferring those of the first rank."""
    found = Leaves()
    model, root = save.model, files.root
    rest = rest_of(model)
    optimizer = rest.get(OPTIMIZER)
    if isinstance(optimizer, dict) and not save.optims:
        named = _named_optimizer(optimizer, model.groups, model.module)
        found.notes += [] if named else [NUMBERED]
        rest[OPTIMIZER] = named or optimizer
    found.add(rest, (), model.file, str(root / model.file))
    add_other_ranks(found, save.models, model, files)
    if save.optims:
        _add_states(save, files, found)
        first = save.optim
        owners = ((name, part.owner) for name, part in save.parts.items())
        settings = plain_settings(first.rest, first.settings, owners)
        found.add(settings, (OPTIMIZER,), first.file, str(root / first.file))
        found.notes += _other_steps(found, files)
    return found


def plain_settings(
    rest: Mapping[str, object], groups: Sequence[object], owners: Iterable[tuple[str, int]]
) -> dict[str, object]:
    """Return the optimizer's settings as plain values."""
    members: dict[object, list[str]] = {}
    for name, owner in owners:
        members.setdefault(owner, []).append(name)
    named = [_named(group, members) for group in groups if isinstance(group, dict)]
    plain = dict(rest)
    for key, value in rest.items():
        # Replace a loss scaler by its attributes, since loading the object requires DeepSpeed.
        if isinstance(value, Inert) and value.module.startswith("deepspeed."):
            plain[key] = value.state if isinstance(value.state, dict) else value
    return {**({"param_groups": named} if named else {}), **plain}


def _named(
    group: Mapping[str, object], members: Mapping[object, Sequence[str]]
) -> dict[str, object]:
    numbers = group.get("params")
    own = [number for number in numbers if type(number) is int] if isinstance(numbers, list) else []
    return {**group, "params": [name for number in own for name in members.get(number, ())]}


def _add_states(save: Save, files: SourceFiles, found: Leaves) -> None:
    """Add moments and counters of every parameter."""
    states = save.optim.states
    owners = range(len(states))
    keys = dict.fromkeys(key for owner in owners for key in states[owner])
    for key in keys:
        having = {owner for owner in owners if key in states[owner]}
        values = [states[owner][key] for owner in having]
        if key == "step" or not any(isinstance(v, StoredTensor) and v.shape for v in values):
            for owner in sorted(having):
                _require_same(save, owner, key, files)
            _add_counters(save, key, having, found, files.root)
        else:
            _add_moments(save, key, having, found)


def _require_same(save: Save, owner: int, key: str, files: SourceFiles) -> None:
    optims = [optim for optim in save.optims if not optim.absent]
    values: list[object] = []
    for optim in optims:
        value = optim.states[owner].get(key)
        if isinstance(value, StoredTensor):
            stored = files.read(optim.file, value.offset, value.nbytes)
            value = value.dtype, value.shape, stored
        values.append(value)
    for optim, value in zip(optims, values, strict=True):
        if value != values[0]:
            raise UnsupportedError(
                "the ranks do not belong to one save",
                where=str(files.root / optim.file),
                why=f"the optimizer's `{key}` differs from that of `{optims[0].file}`",
                hint="check for a file of an earlier save under the same tag",
            )


def _add_counters(save: Save, key: str, having: set[int], found: Leaves, root: TreePath) -> None:
    first = save.optim
    for name, part in save.parts.items():
        if part.owner not in having:
            continue
        path = (OPTIMIZER, "state", name, key)
        value = first.states[part.owner][key]
        if isinstance(value, StoredTensor):
            found.tensors[join(path)] = stored_entry(path, value, first.file)
        else:
            found.add(value, path, first.file, str(root / first.file))


def _add_moments(save: Save, key: str, having: set[int], found: Leaves) -> None:
    strips = _moment_strips(save, key, sorted(having))
    names = [name for name, part in save.parts.items() if part.owner in having]
    if not strips:
        found.notes.append(
            f"skipped `{key}` of the optimizer's state, which does not have one value per "
            f"element of the parameter: {quote_names(names)}"
        )
        return
    for name in names:
        part, path = save.parts[name], (OPTIMIZER, "state", name, key)
        dtype = strips[part.spans[0][0] if part.spans else 0].dtype
        boxes = extents(part, strips)
        found.tensors[join(path)] = TensorEntry(join(path), dtype, part.shape, boxes, path)


def _moment_strips(save: Save, key: str, owners: Sequence[int]) -> Sequence[Strip]:
    """Return moments as flat vectors parallel to the parameters, or none if they are not.

    Groups without this moment get another group's as a placeholder.
    """
    by_rank = [list(_segments(optim, owners, key)) for optim in save.optims]
    ranked, groups = save.stage == 3, len(save.optims[0].partitions)
    if any(len(held) < len(owners) for held in by_rank) or (ranked and len(owners) < groups):
        return ()
    strips = strips_of(by_rank, ranked=ranked)
    if any(segment.tensor.dtype != strip.dtype for strip in strips for segment in strip.segments):
        return ()
    if ranked:
        return strips
    placed = dict(zip(owners, strips, strict=True))
    return [placed.get(owner, strips[0]) for owner in range(groups)]


def _segments(optim: OptimState, owners: Sequence[int], key: str) -> Iterator[Segment]:
    """Yield a rank's flat moments, which are as long as its partitions with padding."""
    for owner in owners:
        value, partition = optim.states[owner].get(key), optim.partitions[owner]
        if is_flat(value):
            surplus = value.shape[0] - partition.numel
            if surplus >= 0 and (surplus == 0 or optim.stage < 3):
                yield Segment(optim.file, value)
