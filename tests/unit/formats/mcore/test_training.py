"""A save of a training run: the optimizer's tensors are named as the model's, and are no model."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import ckptctl
from ckptctl import formats
from ckptctl.errors import RefusedError
from ckptctl.storage.zips.zip_reader import StoredTensor
from tests.checkpoints.mcore import write

MOMENTS = ("exp_avg", "exp_avg_sq", "param")


SCALES = "decoder.layers.1.self_attention.linear_qkv._extra_state/shard_0_1"
WEIGHT = "decoder.layers.1.mlp.linear_fc2.weight"


@pytest.fixture
def run(tmp_path: Path, tiny_llama3_hf: Path) -> Path:
    """Return a run whose save has all that Megatron-LM saves, its vocabulary padded."""
    ckptctl.convert(tiny_llama3_hf, tmp_path / "hf", to="hf", vocab_size=100)
    ckptctl.convert(tmp_path / "hf", tmp_path / "start", to="mcore")
    ckptctl.convert(tmp_path / "start", tmp_path / "model.pt", to="torch")
    model = torch.load(tmp_path / "model.pt", weights_only=True)
    moments = {name: {k: torch.randn(v.shape) for k, v in model.items()} for name in MOMENTS}
    for held in moments.values():
        for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            held[name][100:] = 0
    state = {f"optimizer.state.{name}.{k}": v for name in MOMENTS for k, v in moments[name].items()}
    folder = tmp_path / "run" / "iter_0000100"
    objects = {
        "rng_state/shard_0.0_1.1": {"random_rng_state": torch.ones(3)},
        SCALES.replace("1.", "", 1).replace("_0_1", "_1_2"): torch.arange(5, dtype=torch.uint8),
    }
    write(folder, {**model, **state}, objects=objects)
    common = {
        "args": Namespace(num_layers=2, consumed_train_samples=80),
        "iteration": 100,
        "optimizer": {
            0: {
                "optimizer": {"param_groups": [{"lr": 0.001, "betas": (0.9, 0.95)}]},
                "grad_scaler": {"scale": torch.tensor([65536.0]), "growth_tracker": 3},
            }
        },
        "opt_param_scheduler": {"max_lr": 0.01},
        "content_metadata": {"distrib_optim_sharding_type": "fully_reshardable"},
    }
    torch.save(common, folder / "common.pt")
    (folder.parent / "latest_checkpointed_iteration.txt").write_text("100")
    return folder.parent


def test_training_run_exports_only_model_to_hf(run: Path, tmp_path: Path) -> None:
    hf = tmp_path / "hf"
    result = ckptctl.convert(run, tmp_path / "out", to="hf", assets=hf)
    assert ckptctl.diff(hf, tmp_path / "out").same
    assert ckptctl.diff(run, hf, only="model").same
    assert "not part of the model" in result.plan.left_out[SCALES]


def test_rewritten_records_use_model_dtype(run: Path, tmp_path: Path) -> None:
    """Its dtype, whatever the larger moments have; other leaves are left out as they are."""
    given: dict[str, Any] = {"assets": tmp_path / "hf"}
    outer: dict[str, Any] = {"only": "all", "exclude": ["args"], **given}
    ckptctl.convert(run, tmp_path / "all", to="mcore", **outer)
    with torch.serialization.safe_globals([Namespace]):
        common = torch.load(tmp_path / "all/iter_0000100/common.pt", weights_only=True)
    assert common["args"].bf16
    assert "bf16: true" in (tmp_path / "all/iter_0000100/run_config.yaml").read_text()
    ckptctl.convert(run, tmp_path / "cast", to="dcp", dtype="float16", **outer)
    assert '"float16"' in (tmp_path / "cast/config.json").read_text()
    left_out = ckptctl.convert(run, tmp_path / "model", to="mcore", **given).plan.left_out
    assert left_out["args"] == left_out["iteration"] == "format mcore stores its own values"
    assert "not part of the model" in left_out["opt_param_scheduler.max_lr"]


def test_common_pt_tensors_stay_in_common_pt(run: Path, tmp_path: Path) -> None:
    """What is no optimizer's, too; directly, and by way of DCP."""
    file = "iter_0000100/common.pt"
    common = torch.load(run / file, weights_only=False)
    common["my_state"] = {"mean": torch.arange(1.0), "n": 3}
    torch.save(common, run / file)
    ckptctl.convert(run, tmp_path / "direct", to="mcore", only="all", exclude=["args"])
    ckptctl.convert(run, tmp_path / "dcp", to="dcp", only="all", exclude=["args"])
    ckptctl.convert(
        tmp_path / "dcp", tmp_path / "back", to="mcore", only="all", model_type="llama3"
    )
    for folder in ("direct", "back"):
        found = torch.load(tmp_path / folder / file, weights_only=False)
        for name in ("optimizer", "my_state"):
            assert found[name] == common[name]
        read = formats.open_checkpoint(tmp_path / folder)
        assert {one.file for one in read.tensors["my_state.mean"].extents} == {"common.pt"}
        assert not any("my_state" in name and "/" in name for name in read.blobs)
        assert ckptctl.verify(tmp_path / folder).verdict == "complete"


def test_training_run_round_trips_through_dcp(run: Path, tmp_path: Path) -> None:
    """Moments follow, padded again; what goes with them is in common.pt; objects are copied."""
    asked: dict[str, Any] = {"only": "all", "assets": tmp_path / "hf"}
    ckptctl.convert(run, tmp_path / "dcp", to="dcp", to_layout="hf", **asked)
    ckptctl.convert(tmp_path / "dcp", tmp_path / "back", to="mcore", **asked)
    assert (tmp_path / "back/latest_checkpointed_iteration.txt").read_text() == "100"
    found = ckptctl.diff(run, tmp_path / "back")
    assert not (found.tensors or found.structure or found.leaves or found.a.only_leaves)
    save = tmp_path / "back" / "iter_0000100"
    with torch.serialization.safe_globals([Namespace]):
        common = torch.load(save / "common.pt", weights_only=True)
        before = torch.load(run / save.name / "common.pt", weights_only=True)
    assert {name: common[name] for name in before if name != "content_metadata"} == {
        name: before[name] for name in before if name != "content_metadata"
    }
    assert common["content_metadata"] == {
        "distrib_optim_sharding_type": "fully_reshardable",
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "non_homogeneous_layers": True,
    }


def test_module_scales_are_copied_between_mcore_layouts(run: Path, tmp_path: Path) -> None:
    """Between saves of Megatron-Core, whether layers lie apart or in a stack."""
    for name, stack in {"apart": False, "stacked": True}.items():
        ckptctl.convert(run, tmp_path / name, to="mcore", stack_layers=stack)
        catalog = formats.resolve_codecs(formats.open_checkpoint(tmp_path / name))
        (scales,) = cast("list[StoredTensor]", catalog.blobs[SCALES].value)
        assert scales.shape == (5,)
    assert (tmp_path / "stacked/latest_checkpointed_iteration.txt").read_text() == "release"


def test_foreign_optimizer_state_is_refused_for_mcore(tmp_path: Path, tiny_llama3_hf: Path) -> None:
    """That of another trainer, and one without what common.pt says of it."""
    ckptctl.convert(tiny_llama3_hf, tmp_path / "model.pt", to="torch", to_layout="mcore")
    model = torch.load(tmp_path / "model.pt", weights_only=True)
    for number, name in enumerate(("state.{}.exp_avg", "state.exp_avg.{}")):
        state = {f"optimizer.{name.format(k)}": v for k, v in model.items()}
        source = tmp_path / f"{number}.pt"
        torch.save({**model, **state, "iteration": 3}, source)
        with pytest.raises(RefusedError, match="Megatron-Core") as caught:
            ckptctl.convert(source, tmp_path / "out", to="mcore", only="all", model_type="llama3")
        expected = ("such as `optimizer.state.exp_avg.`", "the settings of")[number]
        assert expected in str(caught.value) + (caught.value.why or "")


def test_only_all_copies_optimizer_moments(run: Path, tmp_path: Path) -> None:
    ckptctl.convert(run, tmp_path / "all", to="dcp", only="all", exclude=["args"])
    names = {one.name for one in ckptctl.inspect(tmp_path / "all").tensors}
    assert {WEIGHT, *(f"optimizer.state.{name}.{WEIGHT}" for name in MOMENTS)} <= names
