"""How virtual files are computed: one module for each kind, found by listing this package.

A kind is a module with a function ``compute`` as :class:`Kind` describes it; its name is that of
the module. Nothing else needs to be told about it. One that does without torch now and then has a
function ``plain``, which takes the virtual file and says so. One whose arithmetic can leave the
range of a dtype has a function ``given``, as
:data:`~ckptctl.storage.computed_inputs.Given` describes it.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    from ckptctl.catalog import Computed
    from ckptctl.storage.computed_inputs import Given, Inputs


class Kind(Protocol):
    """What a module of this package provides."""

    def compute(
        self, inputs: Inputs, computed: Computed, rows: range, columns: range, out: memoryview
    ) -> None:
        """Write a rectangle of a virtual file.

        Args:
            inputs: Reads the tensors that *computed* names.
            computed: The virtual file, seen as a matrix: its last dimension and all others.
            rows: Consecutive rows.
            columns: Consecutive elements of each of them.
            out: Room for exactly those elements, row-major, in the file's dtype.
        """


@cache
def kinds() -> dict[str, Kind]:
    """Return the kinds by name."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    found = ((name, importlib.import_module(f"{__name__}.{name}")) for name in names)
    return {name: cast(Kind, module) for name, module in found}


def given_to(computed: Computed) -> Given | None:
    """Return what knows the source's own elements; None: *computed* does no arithmetic."""
    return cast("Given | None", getattr(kinds()[computed.kind], "given", None))


def needs_torch(computed: Computed) -> bool:
    """Return whether torch computes *computed*."""
    plain = getattr(kinds()[computed.kind], "plain", None)
    return plain is None or not plain(computed)
