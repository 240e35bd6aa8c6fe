"""How virtual files are computed: a :class:`Kind` each, found in the modules of this package.

A module has ``KINDS``, its kinds by name. Nothing else needs to be told about them.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptctl.catalog import Computed
    from ckptctl.storage.computed_inputs import Given, Inputs

    Compute = Callable[[Inputs, Computed, range, range, memoryview], None]


@dataclass(frozen=True, slots=True)
class Kind:
    """How one kind of virtual file is computed.

    Attributes:
        compute: Writes a rectangle of a virtual file. It gets what reads the tensors that the file
            is made of; the file, seen as a matrix: its last dimension and all others; consecutive
            rows; consecutive elements of each of them; and room for exactly those elements,
            row-major, in the file's dtype.
        given: Knows the source's own elements, where the arithmetic can leave the range of a
            dtype; None: it does none.
        plain: Whether a file is computed without torch.
    """

    compute: Compute
    given: Given | None = None
    plain: Callable[[Computed], bool] = lambda _: False


@cache
def kinds() -> dict[str, Kind]:
    """Return the kinds by name."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    modules = (importlib.import_module(f"{__name__}.{name}") for name in names)
    return {name: kind for module in modules for name, kind in module.KINDS.items()}


def given_to(computed: Computed) -> Given | None:
    """Return what knows the source's own elements; None: *computed* does no arithmetic."""
    return kinds()[computed.kind].given


def needs_torch(computed: Computed) -> bool:
    """Return whether torch computes *computed*."""
    return not kinds()[computed.kind].plain(computed)
