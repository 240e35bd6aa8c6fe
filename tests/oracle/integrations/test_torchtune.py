"""torchtune: its own recipe, with our checkpointer beside its own."""

from __future__ import annotations

import importlib.util
import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoints import differences, load_any_reference, save_hf, save_meta, tiny_llama
from tests.gloo import run_on_ranks

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.skipif(
        importlib.util.find_spec("torchtune") is None, reason="torchtune is not installed"
    ),
    pytest.mark.filterwarnings("ignore"),
]

HERE = "tests.oracle.integrations.test_torchtune."
OURS = "ckptctl.integrations.torchtune.Checkpointer"
STOCK = "torchtune.training.FullModelHFCheckpointer"
MODEL = {
    "_component_": "torchtune.models.llama3.llama3",
    "vocab_size": 128,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "embed_dim": 64,
    "max_seq_len": 32,
    "intermediate_dim": 224,
    "rope_base": 500000,
}
LORA = MODEL | {
    "_component_": "torchtune.models.llama3.lora_llama3",
    "lora_attn_modules": ["q_proj", "v_proj"],
    "apply_lora_to_mlp": False,
    "apply_lora_to_output": False,
    "lora_rank": 2,
    "lora_alpha": 4,
}


QUANTIZERS = ("int4_weight_only", "int8_dynamic_activation_int4_weight")


@pytest.fixture(autouse=True)
def quantizers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torchtune be imported beside a torchao that has dropped two quantizers."""
    quantization = pytest.importorskip("torchao.quantization")
    for name in QUANTIZERS:
        if not hasattr(quantization, name):
            monkeypatch.setattr(quantization, name, None, raising=False)


class Tokenizer:
    """What a recipe asks of a tokenizer."""

    pad_id = 0


class Rows(torch.utils.data.Dataset[dict[str, list[int]]]):
    """Four rows of random tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.rows = torch.randint(1, 128, (4, 9), generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        row = self.rows[index].tolist()
        return {"tokens": row, "labels": row}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    state, config = tiny_llama("llama3")
    return save_hf(tmp_path / "base", state, config)


def recipe(kind: str, base: Path, out: Path, component: str, **changed: Any) -> Any:
    """Run torchtune's recipe, two epochs of two steps, and return it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from omegaconf import OmegaConf
    names = {
        FULL: "FullFinetuneRecipeSingleDevice",
        PEFT: "LoRAFinetuneRecipeSingleDevice",
        SHARDED: "FullFinetuneRecipeDistributed",
    }
    files = {"checkpoint_files": ["model.safetensors"]} if component == STOCK else {}
    resume = changed.pop("resume_from_checkpoint", False)
    lora = {
        "lr_scheduler": {
            "_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
            "num_warmup_steps": 1,
        },
    }
    config = {
        "output_dir": str(out),
        "device": "cpu",
        "dtype": "fp32",
        "seed": 5,
        "epochs": 2,
        "max_steps_per_epoch": None,
        "batch_size": 1 if kind == SHARDED else 2,
        "shuffle": True,
        "compile": False,
        "gradient_accumulation_steps": 1,
        "optimizer_in_bwd": False,
        "enable_activation_checkpointing": False,
        "resume_from_checkpoint": resume,
        "model": LORA if kind == PEFT else MODEL,
        "tokenizer": {"_component_": HERE + "Tokenizer"},
        "dataset": {"_component_": HERE + "Rows"},
        "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 0.01},
        "metric_logger": {
            "_component_": "torchtune.training.metric_logging.DiskLogger",
            "log_dir": str(out.parent / "logs"),
        },
        "checkpointer": {
            "_component_": component,
            "checkpoint_dir": str(base),
            "output_dir": str(out),
            "model_type": "LLAMA3",
            **files,
            **changed,
        },
        **(lora if kind == PEFT else {}),
    }
    found = getattr(_module(kind), names[kind])(OmegaConf.create(config))
    found.setup(OmegaConf.create(config))
    found.train()
    return found


FULL, PEFT = "full_finetune_single_device", "lora_finetune_single_device"
SHARDED = "full_finetune_distributed"


def _module(kind: str) -> Any:
    """Return a recipe; the package that they lie in cannot be imported."""
    where = importlib.util.find_spec("torchtune")
    assert where and where.origin
    path = Path(where.origin).parents[1] / "recipes" / f"{kind}.py"
    spec = importlib.util.spec_from_file_location(kind, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if kind == SHARDED:
        module.init_process_group = lambda _: None  # type: ignore[attr-defined]  # there is one
    return module


def moments(found: Any) -> dict[str, torch.Tensor]:
    state = found._optimizer.state_dict()["state"]
    return {f"{index}.{key}": one for index, held in state.items() for key, one in held.items()}


def test_resumed_recipe_matches_uninterrupted_and_stock_runs(tmp_path: Path, base: Path) -> None:
    out = tmp_path / "run" / "out"
    whole = recipe(FULL, base, out, OURS)
    stock = recipe(FULL, base, tmp_path / "stock" / "out", STOCK)
    final = load_any_reference(out / "epoch_1")
    assert not differences(final, load_any_reference(tmp_path / "stock" / "out" / "epoch_1"))
    assert (out / "epoch_1" / "config.json").is_file()
    shutil.copytree(out / "step-0", tmp_path / "half" / "out" / "step-0")
    again = recipe(FULL, base, tmp_path / "half" / "out", OURS, resume_from_checkpoint=True)
    assert not differences(load_any_reference(tmp_path / "half" / "out" / "epoch_1"), final)
    assert len(moments(whole)) == 3 * len(list(whole._model.parameters()))
    assert not differences(moments(again), moments(whole))
    assert not differences(moments(stock), moments(whole))


@pytest.mark.slow
def test_sharded_recipe_resumes_bit_exactly(tmp_path: Path, base: Path) -> None:
    run_on_ranks("tests.oracle.integrations.torchtune_jobs:shards", [2], tmp_path, timeout=300)


def test_resumed_adapter_run_matches_stock_checkpointer(tmp_path: Path, base: Path) -> None:
    """The recipe begins with the learning rate anew: only with its own checkpointer it compares."""
    resumed = {}
    for component, kept in ((OURS, ["step-0"]), (STOCK, ["epoch_0", "recipe_state"])):
        out, half = (tmp_path / component / name / "out" for name in ("whole", "half"))
        recipe(PEFT, base, out, component)
        for name in kept:
            shutil.copytree(out / name, half / name)
        again = recipe(PEFT, base, half, component, resume_from_checkpoint=True)
        resumed[component] = {**load_any_reference(half / "epoch_1"), **moments(again)}
    assert any(name.endswith("exp_avg") for name in resumed[OURS])
    stock = {name: one for name, one in resumed[STOCK].items() if "lora" not in name}
    assert not differences(resumed[OURS], stock)
    intermediate = load_any_reference(tmp_path / OURS / "whole" / "out" / "step-0")
    assert {name.partition(".")[0] for name in intermediate} >= {"adapter", "optimizer", "recipe"}
    assert not any(name.startswith("model.") for name in intermediate)
    ours, theirs = tmp_path / OURS / "half" / "out", tmp_path / STOCK / "half" / "out" / "epoch_1"
    found = load_file(ours / "adapter_epoch_1" / "adapter_model.safetensors")
    expected = load_file(theirs / "adapter_model.safetensors")
    assert not differences(found, expected)


def test_run_resumed_from_older_step_records_it(tmp_path: Path, base: Path) -> None:
    from torchtune import training

    from ckptctl.integrations.torchtune import Checkpointer

    def begun(**how: Any) -> Checkpointer:
        return Checkpointer(str(base), str(tmp_path / "out"), "LLAMA3", **how)

    def state(value: float) -> dict[str, Any]:
        return {training.MODEL_KEY: {"w": torch.full((2,), value)}, "epochs_run": int(value)}

    first = begun()
    for epoch in range(3):
        first.save_checkpoint(state(epoch), epoch, intermediate_checkpoint=True)
    first.wait()
    (tmp_path / "out" / "step-2").rename(tmp_path / "step-2")
    second = begun(should_load_recipe_state=True)
    assert second.load_checkpoint()["epochs_run"] == 1
    (tmp_path / "step-2").rename(tmp_path / "out" / "step-2")
    second.save_checkpoint(state(5), 1, intermediate_checkpoint=True)
    second.wait()
    third = begun(should_load_recipe_state=True).load_checkpoint()
    assert third["epochs_run"] in (2, 5)
    said = json.loads((tmp_path / "out" / "step-1" / "ckptctl.run.json").read_text())
    assert said["resumed"][-1]["step"] == 1


@pytest.mark.parametrize("write", [save_hf, save_meta])
def test_checkpointer_loads_hf_and_meta_base_models(
    tmp_path: Path, write: Callable[..., Path]
) -> None:
    from torchtune import training
    from torchtune.models.convert_weights import hf_to_tune

    from ckptctl.integrations.torchtune import Checkpointer

    state, config = tiny_llama("llama3")
    write(tmp_path / "base", state, config)
    found = Checkpointer(str(tmp_path / "base"), str(tmp_path / "out"), "LLAMA3").load_checkpoint()
    expected = hf_to_tune(state, num_heads=4, num_kv_heads=2, dim=64)
    assert not differences(found[training.MODEL_KEY], expected)


def test_unknown_model_type_or_missing_save_is_an_error(tmp_path: Path) -> None:
    from ckptctl.errors import SourceNotFoundError, UsageError
    from ckptctl.integrations.torchtune import Checkpointer

    with pytest.raises(UsageError, match="LLAMA9"):
        Checkpointer(str(tmp_path), str(tmp_path / "out"), "LLAMA9")
    nothing = Checkpointer(
        str(tmp_path), str(tmp_path / "out"), "LLAMA3", should_load_recipe_state=True
    )
    with pytest.raises(SourceNotFoundError):
        nothing.load_checkpoint()
