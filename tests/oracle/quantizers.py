"""The packages that quantize, which lie in a folder of their own: other packages look for them.

``install_others`` in ``noxfile.py`` puts them there.
"""

from __future__ import annotations

import importlib
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.oracle.shims import stub

FOLDER = Path(sysconfig.get_path("purelib"), "quantizers")
GPTQMODEL = "gptqmodel"


def load(name: str) -> Any:
    """Return a module of one of the packages; the test is skipped where it is not installed."""
    if not (FOLDER / name.partition(".")[0]).is_dir():
        pytest.skip(f"{name} is not installed")
    with _found():
        return importlib.import_module(name)


def gptqmodel(name: str) -> Any:
    """Return a module of GPTQModel, without what its packages import beside it.

    PEFT asks whether it is there, so nothing of it stays behind.
    """
    if not (FOLDER / GPTQMODEL).is_dir():
        pytest.skip("gptqmodel is not installed")
    before = set(sys.modules)
    try:
        stub("pcre", "gptqmodel.utils.logger", "gptqmodel.utils.torch")
        for package in (GPTQMODEL, f"{GPTQMODEL}.utils", f"{GPTQMODEL}.quantization"):
            bare = sys.modules[package] = ModuleType(package)
            bare.__path__ = [str(FOLDER / package.replace(".", "/"))]
        with _found():
            return importlib.import_module(f"{GPTQMODEL}.{name}")
    finally:
        for module in set(sys.modules) - before:
            if module.partition(".")[0] in (GPTQMODEL, "pcre"):
                del sys.modules[module]


@contextmanager
def _found() -> Iterator[None]:
    sys.path.insert(0, str(FOLDER))
    try:
        yield
    finally:
        sys.path.remove(str(FOLDER))
