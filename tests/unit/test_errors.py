"""What errors say to do: the nearest name, commands that run as printed."""

from __future__ import annotations

import pickle
import shlex

import pytest

from ckptctl.errors import (
    ChangedError,
    CkptError,
    UnmappedTensorError,
    find_nearest,
    format_command,
)


@pytest.mark.parametrize(
    "error",
    [
        ChangedError("/run/step-1", "a.distcp", "it is gone"),
        UnmappedTensorError("no such tensor", where="m", keys=("a", "b")),
        CkptError("interrupted"),
    ],
)
def test_errors_survive_pickling(error: CkptError) -> None:
    error.exit_code = 77
    told = pickle.loads(pickle.dumps(error))
    assert (type(told), str(told), told.args) == (type(error), str(error), error.args)
    assert told.__dict__ == error.__dict__


def test_error_text_follows_changed_message() -> None:
    error = CkptError("unknown model type")
    error.what = "the checkpoint is quantized"
    assert str(error) == "the checkpoint is quantized"


@pytest.mark.parametrize(
    ("name", "known", "found"),
    [
        ("torchtun", ["torchtune", "torchtitan"], "torchtune"),
        ("orchtune", ["torchtune"], "torchtune"),
        ("meat", ["meta"], "meta"),
        ("nope", ["openai"], None),
        ("run", ["prune"], None),
        ("x", ["y"], None),
    ],
)
def test_nearest_suggests_only_close_names(name: str, known: list[str], found: str | None) -> None:
    assert find_nearest(name, known) == found


@pytest.mark.parametrize("path", ["run", "-dash", "a b", "it's"])
def test_printed_command_quotes_its_paths(path: str) -> None:
    words = shlex.split(format_command("convert", path, "DST", options=("--to", "hf")).strip("`"))
    plain = ["ckptctl", "convert", path, "DST", "--to", "hf"]
    guarded = ["ckptctl", "convert", "--to", "hf", "--", path, "DST"]
    assert words == (guarded if path == "-dash" else plain)
