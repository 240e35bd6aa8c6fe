"""Steps of a conversion, by the place in the pipeline where they run.

Built-in steps are imported when they are carried out, so the pipeline depends on none. Other
packages add steps by entry points ``ckptctl.steps``, which ``--step`` asks for; see
``docs/how-to/add-a-step.md``. They are loaded when planning begins. At ``files``, they must run
after the built-in ones, which set the side files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, get_args

from ckptctl import installed
from ckptctl.conversion.conversion_options import ConversionOptions
from ckptctl.conversion.draft import Draft
from ckptctl.errors import MappingError, listed
from ckptctl.option_checks import STEPS
from ckptctl.units import counted

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

Place = Literal["source", "model", "selection", "layout", "output", "files"]


@dataclass(frozen=True, slots=True)
class Step:
    """A part of a conversion that takes the draft and returns a changed one.

    Attributes:
        name: What it is called.
        place: What it changes: the ``source`` before its model is understood, the ``model`` before
            its tensors are selected, the ``selection`` before it is mapped, the ``layout`` before
            bytes are looked up for it, the ``output`` before it is laid out, or the ``files`` next
            to its tensors.
        order: Steps at one place run by ascending order.
        apply: Carries it out.
        option: Of built-in steps, the option that asks for it, or ``field=value``; empty: it is
            always carried out. Steps of other packages are asked for by ``--step NAME``.
    """

    name: str
    place: Place
    order: int
    apply: Callable[[Draft], Draft]
    option: str = ""

    def __post_init__(self) -> None:
        """Refuse a place that does not exist, where the step would never run."""
        if self.place not in get_args(Place):
            raise ValueError(f"unknown place `{self.place}` (one of: {', '.join(get_args(Place))})")


def _late(place: str) -> Callable[..., Any]:
    """Return a function of a module, which is imported when it is called."""

    def apply(*arguments: object) -> Any:
        module, _, function = place.partition(":")
        return getattr(import_module(f"ckptctl.{module}"), function)(*arguments)

    return apply


BUILT_IN = (
    Step("open-adapter", "source", 10, _late("adapters.adapter_files:open_adapter")),
    Step("experts", "source", 15, _late("adapters.expert_adapters:convert_experts"), "experts"),
    Step("dequantize", "source", 20, _late("numerics.dequantizing:dequantize"), "dequantize"),
    Step("stacks", "model", 10, _late("adapters.expert_adapters:keep_stacks"), "experts=stacked"),
    Step("fill", "model", 20, _late("adapters.filling:fill_from_base"), "fill_from"),
    Step("compare-facts", "selection", 10, _late("facts.config_files:compare_descriptions")),
    Step("keep-scales", "layout", 10, _late("numerics.dequantizing:keep_scales")),
    Step("quantize", "output", 10, _late("numerics.quantizing:quantize"), "quantize"),
    Step("keep-blocks", "output", 20, _late("numerics.dequantizing:keep_blocks")),
    Step("describe-adapter", "output", 30, _late("adapters.adapter_files:describe_adapter")),
    Step("adapter-files", "files", 10, _late("adapters.adapter_files:adapter_files")),
    Step("config-files", "files", 20, _late("facts.config_files:config_files")),
)


@cache
def entry_points() -> dict[str, EntryPoint]:
    """Return the entry points of steps by name; none is loaded."""
    return installed.entry_points(STEPS)


@cache
def load_added(name: str) -> Step:
    """Return the step of the entry point called *name*."""
    return installed.load_entry_point(entry_points()[name], Step)


def steps_for(options: ConversionOptions) -> list[Step]:
    """Return the steps that *options* ask for."""
    steps = []
    for step in BUILT_IN:
        field, _, value = step.option.partition("=")
        given = getattr(options, field) if field else True
        if given == value if value else given:
            steps.append(step)
    return [*steps, *(load_added(one.partition("=")[0]) for one in options.step)]


def apply_steps(steps: Iterable[Step], place: Place, draft: Draft) -> Draft:
    """Carry out those of *steps* that are at *place*, in their order.

    Raises:
        MappingError: A step drops tensors of the output, which no summary would mention.
    """
    for step in sorted(steps, key=lambda step: step.order):
        if step.place == place:
            before, draft = draft, step.apply(draft)
            same = draft.tensors is before.tensors and draft.mapped is before.mapped
            if not same and draft.quantization is before.quantization:
                _compare_inputs(step, before, draft)
    return draft


def _compare_inputs(step: Step, before: Draft, after: Draft) -> None:
    """Refuse to read fewer tensors for the output than before the step."""
    kept = _inputs_of(after)
    dropped = [key for key in _inputs_of(before) if key not in kept]
    if dropped:
        raise MappingError(
            f"step `{step.name}` drops {counted(len(dropped), 'tensor')}",
            where=listed(dropped),
            why="a step at `output` must keep every tensor",
            hint="drop tensors in a step at `model`",
        )


def _inputs_of(draft: Draft) -> dict[str, None]:
    """Return the names in ``draft.located`` of the tensors that are read for the output."""
    written = {tensor.name for tensor in draft.tensors}
    composed = (one for name, one in draft.mapped.items() if name in written)
    return dict.fromkeys(key for one in composed for key in one.keys)
