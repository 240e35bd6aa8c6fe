"""Skip what needs a trainer that is not installed; nothing here imports one."""

from __future__ import annotations

import importlib.util

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "trainer(package): requires the package of a trainer")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for mark in item.iter_markers("trainer"):
            if importlib.util.find_spec(mark.args[0]) is None:
                item.add_marker(pytest.mark.skip(reason=f"{mark.args[0]} is not installed"))
