"""Mapping of training state that ``--only all`` adds, such as optimizer state and counters.

The name of a moment contains the fully qualified name of its parameter
(``optimizer.state.<fqn>.exp_avg``, ``torch/distributed/checkpoint/state_dict.py``). Moments are
fused, split, stacked and permuted like their parameters.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ckptctl import formats
from ckptctl.catalog import Blob, Catalog, Index, Path, TensorEntry
from ckptctl.conversion.recognition.layout_change import add_virtual_sums, add_virtual_zeros
from ckptctl.errors import RefusedError, format_option
from ckptctl.formats.shared.leaves import join_path
from ckptctl.planner.mapping.mapped import (
    ComposedTensor,
    RedundantData,
    SourceTensor,
    ZeroTensor,
    compose_tensors,
)
from ckptctl.planner.mapping.tensors import LayoutChange
from ckptctl.storage.pickles.inert import DictRecord, is_same_value

PARAMETER_COPIES = frozenset({"fp32_param", "master_param"})
"""Names under which optimizers store their own copies of parameters."""
MAX_NAME_DOTS = 64
"""Maximum number of dots in a name that is searched for parameters, to limit the time."""
_STATISTIC_PATTERN = re.compile(r"avg|moment")
"""Pattern that the names of gradient statistics, such as ``exp_avg``, contain."""


@dataclass(slots=True)
class MappedBlob:
    """Non-tensor value under its name in the output, and the names of its sources."""

    blob: Blob
    sources: list[str]


@dataclass(slots=True)
class TrainingState:
    """Leaves outside the model, by name in the output.

    Attributes:
        tensors: Tensors by name in the output. Their source keys are names in the checkpoint.
        paths: Key path of each tensor in the output, by name.
        blobs: Non-tensor values by name in the output.
        redundant: Step counters that are dropped because their parameters are merged.
        zeros: All-zero tensors that pad moments in the same way as their parameters.
    """

    tensors: dict[str, ComposedTensor] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)
    blobs: dict[str, MappedBlob] = field(default_factory=dict)
    redundant: list[RedundantData] = field(default_factory=list)
    zeros: list[ZeroTensor] = field(default_factory=list)

    def add_virtual_tensors(self, catalog: Catalog) -> Catalog:
        """Return a copy of *catalog* with the virtual zeros and sums that *tensors* read."""
        return add_virtual_sums(add_virtual_zeros(catalog, self.zeros, ""), self.tensors.values())


def map_training_state(
    catalog: Catalog, names: Sequence[str], root: str, change: LayoutChange
) -> TrainingState:
    """Map the training state called *names* in the same way as *change* maps its parameters."""
    tensors = [catalog.tensors[name] for name in names if name in catalog.tensors]
    blobs = [catalog.blobs[name] for name in names if name not in catalog.tensors]
    moments = [entry.name for entry in tensors if entry.shape]
    if change.vocab is not None and moments:
        raise RefusedError(
            "cannot resize optimizer state to another vocabulary size",
            where=f"tensor `{moments[0]}`",
            why=f"{format_option('--vocab-size')} only pads or truncates parameters",
            hint=f"pass {format_option('--only model')}",
        )
    _require_unsplit_parameters(catalog, tensors, change)
    if change.keeps_names or not names:
        unchanged = (
            ComposedTensor.from_unchanged(entry.name, entry.name, entry.shape) for entry in tensors
        )
        return TrainingState(
            {composed.key: composed for composed in unchanged},
            {entry.name: entry.path for entry in tensors},
            {blob.name: MappedBlob(blob, [blob.name]) for blob in blobs},
        )
    mapper = _StateMapper(catalog, root, change)
    for entry in tensors:
        mapper.map_tensor(entry)
    for blob in blobs:
        mapper.map_blob(blob)
    mapper.map_moments()
    return mapper.rest


def _require_unsplit_parameters(
    catalog: Catalog, tensors: Sequence[TensorEntry], change: LayoutChange
) -> None:
    """Raise if optimizer state was saved for shards of a parameter that the conversion merges."""
    merged = formats.map_merged_parameters(catalog, [entry.name for entry in tensors])
    source_keys = (
        {source.key for item in change.tensors for source in item.sources} if merged else {}
    )
    for name, merged_name in merged.items():
        parameter = next(
            (part for part in iterate_name_parts(merged_name) if part in source_keys), None
        )
        if parameter is not None:
            raise RefusedError(
                "cannot map optimizer state to its parameter",
                where=f"tensor `{name}`",
                why=f"Megatron-FSDP saved it for one part of `{parameter}`, but parts are merged",
                hint=f"pass {format_option('--only model')}; to resume in Megatron-FSDP, load the "
                "original save",
            )


class _StateMapper:
    """Mapper of training state that replaces the parameter names in leaf names."""

    def __init__(self, catalog: Catalog, root: str, change: LayoutChange) -> None:
        self.root, self.entries = root, catalog.tensors
        self.zeros = {zeros.key: zeros for zeros in change.zeros if zeros.like}
        self.rest = TrainingState()
        self.targets: dict[str, list[ComposedTensor]] = {}
        for composed in compose_tensors(change.tensors).values():
            for key in dict.fromkeys(self._iterate_parameters(composed)):
                self.targets.setdefault(key, []).append(composed)
        parameters = (self.entries.get(root + name) for name in self.targets)
        self.shapes = {parameter.shape for parameter in parameters if parameter}
        self.counters: dict[str, str] = {}
        # Parts of a target and their list, by keys of the list (without indices) and target.
        self.lists: dict[tuple[tuple[str | int | None, ...], str], tuple[set[str], str]] = {}
        self.moments_by_pattern: dict[Path, dict[str, TensorEntry]] = {}

    def map_tensor(self, entry: TensorEntry) -> None:
        """Map a moment of a parameter, a counter, or an unrelated tensor."""
        parameter, is_counter = self._find_parameter(entry.name), entry.shape in ((), (1,))
        if parameter is None:
            if not is_counter and self._belongs_to_parameter(entry):
                raise RefusedError(
                    "cannot map optimizer state to its parameter",
                    where=f"tensor `{entry.name}`",
                    why="its name contains no parameter name, or that parameter is skipped",
                    hint=f"pass {format_option('--only model')}, or keep the layout",
                )
            self._keep_tensor(entry, entry.path, entry.name)
        elif is_counter:
            for path in self._list_target_paths(entry.path, parameter):
                self._keep_tensor(entry, path, join_path(path))
        else:
            self._add_moment(entry, parameter)

    def _belongs_to_parameter(self, entry: TensorEntry) -> bool:
        """Return whether a tensor without a parameter name seems to be state of a parameter.

        Such tensors, as in optimizers that number the parameters, cannot be mapped.
        """
        parts = entry.name.lower().split(".")
        is_numbered = any(part.isdecimal() for part in parts[-2:])
        has_parameter_shape = entry.shape in self.shapes
        return (
            parts[0].startswith("opt")
            or "state" in parts
            or any(part in PARAMETER_COPIES or _STATISTIC_PATTERN.search(part) for part in parts)
            or (is_numbered and has_parameter_shape and entry.dtype.startswith(("float", "bfloat")))
        )

    def _keep_tensor(self, entry: TensorEntry, path: Path, name: str) -> None:
        first = self.counters.setdefault(name, entry.name)
        if first == entry.name:
            self._add_tensor(ComposedTensor.from_unchanged(entry.name, name, entry.shape), path)
        else:
            self.rest.redundant.append(RedundantData.from_copy(entry.name, kept_key=first))

    def _add_moment(self, entry: TensorEntry, parameter: str) -> None:
        shape = self.entries[self.root + parameter].shape
        if shape != entry.shape:
            raise RefusedError(
                "optimizer state and its parameter have different shapes",
                where=f"tensor `{entry.name}`",
                why=f"the state is {list(entry.shape)}, but `{parameter}` is {list(shape)}",
                hint=f"pass {format_option('--only model')}, or keep the layout",
            )
        pattern = _replace_name(entry.path, parameter, "")
        self.moments_by_pattern.setdefault(pattern, {})[parameter] = entry

    def map_moments(self) -> None:
        """Map all moments, such as ``exp_avg``, in the same way as their parameters."""
        for moments in self.moments_by_pattern.values():
            targets = {target.key: target for name in moments for target in self.targets[name]}
            for composed in targets.values():
                self._map_moment(composed, moments)

    def _map_moment(self, composed: ComposedTensor, moments: Mapping[str, TensorEntry]) -> None:
        parameters = list(self._iterate_parameters(composed))
        example = next(key for key in parameters if key in moments)
        missing = next((key for key in parameters if key not in moments), None)
        if missing is not None:
            raise RefusedError(
                "optimizer state is missing for some parts of a tensor",
                where=f"tensor `{moments[example].name}`",
                why=f"`{example}` and `{missing}` become one tensor, but `{missing}` has no state",
                hint=f"pass {format_option('--only model')}, or keep the layout",
            )
        path = _replace_name(moments[example].path, example, composed.key)
        sources = tuple(self._resolve_moment(source, moments) for source in composed.sources)
        self._add_tensor(replace(composed, key=join_path(path), sources=sources), path)

    def _add_tensor(self, composed: ComposedTensor, path: Path) -> None:
        existing = self.rest.tensors.setdefault(composed.key, composed)
        if existing is not composed:
            both = (next(iter(item.keys)) for item in (existing, composed))
            raise RefusedError(
                "two tensors would have the same name in the output",
                where=f"tensor `{composed.key}`",
                why=" and ".join(f"`{name}`" for name in both),
                hint=f"pass {format_option('--only model')}, or keep the layout",
            )
        self.rest.paths[composed.key] = path

    def _iterate_parameters(self, composed: ComposedTensor) -> Iterator[str]:
        """Yield the names of the parameters that *composed* reads or pads with zeros."""
        for key in composed.keys:
            yield self.zeros[key].like if key in self.zeros else key

    def _resolve_moment(
        self, source: SourceTensor, moments: Mapping[str, TensorEntry]
    ) -> SourceTensor:
        """Return the source tensor of a moment that corresponds to *source*.

        If *source* is padding, add zeros that pad the moment, and return them.
        """
        zeros = self.zeros.get(source.key)
        if zeros is None:
            return _build_moment_source(source, moments[source.key].name)
        like = moments[zeros.like].name
        self.rest.zeros.append(replace(zeros, key=f"{zeros.key}@{like}", like=like))
        return source._replace(key=self.rest.zeros[-1].key)

    def map_blob(self, blob: Blob) -> None:
        """Map a non-tensor value, and rename the parameters that it names."""
        value = self._rename_parameters(blob.value, blob.path)
        if not is_same_value(value, blob.value):
            blob = replace(blob, value=value, file=None)
        parameter = self._find_parameter(blob.name)
        for path in (
            [blob.path] if parameter is None else self._list_target_paths(blob.path, parameter)
        ):
            self._add_blob(replace(blob, name=join_path(path), path=path), blob.name)

    def _rename_parameters(self, value: object, path: Path) -> object:
        """Return *value*, the value at *path*, with the parameter names of the output.

        Saves of torch 2.3 and earlier contain ``param_groups`` as a single value.
        """
        if isinstance(value, str):
            return self._rename_reference(value, path) if "." in value else value
        renamed: object = value
        if isinstance(value, dict):
            items = {
                self._rename_parameters(key, path): self._rename_parameters(item, (*path, str(key)))
                for key, item in value.items()
            }
            renamed = value.copy_with(items) if isinstance(value, DictRecord) else items
        elif isinstance(value, list | tuple | set | frozenset):
            names = [item for item in value if isinstance(item, str)]
            renamed = type(value)(
                self._rename_list(names, path)
                if len(names) == len(value)
                else (
                    self._rename_parameters(item, (*path, Index(position)))
                    for position, item in enumerate(value)
                )
            )
        return renamed

    def _rename_reference(self, text: str, path: Path) -> str:
        """Rename *text* if it names a parameter, which must be neither merged nor split."""
        parameter = self._find_parameter(text)
        if parameter is None:
            return text
        targets = self.targets[parameter]
        if len(targets) > 1 or set(self._iterate_parameters(targets[0])) != {parameter}:
            raise RefusedError(
                "cannot map a parameter name in the training state",
                where=f"`{join_path(path)}`",
                why=f"`{parameter}` is split, or merged with other parameters",
                hint=f"pass {format_option('--only model')}, or keep the layout",
            )
        return _replace_text(text, parameter, targets[0].key)

    def _rename_list(self, items: Collection[str], path: Path) -> Iterator[str]:
        """Yield *items* with the parameter names of the output, and each parameter only once."""
        parts: dict[str, set[str]] = {}
        for item in items:
            parameter = self._find_parameter(item)
            if parameter is None:
                yield item
                continue
            for target in self.targets[parameter]:
                name = _replace_text(item, parameter, target.key)
                if name not in parts:
                    yield name
                parts.setdefault(name, set()).add(item)
        for name, merged in parts.items():
            self._require_one_list(name, merged, path)

    def _require_one_list(self, target: str, parts: set[str], path: Path) -> None:
        """Raise if two lists, such as those of two parameter groups, contain parts of *target*.

        *parts* are the parameters that become *target* in the list at *path*.
        """
        siblings = tuple(None if isinstance(key, Index) else key for key in path)
        name = join_path(path)
        first_parts, first = self.lists.setdefault((siblings, target), (parts, name))
        if first_parts != parts:
            pair = (min(first_parts - parts or first_parts), min(parts - first_parts or parts))
            raise RefusedError(
                "parameters that become one are in different parameter groups",
                where=f"`{first}` and `{name}`",
                why=f"{' and '.join(f'`{name}`' for name in pair)} become `{target}`",
                hint=f"pass {format_option('--only model')}, or keep the layout",
            )

    def _add_blob(self, blob: Blob, source: str) -> None:
        """Add *blob* to the output, or raise if merged parameters have different values for it."""
        mapped = self.rest.blobs.setdefault(blob.name, MappedBlob(blob, []))
        mapped.sources.append(source)
        first = mapped.blob
        is_same = is_same_value(first.value, blob.value)
        if not is_same or (first.file is None) != (blob.file is None):
            raise RefusedError(
                "parameters that become one have different optimizer settings",
                where=f"`{mapped.sources[0]}` and `{source}`",
                why=f"{first.value!r} and {blob.value!r}",
                hint=f"pass {format_option('--only model')}, or keep the layout",
            )

    def _list_target_names(self, name: str) -> list[str]:
        """Return the target names of a parameter, or *name* itself if it is not a parameter."""
        return [composed.key for composed in self.targets[name]] if name in self.targets else [name]

    def _find_parameter(self, name: str) -> str | None:
        """Find the longest parameter name in *name*, or return None.

        Wrappers such as FSDP and torch.compile add prefixes to parameter names.
        """
        if name.count(".") > MAX_NAME_DOTS:  # no name, but a text
            return None
        return next((part for part in iterate_name_parts(name) if part in self.targets), None)

    def _list_target_paths(self, path: Path, parameter: str) -> list[Path]:
        return [
            _replace_name(path, parameter, target) for target in self._list_target_names(parameter)
        ]


def _replace_name(path: Path, parameter: str, target: str) -> Path:
    """Replace the name *parameter* in *path* with *target*.

    The name may be contained in a single key or span several keys.
    """
    for position, key in enumerate(path):
        if isinstance(key, str) and parameter in iterate_name_parts(key):
            return (*path[:position], _replace_text(key, parameter, target), *path[position + 1 :])
    for start in range(len(path)):
        for stop in range(start + 1, len(path) + 1):
            if join_path(path[start:stop]) == parameter:
                return (*path[:start], *target.split("."), *path[stop:])
    return (_replace_text(join_path(path), parameter, target),)


def _replace_text(text: str, parameter: str, target: str) -> str:
    """Replace the components of the dotted *text* that are *parameter* with *target*."""
    return f".{text}.".replace(f".{parameter}.", f".{target}.").strip(".")


def iterate_name_parts(name: str) -> Iterator[str]:
    """Yield all sequences of adjacent components of the dotted *name*, with the longest first."""
    pieces = name.split(".")
    for length in range(len(pieces), 0, -1):
        for start in range(len(pieces) - length + 1):
            yield ".".join(pieces[start : start + length])


def _build_moment_source(parameter: SourceTensor, name: str) -> SourceTensor:
    """Build the source tensor that reads optimizer state *name* the way *parameter* is read."""
    kinds = {
        part
        for part in name.split(".")
        if part in PARAMETER_COPIES or _STATISTIC_PATTERN.search(part)
    }
    if parameter.offset and not kinds:
        raise RefusedError(
            "cannot map optimizer state to its parameter",
            where=f"tensor `{name}`",
            why=f"the layouts store the parameter with an offset of {abs(parameter.offset)}, "
            "and it "
            "is unknown whether this tensor is a copy",
            hint=f"pass {format_option('--only model')}, or keep the layout",
        )
    return parameter._replace(key=name, offset=parameter.offset if PARAMETER_COPIES & kinds else 0)
