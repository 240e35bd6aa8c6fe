"""The options of a load of all ranks."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Literal

import torch

from ckptctl.distributed.group import ProcessGroup
from ckptctl.errors import UsageError
from ckptctl.ops import options as opt
from ckptctl.ops.loading.options import LoadOptions, Strict
from ckptctl.options import Option

Broadcast = bool | Literal["auto"]


def _broadcast(value: Broadcast) -> Broadcast:
    if value not in (True, False, "auto"):
        raise UsageError("`broadcast` is True, False or 'auto'", why=f"it is {value!r}")
    return value


def _strict(value: Strict) -> Strict:
    if value not in (True, False, "model", "state"):
        raise UsageError("`strict` is True, False, 'model' or 'state'", why=f"it is {value!r}")
    return value


def _device(value: torch.device | str) -> torch.device:
    try:
        device = torch.device(value)
    except (RuntimeError, TypeError) as error:
        raise UsageError(f"{value!r} is no device", why=f"{error}".partition("\n")[0]) from None
    if device.type == "meta":
        raise UsageError("tensors that are loaded cannot be on the meta device")
    return device


@dataclass(frozen=True, kw_only=True)
class LoadCall(LoadOptions):
    """The options of a load of all ranks."""

    converter: opt.Converter = None
    strict: Annotated[
        Strict,
        Option(
            "Whether names that are missing or left over are errors; else the report has them. "
            "``state``: those that are missing alone, so a part may be loaded; ``model``: the "
            "model's alone, so the rest may differ.",
            check=_strict,
        ),
    ] = True
    assign: Annotated[
        bool,
        Option(
            "Whether tensors of the state are replaced by new ones, of the checkpoint's dtypes, as "
            "in ``load_state_dict(assign=True)``; those on the meta device always are, by ones of "
            "their own dtypes."
        ),
    ] = False
    device: Annotated[
        torch.device | str | None,
        Option(
            "Where new tensors are made; None: on the device of their mesh, or of what they "
            "replace; what is on the meta device and in no mesh where the meshes of the state are.",
            check=_device,
        ),
    ] = None
    process_group: ProcessGroup = None
    broadcast: Annotated[
        Broadcast,
        Option(
            "Whether what several ranks want is read by one of them and sent to the others; "
            "``auto``: where they sit on several machines, or storage is slow.",
            check=_broadcast,
        ),
    ] = "auto"
    collectives: Annotated[
        bool, Option("Whether the ranks agree; without, each one loads for itself.")
    ] = True

    def shared(self) -> dict[str, object]:
        """Return the options that have to be the same on all ranks, by name."""
        own = ("jobs", "process_group", "collectives", "device", "rename")
        names = (field.name for field in fields(self) if field.name not in own)
        shared: dict[str, object] = {name: repr(getattr(self, name)) for name in names}
        # A function has no value to compare: what it makes of the names is compared later.
        return shared | {"rename": "None" if self.rename is None else type(self.rename).__name__}
