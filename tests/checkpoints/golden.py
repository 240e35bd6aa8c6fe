"""Golden checkpoints: the keys and shapes of real tiny models, filled with bytes that follow from
the keys, and the digest of what every layout makes of them.

``python -m tests.oracle.make_golden`` writes the files in ``tests/data/golden`` with transformers;
it is run when the logits of a family have just been compared.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

FOLDER = Path(__file__).parents[1] / "data" / "golden"
TILES = re.compile(r"tile_(positional_embedding\.)?embedding\.weight$")
NORM = re.compile(r"norm\.weight$")
SHIFTED = (
    *("gemma", "gemma2", "gemma3_text", "qwen3_next"),
    *("qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text"),
    *("step3p5", "step3p7"),
)
"""Model types of which a layout stores norms more or less 1."""
State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Golden:
    """One tiny model.

    Attributes:
        config: Its ``config.json``.
        tensors: dtype and shape of every tensor on disk.
        digests: By layout.
    """

    config: dict[str, Any]
    tensors: dict[str, tuple[str, list[int]]]
    digests: dict[str, str]

    @classmethod
    def read(cls, name: str) -> Golden:
        return cls(**json.loads((FOLDER / f"{name}.json").read_text()))

    def write(self, name: str) -> None:
        (FOLDER / f"{name}.json").write_text(json.dumps(asdict(self), indent=1) + "\n")

    def state(self) -> State:
        """Return the tensors; their bits are arbitrary, NaN included."""
        shifted = self.config["model_type"] in SHIFTED
        return {
            key: counted(*kind) if shifted and NORM.search(key) else filled(key, *kind)
            for key, kind in self.tensors.items()
        }

    def save(self, folder: Path) -> Path:
        """Write the model as an hf folder."""
        folder.mkdir(parents=True)
        save_file(self.state(), folder / "model.safetensors", {"format": "pt"})
        (folder / "config.json").write_text(json.dumps(self.config))
        return folder


def filled(key: str, dtype: str, shape: list[int]) -> torch.Tensor:
    """Return a tensor whose bytes follow from its key.

    The rows of mllama's tile embeddings have to come from one grid: those are zeros.
    """
    kind = getattr(torch, dtype)
    if TILES.search(key) or 0 in shape:
        return torch.zeros(shape, dtype=kind)
    count = torch.Size(shape).numel() * kind.itemsize
    content = bytearray(hashlib.shake_256(key.encode()).digest(count))
    return torch.frombuffer(content, dtype=torch.uint8).view(kind).reshape(shape)


def counted(dtype: str, shape: list[int]) -> torch.Tensor:
    """Return small integers, from which 1 can be taken without a loss."""
    return torch.arange(torch.Size(shape).numel()).to(getattr(torch, dtype)).reshape(shape)


def digest(state: Mapping[str, torch.Tensor]) -> str:
    """Return the SHA-256 of names, dtypes, shapes and bytes."""
    found = hashlib.sha256()
    for key in sorted(state):
        value = state[key].contiguous()
        found.update(repr((key, str(value.dtype), list(value.shape))).encode())
        found.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def names() -> list[str]:
    """Return the golden models: ``family`` or ``family.variant``."""
    return sorted(path.name.removesuffix(".json") for path in FOLDER.glob("*.json"))


def family_of(name: str) -> str:
    """Return the family of a golden model."""
    return name.partition(".")[0]
