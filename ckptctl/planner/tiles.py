"""Embeddings of the tiles that a picture is cut into: one grid, or a row for each aspect ratio.

Meta's Llama 3.2 Vision keeps a grid of ``[tiles, tiles, ...]``; a picture of ``h x w`` tiles takes
its first h rows and w columns. Transformers keeps these ready made: row r + 1 is what the r-th
ratio needs, in reading order, and zeros after that; row 0 pads. The grid has places that no picture
of so many tiles can have: rows do not hold them, and in a grid made from rows they are zeros. Rows
that disagree about a place have no grid at all.

Sources: transformers' ``convert_mllama_weights_to_hf.py`` (``pre_compute_positional_embedding``)
and ``image_processing_mllama.py`` (``get_all_supported_aspect_ratios``: their order).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from ckptctl.errors import MappingError
from ckptctl.planner.mapping_types import MappedTensor, View, Zeros


class Region(NamedTuple):
    """A part of a stored tensor.

    Attributes:
        key: The tensor.
        origin: Where the part begins.
        sizes: Its extent.
    """

    key: str
    origin: tuple[int, ...]
    sizes: tuple[int, ...]
