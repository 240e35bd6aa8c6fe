"""What a manager is told that makes no sense is refused before training, in Python's words."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptctl
from ckptctl.errors import UsageError


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"copy_every": 5, "copy_rate": 9},
            "`copy_every`, `copy_rate` do not apply without `fast`",
        ),
        ({"fast_keep": 3}, "`fast_keep` does not apply without `fast`"),
        ({"async_": False, "mode": "process"}, "`mode` does not apply with `async_=False`"),
        ({"async_": False, "when_busy": "skip"}, "`when_busy` does not apply with `async_=False`"),
        ({"make_room": "before"}, "requires a keep rule"),
        ({"make_room": "before", "keep_last": 0}, "requires a keep rule"),
        ({"fast": ""}, "empty"),
        ({"on_published": ["upload"]}, "neither a function"),
        ({"on_published": 3}, "neither a function"),
        ({"save_interval": -1}, "not a non-negative number of seconds"),
        ({"keep_within": float("nan")}, "not a non-negative number of seconds"),
    ],
)
def test_inapplicable_or_invalid_options_are_usage_errors(
    tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        ckptctl.CheckpointManager(tmp_path, **options)


def test_default_option_values_are_accepted(tmp_path: Path) -> None:
    with ckptctl.CheckpointManager(tmp_path, async_=False, mode="thread", fast_keep=2) as manager:
        manager.save(1, {"a": 1})


@pytest.mark.parametrize("root", ["", None, 3])
def test_invalid_root_is_a_usage_error(
    root: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as caught:
        ckptctl.CheckpointManager(root)
    assert caught.value.where == "root"


def test_file_in_place_of_folder_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for root, fast in (("file", None), ("run", tmp_path / "file")):
        with pytest.raises(UsageError, match="found a file"):
            ckptctl.CheckpointManager(tmp_path / root, fast=fast)


def test_keep_if_error_is_reported_on_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def good(checkpoint: Any) -> bool:
        return bool(checkpoint.metrics["loss"] < 1)

    with ckptctl.CheckpointManager(tmp_path, async_=False, sync=False, keep_if=good) as manager:
        manager.save(1, {"w": torch.ones(2)})
    assert "KeyError: 'loss'" in capsys.readouterr().err


def test_common_options_come_first_in_signature() -> None:
    first = list(inspect.signature(ckptctl.CheckpointManager).parameters)
    assert first.index("save_every") < first.index("keep_last") < first.index("preemption")
