from dataclasses import replace

import pytest
import torch

from ckptctl import formats
from ckptctl.errors import DamagedError, FormatError, SourceNotFoundError, UsageError
from ckptctl.verbs.inspection.inspect import inspect_checkpoint, select_tensors
from ckptctl.verbs.inspection.inspect_options import InspectOptions
from ckptctl.verdict import UNKNOWN_MODEL
from tests.fakes import DATA, FakeFormat


@pytest.fixture
def fake(monkeypatch):
    fake = FakeFormat()
    monkeypatch.setattr(formats, "load_builtin_formats", lambda: {"fake": fake})
    return fake


def some():
    return {
        "w": torch.arange(12, dtype=torch.float32).reshape(3, 4),
        "h": torch.ones(5, dtype=torch.bfloat16),
        "optimizer.state.w.exp_avg": torch.zeros(3, 4),
    }


def test_inspect_reports_sizes_dtypes_and_tensors(fake, tmp_path):
    fake.save(tmp_path / "c", some(), aliases={"tied": "w"}, blobs=["optimizer.step"])
    found = inspect_checkpoint(tmp_path / "c")
    assert (found.format, found.verdict, found.complete, found.model_type) == (
        "fake",
        "complete",
        None,
        None,
    )
    assert (found.scope, found.notes) == ("structure", (UNKNOWN_MODEL,))
    assert found.nbytes == 48 + 10 + 48
    assert found.parameters == 12 + 5
    assert {n: (u.tensors, u.elements, u.nbytes) for n, u in found.dtypes.items()} == {
        "float32": (3, 24, 96),
        "bfloat16": (1, 5, 10),
    }
    assert list(found.dtypes) == ["float32", "bfloat16"]
    assert [(t.name, t.chunks, t.alias_of) for t in found.tensors][-1] == ("tied", 1, "w")
    assert found.blobs == ("optimizer.step",)
    assert found.files == {DATA: 106}


def test_inspect_json_is_plain_data(fake, tmp_path):
    import json

    fake.save(tmp_path / "c", some())
    body = json.loads(
        json.dumps(
            inspect_checkpoint(tmp_path / "c", InspectOptions(stats=True)).to_json(),
            allow_nan=False,
        )
    )
    assert body["tensors"][0] == {
        "name": "w",
        "dtype": "float32",
        "shape": [3, 4],
        "bytes": 48,
        "chunks": 1,
        "alias_of": None,
        "unsupported": None,
        "stats": {
            "count": 12,
            "nan": 0,
            "inf": 0,
            "min": 0.0,
            "max": 11.0,
            "mean": 5.5,
            "std": pytest.approx(3.4520525),
            "histogram": [2, 1, 1, 1, 1, 1, 1, 1, 1, 2],
        },
    }
    assert (body["verdict"], body["complete"], body["scope"]) == ("complete", None, "structure")


def test_inspect_describes_missing_elements_and_truncated_file(fake, tmp_path):
    catalog = fake.save(tmp_path / "c", some())
    broken = replace(catalog.tensors["w"], shape=(4, 4))
    fake.known[tmp_path / "c"] = replace(
        catalog, tensors={**catalog.tensors, "w": broken}, files={DATA: 100}
    )
    found = inspect_checkpoint(tmp_path / "c")
    assert found.verdict == "damaged" and found.complete is False
    hole, short = found.problems
    assert hole == (
        "elements are missing: `w` [3:4, 0:4] "
        "(no chunk covers this part of the tensor, which has shape [4, 4])"
    )
    assert short.startswith("a data file is truncated: ") and DATA in short
    assert len(found.tensors) == 3


def test_missing_file_is_a_problem(fake, tmp_path):
    catalog = fake.save(tmp_path / "c", some())
    fake.known[tmp_path / "c"] = replace(catalog, files={})
    assert inspect_checkpoint(tmp_path / "c").problems == (
        f"a data file is missing: `optimizer.state.w.exp_avg`, {DATA}",
    )


def test_checkpoint_without_tensors_is_a_problem(fake, tmp_path):
    fake.save(tmp_path / "c", {})
    assert inspect_checkpoint(tmp_path / "c").problems == ("the checkpoint contains no tensors",)


def test_run_folder_lists_members(fake, tmp_path):
    for step in (10, 2):
        fake.save(tmp_path / f"step-{step}", some())
    (tmp_path / "step-30").mkdir()
    (tmp_path / "step-30" / DATA).write_bytes(b"")
    found = inspect_checkpoint(tmp_path)
    assert found.format == "run"
    assert [(m.path, m.format, m.verdict) for m in found.checkpoints] == [
        (str(tmp_path / "step-2"), "fake", "complete"),
        (str(tmp_path / "step-10"), "fake", "complete"),
        (str(tmp_path / "step-30"), "fake", "damaged"),
    ]
    assert found.checkpoints[0].nbytes == 106
    for asked in (InspectOptions(stats=True), InspectOptions(include=["w"])):
        with pytest.raises(UsageError, match="requires one checkpoint"):
            inspect_checkpoint(tmp_path, asked)
    assert found.run and [one.step for one in found.run.checkpoints] == [2, 10, 30]


def test_missing_empty_or_damaged_path_is_an_error(fake, tmp_path):
    with pytest.raises(SourceNotFoundError):
        inspect_checkpoint(tmp_path / "nope")
    with pytest.raises(FormatError):
        inspect_checkpoint(tmp_path)
    (tmp_path / DATA).write_bytes(b"")
    with pytest.raises(DamagedError):
        inspect_checkpoint(tmp_path)


def test_statistics_cover_only_included_tensors(fake, tmp_path):
    fake.save(tmp_path / "c", some(), aliases={"tied": "w"})
    found = inspect_checkpoint(tmp_path / "c", InspectOptions(stats=True, include=["ti*", "h"]))
    measured = {t.name for t in found.tensors if t.statistics}
    assert measured == {"tied", "w", "h"}
    assert [t.name for t in select_tensors(found.tensors, ["*exp_avg", "w"])] == [
        "w",
        "optimizer.state.w.exp_avg",
    ]
