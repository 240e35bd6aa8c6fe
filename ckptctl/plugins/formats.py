"""Plug-in API for formats in other packages, to read and write checkpoints.

========================  ==========================================================================
the format                :class:`Format`, :class:`WritableFormat`, :class:`Listing`
reading                   :class:`ReadOptions`, :class:`TreePath` (a local path or a URL),
                          :func:`source_files`, :func:`read_json`,
                          :func:`read_archive` (files of ``torch.save``, runs no code),
                          :func:`scan_sidecar_files` (sidecar files next to the weights)
contents                  :class:`Catalog`, :class:`TensorEntry`, :class:`Extent`, :class:`Box`,
                          :class:`Checksum`, :class:`Blob`, :class:`Finding`, :data:`DTYPES`,
                          :class:`RecordedFacts` (about the model, in the trainer's terms)
writing                   :class:`OutputRequest`, :class:`OutputTensor`, :class:`OutputLayout`,
                          :class:`OutputFile`, :class:`Record`, :class:`TensorPlace`,
                          :class:`RawCopy`, :func:`make_constant_frame`,
                          :func:`make_content_file`, :func:`make_copied_file`
                          :class:`Notes` (messages to the user, and items the output omits)
errors                    :class:`DamagedError` needs evidence; unknown or unsupported content
                          raises :class:`UnsupportedError`
========================  ==========================================================================
"""

from __future__ import annotations

from ckptctl.catalog import Blob, Box, Catalog, Checksum, Extent, Finding, TensorEntry
from ckptctl.dtypes import BY_NAME as DTYPES
from ckptctl.errors import (
    CkptError,
    DamagedError,
    RefusedError,
    SourceNotFoundError,
    UnsupportedError,
)
from ckptctl.formats.base import (
    DEFAULT_READ_OPTIONS,
    Format,
    Listing,
    OutputLayout,
    OutputRequest,
    OutputTensor,
    ReadOptions,
    RecordedFacts,
    TensorPlace,
    Weights,
    WritableFormat,
    make_constant_frame,
    make_content_file,
    make_copied_file,
)
from ckptctl.formats.sidecar_files import scan_sidecar_files
from ckptctl.notes import Notes
from ckptctl.planner.layouts import Family
from ckptctl.planner.model_parallel import RankShard
from ckptctl.planner.plan import CrcLookup, Frame, OutputFile, RawCopy, Record
from ckptctl.storage.files import SourceFiles, source_files
from ckptctl.storage.json_reader import read_json
from ckptctl.storage.zips.zip_reader import read_archive
from ckptctl.tree import TreePath

__all__ = [
    "DEFAULT_READ_OPTIONS",
    "DTYPES",
    "Blob",
    "Box",
    "Catalog",
    "Checksum",
    "CkptError",
    "CrcLookup",
    "DamagedError",
    "Extent",
    "Family",
    "Finding",
    "Format",
    "Frame",
    "Listing",
    "Notes",
    "OutputFile",
    "OutputLayout",
    "OutputRequest",
    "OutputTensor",
    "RankShard",
    "RawCopy",
    "ReadOptions",
    "Record",
    "RecordedFacts",
    "RefusedError",
    "SourceFiles",
    "SourceNotFoundError",
    "TensorEntry",
    "TensorPlace",
    "TreePath",
    "UnsupportedError",
    "Weights",
    "WritableFormat",
    "make_constant_frame",
    "make_content_file",
    "make_copied_file",
    "read_archive",
    "read_json",
    "scan_sidecar_files",
    "source_files",
]
