"""The process that builds a class of transformers may fail in any way: the verdict is unknown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ckptctl.conversion.recognition.references import ReferenceResult
from ckptctl.references import transformers

CONFIG = {"model_type": "foo", "architectures": ["FooModel"]}
ANSWER = {"version": "5.0", "class": "FooModel", "missing": ["a"], "more": 0, "unexpected": ["b"]}
SHAPES = {"b": (2,), "c": (3, 4), "d": None}


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install a package with the tables of transformers, and nothing else."""
    folder = tmp_path / "site" / "transformers"
    (folder / "models" / "auto").mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "models" / "auto" / "modeling_auto.py").write_text('{"foo": "FooModel"}')
    monkeypatch.syspath_prepend(folder.parent)
    monkeypatch.delitem(__import__("sys").modules, "transformers", raising=False)
    return folder


def use_process(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "process.py"
    file.write_text(code)
    monkeypatch.setattr(transformers, "PROCESS_FILE", file)


def test_answer_of_process_becomes_result(
    tables: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = {**ANSWER, "unmapped": 1, "shapes": [["c", [3, 4], [3, 5]]]}
    code = f"import json, sys; json.load(sys.stdin); print({json.dumps(answer)!r})"
    use_process(code, tmp_path, monkeypatch)
    result = transformers.compare_with_transformers(CONFIG, SHAPES)
    assert (result.source, result.failure) == ("transformers 5.0 `FooModel`", "")
    assert (result.missing_names, result.unexpected_names) == (("a",), ("b",))
    assert result.shapes == {"c": "the shape is (3, 4), but transformers 5.0 `FooModel` has (3, 5)"}


def test_names_of_another_model_are_unknown(
    tables: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = json.dumps({**ANSWER, "unmapped": 2, "shapes": []})
    use_process(f"print({answer!r})", tmp_path, monkeypatch)
    result = transformers.compare_with_transformers(CONFIG, SHAPES)
    assert result.failure == "2 of 3 names do not belong to transformers 5.0 `FooModel`"
    assert not result.source


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import sys; sys.exit(3)", "failed with exit code 3"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGXCPU)", "took too long"),
        ("import time; time.sleep(60)", "took more than 0.1 seconds"),
        ("print('{')", "building the model failed: "),
        ("print('[]')", "building the model failed"),
    ],
)
def test_failing_process_is_unknown(
    code: str, reason: str, tables: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_process(code, tmp_path, monkeypatch)
    if "sleep" in code:
        monkeypatch.setattr(transformers, "MAX_SECONDS", 0.1)
    result = transformers.compare_with_transformers(CONFIG, SHAPES)
    assert reason in result.failure
    assert not result.source


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"model_type": "foo"},
        {"model_type": "bar", "architectures": ["FooModel"]},
        {"model_type": "foo", "architectures": ["EvilModel"]},
        {"model_type": "foo", "architectures": ["FooModel", "FooModel"]},
        {"model_type": "foo", "architectures": "FooModel"},
        {"model_type": ["foo"], "architectures": [{}]},
    ],
)
def test_class_that_tables_do_not_have_starts_no_process(
    config: dict[str, Any], tables: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_process("open('started', 'w')", tmp_path, monkeypatch)
    monkeypatch.chdir(tmp_path)
    assert transformers.compare_with_transformers(config, SHAPES) == ReferenceResult()
    assert not (tmp_path / "started").exists()


def test_file_of_working_directory_is_not_imported(
    tables: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil.py").touch()
    code = "import importlib.util, sys; sys.exit(7 if importlib.util.find_spec('evil') else 3)"
    use_process(code, tmp_path, monkeypatch)
    result = transformers.compare_with_transformers(CONFIG, SHAPES)
    assert "exit code 3" in result.failure
