"""Optional steps of a conversion, which run at fixed places in the planning pipeline.

Built-in steps are imported when they run, so the pipeline does not depend on them. Other packages
add steps with entry points in the group ``ckptctl.steps``, and ``--step`` selects them; see
``docs/how-to/add-a-step.md``. Steps of packages are loaded when planning begins. At ``files``, they
must run after the built-in steps, which set the sidecar files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, get_args

from ckptctl import installed
from ckptctl.catalog import find_reachable_files, is_computed
from ckptctl.columns import get_extent_files
from ckptctl.conversion.conversion_options import ConversionOptions
from ckptctl.conversion.draft import Draft
from ckptctl.errors import MappingError, quote_names
from ckptctl.option_checks import STEP_GROUP
from ckptctl.units import pluralize

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

Place = Literal["source", "model", "selection", "layout", "output", "files"]


@dataclass(frozen=True, slots=True)
class Step:
    """Step of a conversion that changes the draft at a fixed place in the pipeline.

    Attributes:
        name: Name of the step.
        place: Part of the draft that the step changes: the ``source`` before its model is
            recognized, the ``model`` before its tensors are selected, the ``selection`` before it
            is mapped, the ``layout`` before bytes are located, the ``output`` before it is laid
            out, or the ``files`` next to its tensors.
        order: Sort key; steps at the same place run in ascending order.
        apply: Function that takes a draft and returns a changed copy.
        option: Option that selects a built-in step, or ``field=value``; empty if the step always
            runs. Steps of other packages are selected by ``--step NAME``.
    """

    name: str
    place: Place
    order: int
    apply: Callable[[Draft], Draft]
    option: str = ""

    def __post_init__(self) -> None:
        """Raise if *place* is unknown, because the step would never run."""
        if self.place not in get_args(Place):
            raise ValueError(f"unknown place `{self.place}` (one of: {', '.join(get_args(Place))})")


def _defer_import(target: str) -> Callable[..., Any]:
    """Return a wrapper that imports the function at *target* on the first call, and calls it."""

    def call_function(*arguments: object) -> Any:
        module, _, function = target.partition(":")
        return getattr(import_module(f"ckptctl.{module}"), function)(*arguments)

    return call_function


BUILT_IN = (
    Step("open-adapter", "source", 10, _defer_import("adapters.adapter_files:open_adapter")),
    Step(
        "experts",
        "source",
        15,
        _defer_import("adapters.expert_adapters:convert_experts"),
        "experts",
    ),
    Step(
        "dequantize", "source", 20, _defer_import("numerics.dequantizing:dequantize"), "dequantize"
    ),
    Step(
        "read-packed", "source", 20, _defer_import("numerics.repacking:prepare_repacking"), "repack"
    ),
    Step(
        "stacks",
        "model",
        10,
        _defer_import("adapters.expert_adapters:drop_model_type"),
        "experts=stacked",
    ),
    Step("experts-apart", "model", 10, _defer_import("numerics.repacking:choose_layout"), "repack"),
    Step("keep-layout", "model", 15, _defer_import("numerics.dequantizing:keep_separate_experts")),
    Step("fill", "model", 20, _defer_import("adapters.filling:fill_from_base"), "fill_from"),
    Step(
        "compare-facts", "selection", 10, _defer_import("facts.config_files:compare_descriptions")
    ),
    Step("keep-scales", "layout", 10, _defer_import("numerics.dequantizing:check_scales_kept")),
    Step("quantize", "output", 10, _defer_import("numerics.quantizing:quantize"), "quantize"),
    Step("repack", "output", 10, _defer_import("numerics.repacking:repack"), "repack"),
    Step("keep-blocks", "output", 20, _defer_import("numerics.dequantizing:check_blocks_intact")),
    Step(
        "describe-adapter", "output", 30, _defer_import("adapters.adapter_files:describe_adapter")
    ),
    Step("adapter-files", "files", 10, _defer_import("adapters.adapter_files:plan_adapter_files")),
    Step("config-files", "files", 20, _defer_import("facts.config_files:plan_config_files")),
)


@cache
def find_step_entry_points() -> dict[str, EntryPoint]:
    """Return the entry points that installed packages define for steps, by name, unloaded."""
    return installed.find_entry_points(STEP_GROUP)


@cache
def load_added_step(name: str) -> Step:
    """Load the step of the entry point called *name*."""
    return installed.load_entry_point(find_step_entry_points()[name], Step)


def select_steps(options: ConversionOptions) -> list[Step]:
    """Return the built-in and added steps that *options* select."""
    steps = []
    for step in BUILT_IN:
        field, _, value = step.option.partition("=")
        current = getattr(options, field) if field else True
        if current == value if value else current:
            steps.append(step)
    return [*steps, *(load_added_step(text.partition("=")[0]) for text in options.step)]


def apply_steps(steps: Iterable[Step], place: Place, draft: Draft) -> Draft:
    """Apply the steps at *place*, in ascending order.

    Raises:
        MappingError: A step drops output tensors, which the summary would not report as dropped.
    """
    for step in sorted(steps, key=lambda step: step.order):
        if step.place == place:
            previous, draft = draft, step.apply(draft)
            is_unchanged = draft.tensors is previous.tensors and draft.mapped is previous.mapped
            if not is_unchanged and draft.quantization is previous.quantization:
                inputs = _collect_input_names(draft)
                if dropped := [key for key in _collect_input_names(previous) if key not in inputs]:
                    raise MappingError(
                        f"step `{step.name}` drops {pluralize(len(dropped), 'tensor')}",
                        where=quote_names(dropped),
                        why="a step at `output` must keep every tensor",
                        hint="drop tensors in a step at `model`",
                    )
    return draft


def _collect_input_names(draft: Draft) -> dict[str, None]:
    """Collect the names of all tensors that output tensors read, also through virtual files."""
    written = {tensor.name for tensor in draft.tensors}
    composed = (item for name, item in draft.mapped.items() if name in written)
    names = dict.fromkeys(key for item in composed for key in item.keys)
    files = (
        file
        for name in names
        for file in get_extent_files(draft.located.tensors[name].extents)
        if is_computed(file)
    )
    virtual_files = find_reachable_files(draft.located.computed, files)
    read = (item.entry.name for virtual in virtual_files.values() for item in virtual.inputs)
    return names | dict.fromkeys(read)
