"""Options of :func:`ckptctl.load`, with checks of their values."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Literal

import torch

from ckptctl import shared_options as opt
from ckptctl.distributed.group import ProcessGroup
from ckptctl.errors import UsageError
from ckptctl.options import Option
from ckptctl.save_load.loading.load_options import LoadOptions, Strict

Broadcast = bool | Literal["auto"]


def check_broadcast(value: Broadcast) -> Broadcast:
    """Return *value*, or raise if it is not a valid ``broadcast`` option."""
    if value not in (True, False, "auto"):
        raise UsageError("`broadcast` must be True, False or 'auto'", why=f"it is {value!r}")
    return value


def check_strict(value: Strict) -> Strict:
    """Return *value*, or raise if it is not a valid ``strict`` option."""
    if value not in (True, False, "model", "state"):
        raise UsageError("`strict` must be True, False, 'model' or 'state'", why=f"it is {value!r}")
    return value


def check_device(value: torch.device | str) -> torch.device:
    """Convert *value* to a device, or raise if tensors cannot be loaded to that device."""
    try:
        device = torch.device(value)
    except (RuntimeError, TypeError) as error:
        raise UsageError(f"{value!r} is not a device", why=f"{error}".partition("\n")[0]) from None
    if device.type == "meta":
        raise UsageError("loaded tensors cannot be on the meta device")
    return device


@dataclass(frozen=True, kw_only=True)
class LoadCallOptions(LoadOptions):
    """Options of :func:`ckptctl.load`."""

    converter: opt.Converter = None
    strict: Annotated[
        Strict,
        Option(
            "Raise an error for missing and unexpected keys. If False, only the report lists "
            "them. With ``state``, only missing keys are errors, so that a part of the "
            "checkpoint can be loaded. With ``model``, only the model's keys are checked.",
            check=check_strict,
        ),
    ] = True
    assign: Annotated[
        bool,
        Option(
            "Replace tensors of the state by new tensors with the checkpoint's dtypes, "
            "as in ``load_state_dict(assign=True)``. Tensors on the meta device are "
            "always replaced and keep their dtypes."
        ),
    ] = False
    device: Annotated[
        torch.device | str | None,
        Option(
            "Device of new tensors. None uses the device of their mesh or of the tensor that "
            "they replace. A new tensor that replaces one on the meta device without a mesh is "
            "created on the device of the state's meshes.",
            check=check_device,
        ),
    ] = None
    process_group: ProcessGroup = None
    broadcast: Annotated[
        Broadcast,
        Option(
            "Read data that several ranks need on only one rank, and send it to the others. "
            "``auto`` does so if the ranks run on several machines or storage is slow.",
            check=check_broadcast,
        ),
    ] = "auto"
    collectives: Annotated[
        bool, Option("Coordinate the ranks. If False, each rank loads by itself.")
    ] = True

    def collect_shared_options(self) -> dict[str, object]:
        """Return the options that must be equal on all ranks, by name."""
        rank_options = ("jobs", "process_group", "collectives", "device", "rename")
        names = (field.name for field in fields(self) if field.name not in rank_options)
        shared: dict[str, object] = {name: repr(getattr(self, name)) for name in names}
        # Functions cannot be compared, so the renamed keys are compared later.
        return shared | {"rename": "None" if self.rename is None else type(self.rename).__name__}
