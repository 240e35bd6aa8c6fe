"""Saving, loading and managing checkpoints in training.

Everything here imports torch. The command line imports only :mod:`~ckptctl.distributed.group`, and
only under torchrun. The public names below are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptctl.installed import require_torch

if TYPE_CHECKING:
    from ckptctl.distributed.dcp.load_planner import LoadPlanner as LoadPlanner
    from ckptctl.distributed.dcp.save_planner import SavePlanner as SavePlanner
    from ckptctl.distributed.dcp.storage_reader import Reader as Reader
    from ckptctl.distributed.dcp.storage_writer import Writer as Writer

_HOME = {
    "LoadPlanner": "ckptctl.distributed.dcp.load_planner",
    "Reader": "ckptctl.distributed.dcp.storage_reader",
    "SavePlanner": "ckptctl.distributed.dcp.save_planner",
    "Writer": "ckptctl.distributed.dcp.storage_writer",
}

__all__ = ["LoadPlanner", "Reader", "SavePlanner", "Writer"]

require_torch("saving and loading in training")


def __getattr__(name: str) -> object:
    """Import a public name on first use (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value: object = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names."""
    return __all__
