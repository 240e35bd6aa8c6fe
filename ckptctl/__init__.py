"""Inspect and convert deep-learning checkpoints: streaming, atomic, bit for bit.

The names below are the public Python API. They are imported when first used, so that
``import ckptctl`` costs nothing and never imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptctl.api import convert as convert
    from ckptctl.api import inspect as inspect
    from ckptctl.api import merge as merge
    from ckptctl.api import plan_conversion as plan_conversion
    from ckptctl.api import plan_merge as plan_merge
    from ckptctl.api import verify as verify
    from ckptctl.catalog import Catalog as Catalog
    from ckptctl.distributed.saving import save as save
    from ckptctl.errors import CkptError as CkptError
    from ckptctl.ops.convert import ConversionPlan as ConversionPlan
    from ckptctl.ops.convert import ConversionResult as ConversionResult
    from ckptctl.ops.inspection import Inspection as Inspection
    from ckptctl.ops.merge import MergePlan as MergePlan
    from ckptctl.ops.verification import Verification as Verification

__version__ = "0.1.0"

_HOME = {
    "Catalog": "ckptctl.catalog",
    "CkptError": "ckptctl.errors",
    "ConversionPlan": "ckptctl.ops.convert",
    "ConversionResult": "ckptctl.ops.convert",
    "Inspection": "ckptctl.ops.inspection",
    "MergePlan": "ckptctl.ops.merge",
    "Verification": "ckptctl.ops.verification",
    "convert": "ckptctl.api",
    "inspect": "ckptctl.api",
    "merge": "ckptctl.api",
    "plan_conversion": "ckptctl.api",
    "plan_merge": "ckptctl.api",
    "save": "ckptctl.distributed.saving",
    "verify": "ckptctl.api",
}

__all__ = [
    "Catalog",
    "CkptError",
    "ConversionPlan",
    "ConversionResult",
    "Inspection",
    "MergePlan",
    "Verification",
    "__version__",
    "convert",
    "inspect",
    "merge",
    "plan_conversion",
    "plan_merge",
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
