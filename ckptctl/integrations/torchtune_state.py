"""What torchtune's recipes hand over, as checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchtune import training
from torchtune.training.checkpointing import ModelType

from ckptctl import families
from ckptctl.distributed.run_keeper import SERIES
from ckptctl.distributed.saving.final import save_converted
from ckptctl.errors import SourceNotFoundError, UsageError
from ckptctl.integrations.alone import own_group
from ckptctl.integrations.whole import whole, with_numbers
from ckptctl.ops.conversion.options import ConversionOptions
from ckptctl.ops.runs.entries import is_run
from ckptctl.ops.runs.listing import read_run
from ckptctl.planner.mapping.adapters import SUFFIX

LAYOUT = "torchtune"
RECIPE = "recipe"
TENSORS = (training.MODEL_KEY, training.ADAPTER_KEY, training.OPT_KEY)


def family(model_type: str) -> str:
    """Return what a model type of torchtune is called here.

    Raises:
        UsageError: torchtune has no such model type, or it is not known here.
    """
    if model_type not in ModelType.__members__:
        raise UsageError(
            f"torchtune has no model type {model_type!r}",
            hint=f"it has {', '.join(ModelType.__members__)}",
        )
    return families.family(str(ModelType[model_type].value)).name


def intermediate(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is saved: tensors under torchtune's keys, the rest as one leaf."""
    left_out = {training.MODEL_KEY} if training.ADAPTER_KEY in state else set()
    kept = {key: state[key] for key in TENSORS if key in state and key not in left_out}
    rest = {key: one for key, one in state.items() if key not in TENSORS}
    # A tuple is a leaf to DCP: what is in it keeps its keys and its empty containers.
    return {**kept, RECIPE: (rest,)}


def newest_state(run: Path) -> dict[str, Any]:
    """Return what the newest complete checkpoint of a run holds, under torchtune's keys.

    Raises:
        SourceNotFoundError: None is complete.
    """
    known = read_run(run, series=SERIES).checkpoints if is_run(run) else ()
    complete = [one.entry.path for one in known if one.counts]
    if not complete:
        raise SourceNotFoundError("there is nothing to go on from", where=str(run))
    found: dict[str, Any] = with_numbers(whole(complete[-1], process_group=own_group()))
    return {**found.pop(RECIPE)[0], **found}


def save_adapter(state: Mapping[str, Any], out: Path, model_type: str, assets: Path) -> None:
    """Save the adapter in *state* as PEFT has it.

    Args:
        state: Under torchtune's keys.
        out: Where it will appear.
        model_type: The family of the model that it is for.
        assets: That model's directory.

    Raises:
        CkptError: Nothing was published.
    """
    alpha = state.get(training.ADAPTER_CONFIG, {}).get("lora_alpha")
    how = ConversionOptions(
        to="peft", model_type=model_type + SUFFIX, lora_alpha=alpha, assets=assets
    )
    save_converted(dict(state[training.ADAPTER_KEY]), out, how, own_group())
