"""Inspect and convert deep-learning checkpoints: streaming, atomic, bit for bit.

The names below are the public Python API. They are imported when first used, so that
``import ckptctl`` costs nothing and never imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptctl.api import convert as convert
    from ckptctl.api import diff as diff
    from ckptctl.api import extract as extract
    from ckptctl.api import inspect as inspect
    from ckptctl.api import merge as merge
    from ckptctl.api import plan_conversion as plan_conversion
    from ckptctl.api import plan_merge as plan_merge
    from ckptctl.api import report as report
    from ckptctl.api import verify as verify
    from ckptctl.catalog import Catalog as Catalog
    from ckptctl.distributed.background.async_save import AsyncSaver as AsyncSaver
    from ckptctl.distributed.background.async_save import async_save as async_save
    from ckptctl.distributed.background.save_thread import SaveFuture as SaveFuture
    from ckptctl.distributed.loading.load import load as load
    from ckptctl.distributed.run.manager import CheckpointManager as CheckpointManager
    from ckptctl.distributed.run.options import Resumed as Resumed
    from ckptctl.distributed.saving.save import save as save
    from ckptctl.errors import CkptError as CkptError
    from ckptctl.ops.comparison.result import Difference as Difference
    from ckptctl.ops.conversion.convert import ConversionPlan as ConversionPlan
    from ckptctl.ops.conversion.convert import ConversionResult as ConversionResult
    from ckptctl.ops.extraction.extract import Extraction as Extraction
    from ckptctl.ops.inspection.result import Inspection as Inspection
    from ckptctl.ops.loading.options import LoadReport as LoadReport
    from ckptctl.ops.merging import MergePlan as MergePlan
    from ckptctl.ops.report.data import Report as Report
    from ckptctl.ops.verification.result import Verification as Verification

__version__ = "0.1.0"

_HOME = {
    "AsyncSaver": "ckptctl.distributed.background.async_save",
    "Catalog": "ckptctl.catalog",
    "CheckpointManager": "ckptctl.distributed.run.manager",
    "CkptError": "ckptctl.errors",
    "ConversionPlan": "ckptctl.ops.conversion.convert",
    "ConversionResult": "ckptctl.ops.conversion.convert",
    "Difference": "ckptctl.ops.comparison.result",
    "Extraction": "ckptctl.ops.extraction.extract",
    "Inspection": "ckptctl.ops.inspection.result",
    "LoadReport": "ckptctl.ops.loading.options",
    "MergePlan": "ckptctl.ops.merging",
    "Report": "ckptctl.ops.report.data",
    "Resumed": "ckptctl.distributed.run.options",
    "SaveFuture": "ckptctl.distributed.background.save_thread",
    "Verification": "ckptctl.ops.verification.result",
    "async_save": "ckptctl.distributed.background.async_save",
    "convert": "ckptctl.api",
    "diff": "ckptctl.api",
    "extract": "ckptctl.api",
    "inspect": "ckptctl.api",
    "load": "ckptctl.distributed.loading.load",
    "merge": "ckptctl.api",
    "plan_conversion": "ckptctl.api",
    "plan_merge": "ckptctl.api",
    "report": "ckptctl.api",
    "save": "ckptctl.distributed.saving.save",
    "verify": "ckptctl.api",
}

__all__ = [
    "AsyncSaver",
    "Catalog",
    "CheckpointManager",
    "CkptError",
    "ConversionPlan",
    "ConversionResult",
    "Difference",
    "Extraction",
    "Inspection",
    "LoadReport",
    "MergePlan",
    "Report",
    "Resumed",
    "SaveFuture",
    "Verification",
    "__version__",
    "async_save",
    "convert",
    "diff",
    "extract",
    "inspect",
    "load",
    "merge",
    "plan_conversion",
    "plan_merge",
    "report",
    "save",
    "verify",
]


def __getattr__(name: str) -> object:
    """Import a public name on first use (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value: object = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names."""
    return __all__
