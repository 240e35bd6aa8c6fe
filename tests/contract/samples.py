"""All samples of other people's trainers and their tensors, and a checkpoint of every format."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import tiny_llama
from tests.checkpoints.adapters import random_adapter, save_peft
from tests.checkpoints.gguf import write_gguf
from tests.conftest import DATA
from tests.contract import test_mistral
from tests.contract.support import WRITABLE, build

BUFFERS = ("mask", "bn.running_mean", "bn.running_var", "bn.num_batches_tracked")
FROZEN = ("z2_bf16_frozen_tied", "z3_fp32")


@dataclass(frozen=True)
class Sample:
    """One real checkpoint below ``tests/data``.

    Attributes:
        folder: Its folder, which holds ``ckpt/``.
        inside: The checkpoint itself, below ``ckpt/``.
        format: The format that recognizes it.
        refused: The reason for which it has to be refused.
        root: Where the model is, where that has to be said.
        exclude: Leaves that no output can hold.
        older: Another save of the same run, below ``tests/data``.
    """

    folder: str
    inside: str = "."
    format: str = "dcp"
    refused: str | None = None
    root: str | None = None
    exclude: tuple[str, ...] = ()
    older: str | None = None

    def path(self, data: Path) -> Path:
        """Return the checkpoint."""
        return self.within(data / self.folder / "ckpt")

    def within(self, folder: Path) -> Path:
        """Return the checkpoint in a copy of ``ckpt/``."""
        return folder / self.inside


OPAQUE = ("*_extra_state*", "*rng_state*")
STEPS = "dcp/torchtitan/steps"
SAMPLES = {
    "deepspeed_zero/z1_bf16": Sample("deepspeed/z1_bf16", format="deepspeed"),
    "deepspeed_zero/z2_bf16_frozen_tied": Sample(
        "deepspeed/z2_bf16_frozen_tied", format="deepspeed"
    ),
    "deepspeed_zero/z2_align": Sample("deepspeed/z2_align", format="deepspeed"),
    "deepspeed_zero/z3_fp32": Sample("deepspeed/z3_fp32", format="deepspeed"),
    "deepspeed_zero/z1_bf16opt": Sample("deepspeed/z1_bf16opt", format="deepspeed"),
    "deepspeed_universal/z2_w3": Sample("deepspeed/universal_z2_w3", format="deepspeed-universal"),
    "lightning_deepspeed/stage2": Sample(
        "deepspeed/lightning", format="deepspeed", older="older/lightning_deepspeed"
    ),
    "lightning_fsdp1/pl": Sample(
        "wrappers/lightning_fsdp1", "epoch=0-step=2.ckpt", older="older/lightning_fsdp1"
    ),
    "lightning_fsdp2/fabric": Sample("wrappers/lightning_fsdp2", "step-2"),
    "lightning_plain/ddp_top2_last": Sample("wrappers/lightning_plain", "last.ckpt", "torch"),
    "dcp/dcp2": Sample("dcp/dcp2"),
    "dcp/dcp_2d": Sample("dcp/dcp_2d"),
    "dcp/fsdp1_dcp": Sample("dcp/fsdp1_dcp"),
    "dcp/python_3_11_2": Sample("dcp/python_3_11_2"),
    "dcp_ranklocal/w2": Sample("dcp-rank-local/w2", format="dcp-rank-local"),
    "dcp_hf_sharded/hf_sharded": Sample("hf-rank-shards/hf_sharded", format="hf-rank-shards"),
    "dcp_hf_sharded/hf_consolidated": Sample(
        "hf-rank-shards/hf_consolidated", "sharded", "hf-rank-shards"
    ),
    "transformers_fsdp2/shards": Sample("hf-rank-shards/transformers", format="hf-rank-shards"),
    "verl_dtensor/verl2": Sample("rank_files/verl", format="rank-files"),
    "fsdp1_rankfiles/sharded": Sample("rank_files/fsdp1_sharded", format="rank-files"),
    "fsdp1_rankfiles/local": Sample(
        "rank_files/fsdp1_local", format="rank-files", refused="flat parameters"
    ),
    "accelerate_fsdp2/dcp": Sample("wrappers/accelerate_dcp"),
    "accelerate_fsdp2/nodcp": Sample("rank_files/accelerate", format="rank-files"),
    "accelerate_plain/ddp": Sample(
        "wrappers/accelerate_plain", "checkpoints/checkpoint_1", format="hf"
    ),
    "megatron_torch_dist/mcore": Sample("wrappers/megatron", format="mcore", exclude=OPAQUE),
    "megatron_torch_dist/crashed": Sample(
        "wrappers/megatron_crashed", format="mcore", refused="interrupted", exclude=OPAQUE
    ),
    "bytecheckpoint/fsdp2": Sample(
        "wrappers/bytecheckpoint", "global_step_1", "bytecheckpoint", older="older/bytecheckpoint"
    ),
    "torchsnapshot/ddp": Sample(
        "wrappers/torchsnapshot", format="torchsnapshot", root="model.module"
    ),
    "torchtitan/steps": Sample(STEPS, "checkpoint/step-8", older=f"{STEPS}/ckpt/checkpoint/step-6"),
    "torch_experimental/w2": Sample("rank_files/torch_experimental", "step-2", "rank-files"),
    "hf_trainer/ddp_limit2": Sample("wrappers/hf_trainer", "checkpoint-6", "hf"),
    "torch_checkpointing/single": Sample(
        "torch_checkpointing/single", format="torch-checkpointing"
    ),
    "torch_checkpointing/two_rank": Sample(
        "torch_checkpointing/two_rank", format="torch-checkpointing"
    ),
}


def expected(data: Path, name: str) -> dict[str, torch.Tensor]:
    """Return the model of a sample as other people's code sees it, in the stored dtypes."""
    sample = SAMPLES[name]
    folder = data / sample.folder
    match name.split("/")[0]:
        case "deepspeed_universal":
            return _universal(sample.path(data) / "global_step2_universal")
        case "lightning_plain":
            saved: Any = torch.load(sample.path(data), weights_only=True)
            return dict(saved["state_dict"])
        case "accelerate_plain":
            return load_file(sample.path(data) / "model.safetensors")
    state = load_file(folder / "expected.safetensors")
    if name.startswith("torch_checkpointing"):
        return {key[6:]: value for key, value in state.items() if key.startswith("model.")}
    if name.startswith("deepspeed_zero"):
        # DeepSpeed's tools widen buffers and frozen parameters, and take what is tied from the
        # module.
        live = load_file(folder / "live.safetensors")
        frozen = ("frz.weight",) if name.endswith(FROZEN) else ()
        state |= {key: live[key] for key in (*BUFFERS, *frozen)}
        if name.endswith("z1_bf16opt"):
            state["head.weight"] = state["emb.weight"]
    return state


def _universal(folder: Path) -> dict[str, torch.Tensor]:
    """Return what stock torch finds; buffers as the module has them, before they were widened."""
    state = dict(torch.load(folder / "mp_rank_00_model_states.pt", weights_only=True)["module"])
    for file in folder.glob("zero/*/fp32.pt"):
        name, found = file.parent.name, torch.load(file, weights_only=True)
        if name not in BUFFERS:
            state[name] = found["param"].view(state[name].shape)
    return state


def _peft(folder: Path) -> Path:
    return save_peft(folder / "peft", random_adapter(tiny_llama("llama3", layers=1)[0]))


def _gguf(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    return write_gguf(folder / "a.gguf", {"general.architecture": "llama"}, {"t": torch.ones(4)})


def _deepseek(folder: Path) -> Path:
    (folder / "deepseek").mkdir()
    save_file({"embed.weight": torch.ones(4, 4)}, folder / "deepseek/model0-mp1.safetensors")
    return folder / "deepseek"


def _mistral(folder: Path) -> Path:
    return test_mistral.build("one", folder / "mistral", test_mistral.native(), test_mistral.PARAMS)


def _copied(place: Path) -> Callable[[Path], Path]:
    def copy(folder: Path) -> Path:
        return Path(shutil.copytree(place, folder / "copied"))

    return copy


BUILT: Mapping[str, Callable[[Path], Path]] = {
    "peft": _peft,
    "gguf": _gguf,
    "deepseek": _deepseek,
    "mistral": _mistral,
    "vescale": _copied(DATA / "vescale/w2/ckpt"),
    "megatron": _copied(DATA / "megatron/tp2_pp2_vp2/ckpt"),
}
"""Checkpoints of formats without a sample, and without a reader of reference."""


def sample_of(name: str) -> Sample | None:
    """Return a sample of format *name* that is read."""
    samples = SAMPLES.values()
    return next((one for one in samples if one.format == name and not one.refused), None)


def has_checkpoint(name: str) -> bool:
    """Check whether :func:`write_checkpoint` knows format *name*."""
    return name in WRITABLE or name in BUILT or sample_of(name) is not None


def write_checkpoint(name: str, folder: Path) -> Path:
    """Write a checkpoint of format *name*."""
    if name in BUILT:
        return BUILT[name](folder)
    if sample := sample_of(name):
        return sample.within(Path(shutil.copytree(DATA / sample.folder / "ckpt", folder / "ckpt")))
    return build(name, folder, *tiny_llama("llama3", layers=1))
