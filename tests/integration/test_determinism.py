"""The bytes of an output are a function of its input and options, not of threads or memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ckptctl
from ckptctl.conversion.convert import ConversionOptions, plan_conversion
from tests.checkpoints import save_training_dcp, tiny_llama
from tests.checkpoints.golden import Golden
from tests.contract.support import WRITABLE, build, place, snapshot
from tests.sweeps import one_in

STATE, CONFIG = tiny_llama("llama3")
WAYS: dict[str, dict[str, Any]] = {
    "again": {},
    "one-thread": {"jobs": 1},
    "five-threads": {"jobs": 5},
    "sixteen-threads": {"jobs": 16},
    "little-memory": {"jobs": 2, "memory": "128KiB"},
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sources")
    return {name: build(name, folder, STATE, CONFIG) for name in WRITABLE}


@pytest.mark.parametrize("target", WRITABLE)
@pytest.mark.parametrize("name", one_in(7, WRITABLE))
def test_convert_output_is_identical_for_all_options(
    tmp_path: Path, sources: dict[str, Path], name: str, target: str
) -> None:
    shared: dict[str, Any] = {"to": target, "dtype": "fp32" if target == "hf" else None}
    if not sources[name].is_dir() and target != "torch":
        shared["assets"] = sources["hf"]
    found = {}
    for way, options in WAYS.items():
        (tmp_path / way).mkdir()
        path = place(tmp_path / way, target)
        ckptctl.convert(sources[name], path, **shared, **options)
        found[way] = snapshot(path)
    assert all(other == found["again"] for other in found.values()), target
    assert len(found["again"]) >= (1 if target == "torch" else 5)


@pytest.mark.parametrize("target", ["dcp", "torch"])
def test_training_state_output_is_deterministic(tmp_path: Path, target: str) -> None:
    source = save_training_dcp(tmp_path / "source", STATE)
    found = []
    for way in ("first", "second"):
        (tmp_path / way).mkdir()
        path = place(tmp_path / way, target)
        ckptctl.convert(source, path, to=target, only="all")
        found.append(snapshot(path))
    assert found[0] == found[1]


def test_output_is_independent_of_path_and_environment(
    tmp_path: Path, sources: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither absolute paths nor the user, the machine or the time are in an output."""
    import shutil

    moved = tmp_path / "elsewhere" / sources["hf"].name
    shutil.copytree(sources["hf"], moved, copy_function=shutil.copyfile)
    for target in WRITABLE:
        (tmp_path / target).mkdir()
        first, second = place(tmp_path, target, "a"), place(tmp_path / target, target, "a")
        ckptctl.convert(sources["hf"], first, to=target)
        monkeypatch.setenv("HOSTNAME", "other")
        monkeypatch.setenv("USER", "other")
        monkeypatch.setenv("PYTHONHASHSEED", "7")
        monkeypatch.chdir(moved.parent)
        ckptctl.convert(moved.name, second, to=target)
        assert snapshot(first) == snapshot(second)
        first.unlink() if first.is_file() else shutil.rmtree(first)


def test_plan_digest_of_computed_chunks_is_deterministic(tmp_path: Path) -> None:
    """Norms less 1, as Megatron-Core has them: of tensors that lie in items of their own."""
    ckptctl.convert(Golden.read("qwen3_next").save(tmp_path / "hf"), tmp_path / "dcp", to="dcp")
    options = ConversionOptions(to="mcore")
    one, other = (plan_conversion(tmp_path / "dcp", tmp_path / "out", options) for _ in range(2))
    assert one.plan.computed
    assert one.plan.digest == other.plan.digest
