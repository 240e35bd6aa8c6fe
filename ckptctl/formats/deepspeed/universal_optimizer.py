"""What a universal checkpoint of DeepSpeed holds outside the model."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from ckptctl.errors import UnsupportedError
from ckptctl.formats.deepspeed.files import FP32, ZERO
from ckptctl.formats.deepspeed.folders import SETTINGS, lacking
from ckptctl.formats.deepspeed.optimizer import plain_settings
from ckptctl.formats.deepspeed.trainer import OPTIMIZER, add_other_ranks, rest_of
from ckptctl.formats.deepspeed.universal import UniversalSave
from ckptctl.formats.shared.leaves import Leaves, stored_entry
from ckptctl.storage.zips.reader import StoredTensor, read_archive

_NOT_SETTINGS = (
    "param_groups",
    "optimizer_state_dict",
    "fp32_flat_groups",
    "zero_stage",
    "partition_count",
    "group_paddings",
    "param_alignment_paddings",
    "ds_version",
)


def surroundings(save: UniversalSave) -> Leaves:
    """Return everything outside the model."""
    found = Leaves()
    model, where = save.model, str(save.source.root / save.model.file)
    found.add(rest_of(model), (), model.file, where)
    if save.partitioned:
        add_other_ranks(found, save.models, model, save.source)
    for name, keys in save.values.items():
        for key in keys:
            if key != FP32:
                _add_state(save, name, key, found)
    groups = [[*group] for model in save.models for group in model.groups or ()]
    for (name, key), like in lacking(save.values, groups).items():
        entry = save.missing(name, key, like) if key != FP32 else None
        if entry is not None:
            path = (OPTIMIZER, "state", name, key)
            found.tensors[".".join(path)] = replace(entry, name=".".join(path), path=path)
    _add_settings(save, found)
    return found


def _add_state(save: UniversalSave, name: str, key: str, found: Leaves) -> None:
    value = save.values[name][key]
    path = (OPTIMIZER, "state", name, key)
    file = save.file(name, key)
    if isinstance(value, StoredTensor) and (not value.shape or key == "step"):
        entry = stored_entry(path, value, file)
    elif isinstance(value, StoredTensor | dict):
        moment = save.parameter(name, key)
        entry = replace(moment, name=".".join(path), path=path)
    else:
        found.add(value, path, file, str(save.source.root / file))
        return
    found.tensors[entry.name] = entry


def _add_settings(save: UniversalSave, found: Leaves) -> None:
    """Add what all parameters have in common, and at stage 3 the counters of each."""
    file = f"{save.prefix}{ZERO}/{SETTINGS}"
    where = str(save.source.root / file)
    read = partial(read_archive, save.source, unknown="inert")
    archive = save.faults.read([file], read)[0] if save.partial else read(file)
    content = {} if archive is None else archive.root
    if not isinstance(content, dict):
        raise UnsupportedError("the optimizer's settings are not a dict", where=where)
    groups, inner = content.get("param_groups"), content.get("optimizer_state_dict")
    states = inner.get("state") if isinstance(inner, dict) else None
    owners = [
        (name, number) for number, group in enumerate(save.model.groups or ()) for name in group
    ]
    for name, number in owners:
        state = states.get(number) if isinstance(states, dict) else None
        if isinstance(state, dict) and "step" in state and "step" not in save.values.get(name, ()):
            found.add(state["step"], (OPTIMIZER, "state", name, "step"), file, where)
    rest = {key: item for key, item in content.items() if key not in _NOT_SETTINGS}
    settings = plain_settings(rest, groups if isinstance(groups, list) else (), owners)
    found.add(settings, (OPTIMIZER,), file, where)
