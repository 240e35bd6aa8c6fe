"""Convert optimizer state that Megatron-FSDP saved to the names of Megatron-Core's own optimizer.

Megatron-FSDP (``--ckpt-format fsdp_dtensor``) saves a DCP directory with the moments and settings
of each parameter, whose names start with those of the wrapper modules::

    model.module.decoder.layers.0.mlp.linear_fc1.weight_w
    optimizer.state.module.module.decoder.layers.0.mlp.linear_fc1.weight_w.exp_avg
    optimizer.param_to_group_meta.module.module.decoder.layers.0.mlp.linear_fc1.weight.lr

The tensors below ``model.`` are the parameters of the optimizer, which are its master weights.
PyTorch's Adam counts the steps of each parameter in a tensor ``step``, and Transformer Engine's in
the settings.

Megatron-Core's distributed optimizer (``fully_reshardable``) has ``optimizer.state.STATE.NAME`` for
each moment, the state ``param`` for the master weights, and settings of groups of parameters. Its
parameters of experts have an optimizer of their own if ranks divide the experts.

Source: ``sharded_param_state_fsdp_dtensor`` and ``load_state_dict`` in
``megatron/core/optimizer/distrib_optimizer.py``, ``preprocess_fsdp_dtensor_state_dict`` in
``megatron/training/checkpointing.py``, ``megatron/core/transformer/fsdp_dtensor_checkpoint.py``.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, cast

from ckptctl.catalog import Blob, Catalog, Index, Path, TensorEntry
from ckptctl.errors import RefusedError, UnsupportedError, format_option, quote_names
from ckptctl.facts import MEGATRON
from ckptctl.formats.base import ReadOptions
from ckptctl.formats.dcp.locating import locate_elements
from ckptctl.formats.mcore.buckets import FULLY_RESHARDABLE, MASTER, SHARDING_TYPE_KEYS
from ckptctl.formats.mcore.joining import join_canonical
from ckptctl.formats.mcore.mcore_reader import ARGUMENTS, extract_trainer_arguments
from ckptctl.formats.mcore.spelling import find_parameter_name, is_fsdp_checkpoint
from ckptctl.formats.shared.findings import UNUSABLE_ERRORS, FaultCollector
from ckptctl.formats.shared.leaves import build_nested_object, join_path
from ckptctl.storage.files import SourceFiles, source_files
from ckptctl.storage.zips.zip_reader import TABLE_WITH_UNREAD_TENSORS, read_archive

OPTIMIZER, SETTINGS = "optimizer", "param_to_group_meta"
SETTINGS_PREFIX = f"{OPTIMIZER}.{SETTINGS}."
STEP = "step"
STATE_PREFIX = f"{OPTIMIZER}.state."
_MODULES = re.compile(r"(?:module\.)+")
_MODEL = re.compile(r"\Amodel\.(?:module\.)+")
_PART = re.compile(r"(?:_[wv]|\.(?:query|key|value|z|beta|alpha))\Z")
"""Suffix of a part of a parameter, which has the settings of the parameter."""
_UNSCALED = frozenset({"float32", "bfloat16"})
"""Dtypes of moments that Transformer Engine stores without a scale."""
_COUNTED = f"{OPTIMIZER}.state.exp_avg_sq."
"""Prefix of second moments. Optimizers that have them count their steps."""


class _StateName(NamedTuple):
    """Parts of the name of optimizer state, ``optimizer.state.MODULES PARAMETER.STATE``."""

    modules: str
    parameter: str
    state: str


def _parse_state_name(name: str) -> _StateName | None:
    """Split the name of optimizer state, or return None if *name* is of another tensor."""
    path, _, state = name.removeprefix(STATE_PREFIX).rpartition(".")
    modules = _MODULES.match(path)
    if not name.startswith(STATE_PREFIX) or modules is None or modules.end() == len(path):
        return None
    return _StateName(modules[0], path[modules.end() :], state)


def refine_catalog(catalog: Catalog, options: ReadOptions) -> Catalog:
    """Join the parts of tensors in *catalog*, and rename the optimizer state."""
    is_renamed = False
    faults = FaultCollector(catalog.root, options.partial, list(catalog.findings))
    if any(name.startswith(SETTINGS_PREFIX) for name in catalog.blobs):
        with source_files(catalog.root) as files:
            try:
                arguments = _read_arguments(catalog.blobs, files)
                catalog, is_renamed = rename_states(catalog, files), True
            except UNUSABLE_ERRORS as error:
                faults.add_or_raise(error)
        if is_renamed:
            catalog = _mark_divided_experts(catalog, arguments)
            records = {MEGATRON: {ARGUMENTS: arguments}} if arguments else {}
            catalog = replace(catalog, extensions={**catalog.extensions, **records})
    if is_fsdp_checkpoint(catalog.tensors):
        catalog = _join_parts(catalog, faults)
    else:
        catalog = replace(catalog, findings=tuple(faults.findings))
    return add_master_weights(catalog) if is_renamed else catalog


def _join_parts(catalog: Catalog, faults: FaultCollector) -> Catalog:
    joined_catalog = join_canonical(catalog, faults, {})
    new = quote_names([name for name in joined_catalog.tensors if name not in catalog.tensors])
    notes = [f"tensors that Megatron-FSDP saved in parts are joined and renamed: {new}"]
    if settings := [name for name in catalog.blobs if find_parameter_name(name)]:
        notes.append(f"settings of parts keep their names: {quote_names(settings)}")
    return replace(joined_catalog, notes=(*joined_catalog.notes, *notes))


def rename_states(catalog: Catalog, files: SourceFiles) -> Catalog:
    """Rename parameters and moments, and move the numbers of steps from tensors to the settings.

    The names still have parts. The catalog is returned unchanged, with a note, if the moments may
    have scales, which are not saved.

    Raises:
        UnsupportedError: A number of steps cannot be read.
    """
    matches = {name: match for name in catalog.tensors if (match := _parse_state_name(name))}
    scaled = [
        name
        for name, match in matches.items()
        if match.state != STEP and catalog.tensors[name].dtype not in _UNSCALED
    ]
    if scaled:
        note = (
            "Megatron-FSDP saved optimizer state without its scales, so only Megatron-FSDP can "
            f"load it: {quote_names(scaled)}"
        )
        return replace(catalog, notes=(*catalog.notes, note))
    steps = {name for name, match in matches.items() if match.state == STEP}
    tensors: dict[str, TensorEntry] = {}
    new_names: dict[str, str] = {}
    for name, entry in catalog.tensors.items():
        if name in steps:
            continue
        new = _MODEL.sub("", name)
        if match := matches.get(name):
            new = f"{STATE_PREFIX}{match.state}.{match.parameter}"
        new_names[name] = new
        tensors[new] = entry if new == name else replace(entry, name=new, path=(new,))
    lost = {new_names.get(name, name): boxes for name, boxes in catalog.lost.items()}
    values = _read_steps(files, {name: catalog.tensors[name] for name in sorted(steps)})
    blobs = dict(catalog.blobs)
    for name, value in values.items():
        match = matches[name]
        path: Path = (OPTIMIZER, SETTINGS, match.modules + _PART.sub("", match.parameter), STEP)
        blob = Blob(join_path(path), path, value=value)
        if blobs.setdefault(blob.name, blob).value != value:
            raise UnsupportedError(
                "the parts of a parameter have counted different numbers of steps",
                where=f"{files.root}, `{name}`",
                why=f"{blobs[blob.name].value!r} and {value!r}",
            )
    return replace(catalog, tensors=tensors, lost=lost, blobs=blobs)


def _read_arguments(blobs: Mapping[str, Blob], files: SourceFiles) -> dict[str, object]:
    """Read Megatron's arguments, or return an empty dictionary if they were not saved."""
    blob = blobs.get(ARGUMENTS)
    if blob is None or blob.file is None or blob.extension:
        return {}
    archive = read_archive(
        files,
        blob.file,
        blob.offset,
        blob.nbytes,
        unknown="inert",
        table=TABLE_WITH_UNREAD_TENSORS,
    )
    return extract_trainer_arguments({ARGUMENTS: replace(blob, value=archive.root)})


def _mark_divided_experts(catalog: Catalog, arguments: Mapping[str, object]) -> Catalog:
    """State in the settings of experts that ranks divide them, if *arguments* state so.

    Megatron-FSDP has one optimizer for all parameters, and does not record it there.
    """
    tensor = arguments.get("tensor_model_parallel_size")
    experts = arguments.get("expert_model_parallel_size")
    expert_tensor = arguments.get("expert_tensor_parallel_size")
    if experts in (None, 1) and expert_tensor in (None, tensor):
        return catalog
    marked = {
        name: Blob(name, blob.path, value=True)
        for name, blob in catalog.blobs.items()
        if name.startswith(SETTINGS_PREFIX)
        and ".mlp.experts." in name
        and blob.path[-1] == "is_expert_parallel"
    }
    return replace(catalog, blobs={**catalog.blobs, **marked})


def _read_steps(files: SourceFiles, entries: Mapping[str, TensorEntry]) -> dict[str, int | float]:
    """Read the numbers of steps, which are tensors with one element."""
    values: dict[str, int | float] = {}
    for name, entry in locate_elements(files, entries).items():
        extents = list(entry.extents)
        raw = len(extents) == 1 and extents[0].codec == "raw" and not extents[0].strides
        if not raw or entry.dtype != "float32" or entry.shape not in ((), (1,)):
            raise UnsupportedError(
                "the number of steps of a parameter cannot be read",
                where=f"{files.root}, `{name}`",
                why=entry.unsupported or f"it is {entry.dtype} {list(entry.shape)}",
            )
        (value,) = struct.unpack("<f", files.read(extents[0].file, extents[0].offset, 4))
        values[name] = int(value) if value.is_integer() else value
    return values


def add_master_weights(catalog: Catalog) -> Catalog:
    """Add the state ``param`` of each parameter, which are the tensors of the model themselves."""
    prefix = f"{OPTIMIZER}.state."
    masters: dict[str, TensorEntry] = {}
    for name in catalog.tensors:
        state, _, parameter = name.removeprefix(prefix).partition(".")
        if name.startswith(prefix) and state != MASTER and parameter in catalog.tensors:
            new = f"{prefix}{MASTER}.{parameter}"
            masters[new] = replace(catalog.tensors[parameter], name=new, path=(new,))
    if not masters:
        return catalog
    note = (
        "the optimizer state of Megatron-FSDP is named as Megatron-Core's (`fully_reshardable`); "
        f"its master weights, `{prefix}{MASTER}`, are the tensors of the model"
    )
    tensors = {**catalog.tensors, **masters}
    return replace(catalog, tensors=tensors, notes=(*catalog.notes, note))


def build_parameter_groups(leaves: Sequence[Blob], names: Iterable[str]) -> list[Blob]:
    """Replace the settings of parameters in *leaves* with those of parameter groups.

    Args:
        leaves: Values to write.
        names: Names of the tensors to write.

    Raises:
        RefusedError: The number of steps is missing, or is not the same for all parameters.
    """
    by_parameter: dict[object, list[tuple[Path, object]]] = {}
    others: list[Blob] = []
    for blob in leaves:
        if blob.path[:2] == (OPTIMIZER, SETTINGS) and len(blob.path) > 3:
            by_parameter.setdefault(blob.path[2], []).append((blob.path[3:], blob.value))
        else:
            others.append(blob)
    if not by_parameter:
        return list(leaves)
    groups: dict[str, dict[str, object]] = {}
    for pairs in by_parameter.values():
        group = cast("dict[str, object]", build_nested_object(pairs))
        groups.setdefault(repr(sorted(group.items())), group)
    steps = list(dict.fromkeys(repr(group.get(STEP)) for group in groups.values()))
    if len(steps) > 1 or (steps == ["None"] and any(n.startswith(_COUNTED) for n in names)):
        raise RefusedError(
            "Megatron-Core cannot resume with this optimizer state",
            where=f"`{SETTINGS_PREFIX.rstrip('.')}`",
            why=f"parameters have counted different numbers of steps: {', '.join(steps)}"
            if len(steps) > 1
            else "the number of steps is missing",
            hint=f"pass {format_option('--only model')} to write only the weights",
        )
    dense = [group for group in groups.values() if not group.get("is_expert_parallel")]
    routed = [group for group in groups.values() if group.get("is_expert_parallel")]
    roots: list[tuple[Path, list[dict[str, object]]]] = [((OPTIMIZER,), dense)]
    if routed:
        roots = [((OPTIMIZER, 0), dense), ((OPTIMIZER, 1), routed)]
    for root, members in roots:
        for position, group in enumerate(members):
            path = (*root, OPTIMIZER, "param_groups", Index(position))
            others += _make_blobs({(*path, key): value for key, value in group.items()})
        others += _make_blobs({(*root, SHARDING_TYPE_KEYS[0]): FULLY_RESHARDABLE})
    others += _make_blobs({("content_metadata", SHARDING_TYPE_KEYS[1]): FULLY_RESHARDABLE})
    return others


def _make_blobs(values: Mapping[Path, object]) -> list[Blob]:
    return [Blob(join_path(path), path, value=value) for path, value in values.items()]
