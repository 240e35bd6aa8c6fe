"""Plug-in API for conversion steps in other packages.

========================  ==========================================================================
the step                  :class:`Step`, which takes a :class:`Draft` and returns a changed one
the source                :class:`Catalog`, :class:`TensorEntry`, :class:`Extent`, :class:`Box`,
                          :class:`Blob`
messages                  :class:`Notes`
errors                    :class:`UsageError` (the options make no sense), :class:`RefusedError`
                          (the result would be wrong), :class:`UnsupportedError`,
                          :class:`MappingError`
========================  ==========================================================================
"""

from __future__ import annotations

from ckptctl.catalog import Blob, Box, Catalog, Extent, TensorEntry
from ckptctl.conversion.draft import Draft
from ckptctl.conversion.steps import Step
from ckptctl.errors import (
    CkptError,
    MappingError,
    RefusedError,
    UnsupportedError,
    UsageError,
)
from ckptctl.notes import Notes

__all__ = [
    "Blob",
    "Box",
    "Catalog",
    "CkptError",
    "Draft",
    "Extent",
    "MappingError",
    "Notes",
    "RefusedError",
    "Step",
    "TensorEntry",
    "UnsupportedError",
    "UsageError",
]
