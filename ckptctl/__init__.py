"""Inspect and convert deep-learning checkpoints.

The names below are the public Python API. They are imported on first use, so that ``import
ckptctl`` is fast and never imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckptctl.adapters.merging import MergePlan as MergePlan
    from ckptctl.api import delta as delta
    from ckptctl.api.conversion import average as average
    from ckptctl.api.conversion import consolidate as consolidate
    from ckptctl.api.conversion import convert as convert
    from ckptctl.api.conversion import extract_lora as extract_lora
    from ckptctl.api.conversion import merge as merge
    from ckptctl.api.conversion import plan_average as plan_average
    from ckptctl.api.conversion import plan_consolidation as plan_consolidation
    from ckptctl.api.conversion import plan_conversion as plan_conversion
    from ckptctl.api.conversion import plan_merge as plan_merge
    from ckptctl.api.reading import diff as diff
    from ckptctl.api.reading import doctor as doctor
    from ckptctl.api.reading import extract as extract
    from ckptctl.api.reading import inspect as inspect
    from ckptctl.api.reading import map as map
    from ckptctl.api.reading import models as models
    from ckptctl.api.reading import open as open
    from ckptctl.api.reading import report as report
    from ckptctl.api.reading import verify as verify
    from ckptctl.api.runs import convert_run as convert_run
    from ckptctl.api.runs import latest as latest
    from ckptctl.api.runs import ls as ls
    from ckptctl.api.runs import plan_prune as plan_prune
    from ckptctl.api.runs import plan_run_conversion as plan_run_conversion
    from ckptctl.api.runs import prune as prune
    from ckptctl.api.runs import verify_run as verify_run
    from ckptctl.catalog import Catalog as Catalog
    from ckptctl.conversion.convert import ConversionPlan as ConversionPlan
    from ckptctl.conversion.convert import ConversionResult as ConversionResult
    from ckptctl.distributed.background.async_save import AsyncSaver as AsyncSaver
    from ckptctl.distributed.background.async_save import async_save as async_save
    from ckptctl.distributed.background.save_thread import SaveFuture as SaveFuture
    from ckptctl.distributed.loading.load import load as load
    from ckptctl.distributed.run.finals import Finished as Finished
    from ckptctl.distributed.run.manager import CheckpointManager as CheckpointManager
    from ckptctl.distributed.run.manager_options import Resumed as Resumed
    from ckptctl.distributed.saving.save import save as save
    from ckptctl.errors import CkptError as CkptError
    from ckptctl.runs.listing import Newest as Newest
    from ckptctl.runs.listing import RunFolder as RunFolder
    from ckptctl.runs.removal import PrunePlan as PrunePlan
    from ckptctl.runs.removal import PruneResult as PruneResult
    from ckptctl.save_load.loading.load_options import LoadReport as LoadReport
    from ckptctl.verbs.averaging import AveragePlan as AveragePlan
    from ckptctl.verbs.comparison.diff_result import Difference as Difference
    from ckptctl.verbs.consolidate_metadata import MetadataPlan as MetadataPlan
    from ckptctl.verbs.consolidate_metadata import MetadataResult as MetadataResult
    from ckptctl.verbs.doctor import Diagnosis as Diagnosis
    from ckptctl.verbs.extraction.extract import Extraction as Extraction
    from ckptctl.verbs.extraction.lazy import LazyStateDict as LazyStateDict
    from ckptctl.verbs.extraction.lazy import TensorHandle as TensorHandle
    from ckptctl.verbs.inspection.inspect_result import Inspection as Inspection
    from ckptctl.verbs.key_map import KeyMap as KeyMap
    from ckptctl.verbs.lora_extraction.lora_result import LoraExtraction as LoraExtraction
    from ckptctl.verbs.models import Models as Models
    from ckptctl.verbs.report.data import Report as Report
    from ckptctl.verbs.run_conversion_result import RunConversionPlan as RunConversionPlan
    from ckptctl.verbs.run_conversion_result import RunConversionResult as RunConversionResult
    from ckptctl.verbs.run_verification import RunVerification as RunVerification
    from ckptctl.verbs.verification.verify_result import Verification as Verification
    from ckptctl.version import __version__ as __version__

_HOME = {
    "AsyncSaver": "ckptctl.distributed.background.async_save",
    "AveragePlan": "ckptctl.verbs.averaging",
    "Catalog": "ckptctl.catalog",
    "CheckpointManager": "ckptctl.distributed.run.manager",
    "CkptError": "ckptctl.errors",
    "ConversionPlan": "ckptctl.conversion.convert",
    "ConversionResult": "ckptctl.conversion.convert",
    "Diagnosis": "ckptctl.verbs.doctor",
    "Difference": "ckptctl.verbs.comparison.diff_result",
    "Extraction": "ckptctl.verbs.extraction.extract",
    "Finished": "ckptctl.distributed.run.finals",
    "Inspection": "ckptctl.verbs.inspection.inspect_result",
    "KeyMap": "ckptctl.verbs.key_map",
    "LazyStateDict": "ckptctl.verbs.extraction.lazy",
    "LoadReport": "ckptctl.save_load.loading.load_options",
    "LoraExtraction": "ckptctl.verbs.lora_extraction.lora_result",
    "MergePlan": "ckptctl.adapters.merging",
    "MetadataPlan": "ckptctl.verbs.consolidate_metadata",
    "MetadataResult": "ckptctl.verbs.consolidate_metadata",
    "Models": "ckptctl.verbs.models",
    "Newest": "ckptctl.runs.listing",
    "PrunePlan": "ckptctl.runs.removal",
    "PruneResult": "ckptctl.runs.removal",
    "Report": "ckptctl.verbs.report.data",
    "Resumed": "ckptctl.distributed.run.manager_options",
    "RunConversionPlan": "ckptctl.verbs.run_conversion_result",
    "RunConversionResult": "ckptctl.verbs.run_conversion_result",
    "RunFolder": "ckptctl.runs.listing",
    "RunVerification": "ckptctl.verbs.run_verification",
    "SaveFuture": "ckptctl.distributed.background.save_thread",
    "TensorHandle": "ckptctl.verbs.extraction.lazy",
    "Verification": "ckptctl.verbs.verification.verify_result",
    "__version__": "ckptctl.version",
    "async_save": "ckptctl.distributed.background.async_save",
    "average": "ckptctl.api.conversion",
    "consolidate": "ckptctl.api.conversion",
    "convert": "ckptctl.api.conversion",
    "convert_run": "ckptctl.api.runs",
    "diff": "ckptctl.api.reading",
    "doctor": "ckptctl.api.reading",
    "extract": "ckptctl.api.reading",
    "extract_lora": "ckptctl.api.conversion",
    "inspect": "ckptctl.api.reading",
    "latest": "ckptctl.api.runs",
    "load": "ckptctl.distributed.loading.load",
    "ls": "ckptctl.api.runs",
    "map": "ckptctl.api.reading",
    "merge": "ckptctl.api.conversion",
    "models": "ckptctl.api.reading",
    "open": "ckptctl.api.reading",
    "plan_average": "ckptctl.api.conversion",
    "plan_consolidation": "ckptctl.api.conversion",
    "plan_conversion": "ckptctl.api.conversion",
    "plan_merge": "ckptctl.api.conversion",
    "plan_prune": "ckptctl.api.runs",
    "plan_run_conversion": "ckptctl.api.runs",
    "prune": "ckptctl.api.runs",
    "report": "ckptctl.api.reading",
    "save": "ckptctl.distributed.saving.save",
    "verify": "ckptctl.api.reading",
    "verify_run": "ckptctl.api.runs",
}

_MODULES = {"delta": "ckptctl.api.delta"}
"""Modules of the public API, which are imported on first use, too."""

__all__ = [*_HOME]


def __getattr__(name: str) -> object:
    """Import a public name on first use (PEP 562).

    A name that cannot be imported, for example without torch, still exists for ``hasattr`` and
    ``help``. Calling it raises the error.
    """
    if name in _MODULES:
        return _import_module(name)
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = _import_name(name)
    except ImportError as error:
        return _build_placeholder(name, str(error))
    globals()[name] = value
    return value


def _import_name(name: str) -> Any:
    import importlib

    return getattr(importlib.import_module(_HOME[name]), name)


def _import_module(name: str) -> Any:
    import importlib

    return importlib.import_module(_MODULES[name])


def _build_placeholder(name: str, reason: str) -> type:
    """Build a placeholder class for a public name that cannot be imported.

    Calling the placeholder retries the import.
    """

    def new(_: object, *args: object, **options: object) -> object:
        return _import_name(name)(*args, **options)

    namespace = {"__module__": __name__, "__doc__": f"Not available: {reason}.", "__new__": new}
    return type(name, (), namespace)


def __dir__() -> list[str]:
    """Return the public names."""
    return __all__
