"""Average checkpoints of one model while the result is converted.

The output tensors of each source are planned as for a conversion, so sources may differ in format,
layout and sharding. Each floating-point tensor of the output is then a virtual file: the weighted
sum of the corresponding tensors, in float64, rounded once to the dtype of the output (see
:mod:`ckptctl.numerics.kinds.averaged`). The last source determines everything else, such as
config.json and tokenizer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from ckptctl import families, formats
from ckptctl.adapters.fill_renaming import label_virtual_files
from ckptctl.adapters.peft import FLOAT_DTYPES
from ckptctl.catalog import ComputedTensor, ComputeInput, build_computed_name
from ckptctl.conversion.conversion_options import AverageOptions
from ckptctl.conversion.convert import ConversionPlan, Step, plan_tensors, plan_with_steps
from ckptctl.conversion.destinations import require_writable_format
from ckptctl.conversion.draft import Draft
from ckptctl.conversion.proofs import find_lost_data
from ckptctl.conversion.recognition.model import CONFIG
from ckptctl.conversion.steps import select_steps
from ckptctl.conversion.transfers import build_target_tensor
from ckptctl.errors import (
    MappingError,
    UsageError,
    format_command,
    format_option,
    quote_names,
)
from ckptctl.facts.agreement import compare_statements
from ckptctl.formats.base import OutputTensor
from ckptctl.notes import Notes
from ckptctl.numerics.quantized import require_same_quantization
from ckptctl.planner.copying.blocks import build_rearranged_file
from ckptctl.planner.mapping.mapped import ComposedTensor
from ckptctl.planner.retention import find_abandoned_checkpoints
from ckptctl.results import JsonField, Result
from ckptctl.runs.listing import read_run
from ckptctl.storage.computed import open_catalog_reader
from ckptctl.storage.paths import make_comparable
from ckptctl.tree import TreePath
from ckptctl.units import pluralize
from ckptctl.verbs.average_weights import compute_ema_weights, compute_schedule_weights

WHOLE_DTYPES = ("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64")
"""Dtypes whose tensors must be equal in all checkpoints."""


@dataclass(frozen=True, slots=True)
class AveragePlan(Result):
    """Plan of an average, including the plan of the conversion.

    Attributes:
        conversion: The conversion of the average.
        drafts: Drafts of all sources but the last.
    """

    conversion: ConversionPlan
    sources: Annotated[tuple[str, ...], JsonField("absolute paths of the checkpoints, in order")]
    weights: Annotated[
        tuple[float, ...], JsonField("weight of each checkpoint, before division by their sum")
    ]
    averaged: Annotated[int, JsonField("number of tensors that are averaged")]
    equal: Annotated[
        int, JsonField("number of tensors without floating-point elements, which must be equal")
    ]
    from_last: Annotated[
        tuple[str, ...],
        JsonField("names of the step counters and other numbers that the last checkpoint provides"),
    ]
    drafts: tuple[Draft, ...] = ()

    def require_redundant_data(self) -> None:
        """Raise if data that the sources before the last would lose is not redundant."""
        for draft in self.drafts:
            with open_catalog_reader(draft.located) as files:
                for lost in find_lost_data(files, draft.located, draft.redundant):
                    raise MappingError(
                        f"`{lost.part.key}` is neither zero nor a copy of another tensor",
                        where=draft.catalog.path,
                        why="the output layout cannot store it",
                        hint=f"convert this checkpoint alone with "
                        f"{format_option('--to-layout')} for details",
                    )


def plan_average(
    sources: Sequence[str | TreePath], dst: str | TreePath, options: AverageOptions
) -> AveragePlan:
    """Plan an average, keeping the format of the last source unless *options* set ``to``.

    Raises:
        MappingError: The sources are not checkpoints of the same model.
    """
    paths = [formats.to_existing_path(source) for source in sources]
    if options.last is not None or options.every is not None:
        paths = _select_from_run(paths, options)
    if len(paths) < 2:
        raise UsageError(
            "an average needs at least two checkpoints",
            where=str(paths[0]) if paths else None,
            hint=f"pass several checkpoints, or a run with {format_option('--last')}",
        )
    places = [make_comparable(path) for path in paths]
    if repeated := [
        str(path) for path, place in zip(paths, places, strict=True) if places.count(place) > 1
    ]:
        raise UsageError("a checkpoint is given twice", where=repeated[0])
    weights = _choose_weights(len(paths), options)
    *others, last = paths
    with families.use_converter_file(options.converter):
        conversion_options = options.with_target_format(
            options.to or require_writable_format(last, options.from_format), weights=None
        )
        steps = select_steps(conversion_options)
        drafts = tuple(plan_tensors(path, dst, conversion_options, steps)[0] for path in others)
        averaging = Averaging(drafts, weights)
        plan = plan_with_steps(
            last, dst, conversion_options, Step("average", "output", 5, averaging.average_into)
        )
    return AveragePlan(
        plan,
        tuple(map(str, paths)),
        weights,
        averaging.averaged,
        averaging.equal,
        tuple(averaging.from_last),
        drafts,
    )


def _select_from_run(paths: Sequence[TreePath], options: AverageOptions) -> list[TreePath]:
    """Return the complete checkpoints of a run that ``--last`` and ``--every`` select, by step.

    Checkpoints of a branch that the run abandoned are not selected.
    """
    if len(paths) != 1:
        raise UsageError(
            f"{format_option('--last')} and {format_option('--every')} apply to one run",
            why=f"{pluralize(len(paths), 'path is', 'paths are')} given",
        )
    run = read_run(paths[0])
    if len(run.series) > 1:
        raise UsageError(
            "the run has several series of checkpoints",
            where=str(paths[0]),
            why=quote_names(run.series),
            hint="pass the checkpoints one by one",
        )
    abandoned = find_abandoned_checkpoints(run.checkpoints)
    selected = [
        checkpoint
        for checkpoint in run.checkpoints
        if checkpoint.is_counted
        and checkpoint.name not in abandoned
        and checkpoint.entry.parsed_name.step % (options.every or 1) == 0
    ]
    if options.last and len(selected) < options.last:
        raise UsageError(
            f"{format_option(f'--last {options.last}')} selects more checkpoints than there are",
            where=str(paths[0]),
            why=f"{pluralize(len(selected), 'checkpoint is', 'checkpoints are')} complete and "
            "match the other options",
            hint=f"run {format_command('ls', paths[0])} to see all checkpoints",
        )
    return [checkpoint.path for checkpoint in selected[-(options.last or 0) :]]


def _choose_weights(count: int, options: AverageOptions) -> tuple[float, ...]:
    if options.weights is not None:
        if len(options.weights) != count:
            raise UsageError(
                f"{pluralize(len(options.weights), 'weight')} for {pluralize(count, 'checkpoint')}",
                where=format_option("--weights"),
            )
        return tuple(options.weights)
    if options.ema is not None:
        return compute_ema_weights(count, options.ema)
    if options.schedule is not None and options.schedule != "linear":
        return compute_schedule_weights(count, options.schedule)
    return (1.0,) * count


class Averaging:
    """Average of the outputs that several drafts plan, which have the same tensors.

    Attributes:
        averaged: Number of tensors that are averaged, set by :meth:`average_into`, as are the next
            two attributes.
        equal: Number of tensors that must be equal.
        from_last: Names of tensors that the last source provides.
    """

    def __init__(self, drafts: Sequence[Draft], weights: Sequence[float]) -> None:
        self._weights = tuple(weights)
        self._others = [
            replace(draft, located=label_virtual_files(draft.located, f"source-{number}/"))
            for number, draft in enumerate(drafts, 1)
        ]
        self.averaged = self.equal = 0
        self.from_last: list[str] = []

    def average_into(self, last: Draft) -> Draft:
        """Replace the output tensors of *last* by averages.

        Raises:
            MappingError: The drafts do not describe the same model.
        """
        for other in self._others:
            last.notes.extend(_compare_models(other, last))
        model_keys = {target.key for item in last.change.tensors for target in item.targets}
        computed = dict(last.located.computed)
        for other in self._others:
            computed |= other.located.computed
        entries, mapped = dict(last.located.tensors), dict(last.mapped)
        for tensor in last.tensors:
            is_float = tensor.dtype in FLOAT_DTYPES
            is_of_model = tensor.name.removeprefix(last.output_root) in model_keys
            if not is_of_model and (not is_float or math.prod(tensor.shape) == 1):
                self.from_last.append(tensor.name)
                continue
            file = build_computed_name(f"{tensor.alias_of or tensor.name}@average")
            mapped[tensor.name] = ComposedTensor.from_unchanged(file, tensor.name, tensor.shape)
            if file in computed:
                continue
            inputs = tuple(
                _build_input(draft, tensor.name, computed) for draft in (*self._others, last)
            )
            kind, arguments = ("average", self._weights) if is_float else ("equal", None)
            self.averaged += is_float
            self.equal += not is_float
            computed[file] = ComputedTensor(kind, tensor.dtype, tensor.shape, inputs, arguments)
            entries[file] = computed[file].to_entry(file, tensor.path, file)
        if self.from_last or last.blobs:
            names = [*self.from_last, *(blob.name for blob in last.blobs)]
            last.notes.add(f"taken from the last checkpoint: {quote_names(names)}")
        located = replace(last.located, tensors=entries, computed=computed)
        return replace(last, located=located, mapped=mapped)


def _build_input(draft: Draft, name: str, computed: dict[str, ComputedTensor]) -> ComputeInput:
    """Return the input for the output tensor *name* of *draft*, in its stored dtype.

    If it is not stored unchanged, it is a virtual file, which is added to *computed*.
    """
    composed, root = draft.mapped[name], draft.located.root
    entry = draft.located.tensors[composed.sources[0].key]
    if composed.is_rename:
        return ComputeInput(root, entry)
    tensor = build_target_tensor(draft.located, composed, entry.dtype, computed)
    file = build_computed_name(f"{root}/{name}@source")
    computed[file] = build_rearranged_file(root, tensor)
    return ComputeInput(root, computed[file].to_entry(name, (name,), file))


def _compare_models(other: Draft, last: Draft) -> Notes:
    """Compare model types, descriptions and tensors of two drafts, and return noted differences.

    Raises:
        MappingError: They are not the same model.
    """
    both = f"{other.catalog.path} and {last.catalog.path}"
    command = format_command("convert", "SRC", "DST", options=("--dequantize", "bf16"))
    require_same_quantization(other.catalog, last.catalog, f"use {command} to dequantize it")
    if other.model.model_type != last.model.model_type:
        raise MappingError(
            "the checkpoints have different model types",
            where=both,
            why=f"{other.model.display_name} and {last.model.display_name}",
        )
    other_tensors, tensors = (
        {tensor.name: tensor for tensor in draft.tensors} for draft in (other, last)
    )
    for draft, missing in (
        (other, tensors.keys() - other_tensors.keys()),
        (last, other_tensors.keys() - tensors.keys()),
    ):
        if missing:
            raise MappingError(
                f"{pluralize(len(missing), 'tensor')} of the other checkpoint "
                f"{'is' if len(missing) == 1 else 'are'} missing",
                where=draft.catalog.path,
                why=quote_names(sorted(missing)),
                hint="check that both are checkpoints of the same model",
            )
    for name, tensor in tensors.items():
        _require_same_tensor(other_tensors[name], tensor, both)
    described = {item.place: item for item in (*other.assets.described, *last.assets.described)}
    notes = compare_statements(
        last.change.family,
        tuple(described.values()),
        trust_assets=last.options.trust_assets,
    )
    other_config, config = (draft.assets.documents.get(CONFIG, {}) for draft in (other, last))
    keys = dict.fromkeys((*other_config, *config))
    if differing := [key for key in keys if other_config.get(key) != config.get(key)]:
        notes.add(
            f"{CONFIG} differs in {quote_names(differing)}: that of the last checkpoint is used"
        )
    return notes


def _require_same_tensor(first: OutputTensor, second: OutputTensor, where: str) -> None:
    """Raise unless two tensors have equal shape, dtype and sharing of memory."""
    name = first.name
    if first.shape != second.shape:
        raise MappingError(
            f"`{name}` has different shapes",
            where=where,
            why=f"{list(first.shape)} and {list(second.shape)}",
        )
    if first.dtype != second.dtype:
        raise MappingError(
            f"`{name}` has different dtypes",
            where=where,
            why=f"{first.dtype} and {second.dtype}",
            hint=f"pass {format_option('--dtype')} to set the dtype of the average",
        )
    if first.alias_of != second.alias_of:
        raise MappingError(
            f"`{name}` shares memory with another tensor in only one of the checkpoints",
            where=where,
            hint=f"pass {format_option('--untie')}",
        )
    if first.dtype not in (*FLOAT_DTYPES, *WHOLE_DTYPES):
        raise MappingError(
            f"cannot average dtype {first.dtype}",
            where=f"tensor `{name}`",
            hint=f"pass {format_option('--dequantize bf16')} if the model is quantized",
        )
