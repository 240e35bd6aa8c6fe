"""Nothing here can be imported without transformers."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("transformers") else ["test_*.py"]


@pytest.fixture(scope="session")
def saved_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Path, Any]]:
    """Return the function that makes a model of ``TINY`` with random weights.

    It returns the model, its folder and its logits. All tests share them, so these are read only.
    """
    from tests.oracle import hf_models
    from tests.oracle.tiny import TINY

    parent = tmp_path_factory.mktemp("models")

    @cache
    def make(name: str) -> tuple[Any, Path, Any]:
        model = hf_models.random_model(TINY[name]())
        return model, hf_models.save(model, parent / name), hf_models.logits(model)

    return make
