"""Checkpoints to fill run folders with: complete ones of many formats, and ways to damage them.

Each complete one was written by its own trainer, by torch, or is held to ``torch.load`` here; none
of them by ckptctl.
"""

from __future__ import annotations

import argparse
import collections
import pickle
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict_saver import save

from tests.checkpoints import save_hf, tiny_llama
from tests.runs import save_step

DATA = Path(__file__).parents[1] / "data"
STATE, CONFIG = tiny_llama("llama3", layers=1, hidden=32, heads=2, kv_heads=2, vocab=64, ffn=96)


class Own:
    """A class of somebody's own, which is not imported to read a checkpoint."""


@dataclass(frozen=True)
class Template:
    """A checkpoint to copy.

    Attributes:
        path: Where it lies.
        series: Begins of the names that its trainer gives such ones.
        sure: Whether the documentation says that it is complete; else it may also be called
            unknown: never damaged.
    """

    path: Path
    series: str
    sure: bool = True

    def copy(self, target: Path) -> Path:
        """Put a copy at *target*."""
        if self.path.is_dir():
            return Path(shutil.copytree(self.path, target, symlinks=True))
        return Path(shutil.copyfile(self.path, target))


LEAVES: dict[str, Callable[[], Any]] = {
    "expanded": lambda: torch.ones(1, 1).expand(4, 4),
    "strided": lambda: torch.arange(16.0).reshape(4, 4)[:, ::2],
    "conjugate": lambda: torch.ones(3, dtype=torch.complex64).conj(),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "deque": lambda: collections.deque([torch.ones(2)]),
    "namespace": lambda: argparse.Namespace(best=torch.ones(2), lr=0.1),
    "prefix": lambda: {"a": {"b": torch.ones(2)}, "a.b": torch.zeros(2)},
    "complex": lambda: torch.ones(3, dtype=torch.complex128),
    "bits": lambda: torch.zeros(4, dtype=torch.uint8).view(torch.bits8),
    "unsigned": lambda: torch.ones(3, dtype=torch.uint16),
    "tuples": lambda: {(n, n + 1): n for n in range(10_500)},
}
"""What makes a file that ``torch.load`` reads unusual."""


def templates(folder: Path) -> list[Template]:
    """Make them in *folder*, or name those that are there."""
    found = [
        Template(save_step(folder / "hf"), "step-"),
        Template(save_step(folder / "hf-shards", files=3), "step-"),
        Template(_dcp(folder / "dcp"), "step-"),
        Template(save_hf(folder / "model", STATE, CONFIG), "step-"),
        Template(save_step(folder / "trainer"), "checkpoint-"),
        Template(DATA / "wrappers/torchsnapshot/ckpt/snap", "step_"),
        Template(DATA / "torch_checkpointing/single", "step_"),
        Template(DATA / "wrappers/bytecheckpoint/ckpt/global_step_1", "global_step_"),
        Template(DATA / "deepspeed/z1_bf16/ckpt/global_step2", "global_step"),
        Template(DATA / "wrappers/lightning_fsdp2/ckpt/last.ckpt", "epoch=0-step="),
        Template(_lightning(folder / "plain.ckpt", torch.ones(4, 4)), "epoch=0-step="),
        Template(_lightning(folder / "own.ckpt", Own()), "epoch=0-step=", sure=False),
    ]
    for name, leaf in LEAVES.items():
        path = _lightning(folder / f"{name}.ckpt", leaf())
        found.append(Template(path, "epoch=0-step=", sure=False))
    return [one for one in found if one.path.exists()]


def _dcp(path: Path) -> Path:
    state = {"model": {"w": torch.ones(8, 4)}, "optimizer": {"state": {"exp_avg": torch.ones(8)}}}
    save(state, checkpoint_id=path, no_dist=True)
    return path


def _lightning(path: Path, leaf: object) -> Path:
    state = {"w": torch.ones(4, 4)}
    torch.save({"epoch": 0, "global_step": 1, "state_dict": state, "extra": leaf}, path)
    torch.load(path, weights_only=False)
    return path


def cut(path: Path) -> None:
    """End the largest file early, as a save does that is killed, or a disk that is full."""
    file = max(_files(path), key=lambda item: item.stat().st_size)
    data = file.read_bytes()
    file.write_bytes(data[: max(1, len(data) * 2 // 3)])


def lose(path: Path) -> None:
    """Take a file of weights away, of several."""
    sorted(_files(path))[-1].unlink()


def lose_index(path: Path) -> None:
    """Take away what a DCP save writes last."""
    (path / ".metadata").unlink()


def empty(path: Path) -> None:
    """Leave nothing but folders, or a file of no bytes."""
    if path.is_dir():
        shutil.rmtree(path)
        (path / "rank_0").mkdir(parents=True)
    else:
        path.write_bytes(b"")


TEARS: dict[str, tuple[Callable[[Path], None], ...]] = {
    "hf": (cut, empty),
    "hf-shards": (cut, lose, empty),
    "dcp": (cut, lose, lose_index, empty),
    "model": (cut, empty),
    "trainer": (cut, empty),
    "snap": (cut, lose),
    "global_step2": (cut, empty),
    "plain.ckpt": (cut, empty),
    "expanded.ckpt": (cut, empty),
}
"""Ways to tear each template that leave evidence."""


def leave_hole(path: Path) -> None:
    """Take a chunk out of the index of a DCP checkpoint, whose files stay as they are."""
    metadata = pickle.loads((path / ".metadata").read_bytes())
    metadata.state_dict_metadata["model.w"].chunks.clear()
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def lose_tensor(path: Path) -> None:
    """Save a model without a tensor that its table requires."""
    (file,) = path.glob("*.safetensors")
    state = load_file(file)
    del state["model.norm.weight"]
    save_file(state, file, {"format": "pt"})


UNTORN: dict[str, tuple[Callable[[Path], None], ...]] = {
    "dcp": (leave_hole,),
    "model": (lose_tensor,),
}
"""Ways to damage templates that no file shows: the evidence is the index, or the model's table."""


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = (item for item in path.rglob("*") if item.is_file())
    return [item for item in found if "metadata" not in item.name and item.suffix != ".json"]
