"""An adapter in PEFT's form, written tensor by tensor: how large it gets is known at the end."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from ckptctl.errors import storage_errors
from ckptctl.formats.peft import CONFIG, WEIGHTS
from ckptctl.storage.file_system import sync_directory
from ckptctl.storage.safetensors_header import encode_header

DIGITS = 48
"""Characters that offsets and shapes of one tensor may need beyond those of an empty one."""


class AdapterFolder:
    """The files of an adapter in the making.

    The header of the weights stands before them, and gets the room that all names would need.
    """

    def __init__(self, folder: Path, names: Collection[str], dtype: str) -> None:
        self._path = folder / WEIGHTS
        self._folder = folder
        empty = [(name, dtype, (0, 0)) for name in names]
        head, _ = encode_header(empty, {"format": "pt"})
        self._room = len(head) + DIGITS * len(empty)
        self._room += -self._room % 8
        self._tensors: list[tuple[str, str, tuple[int, ...]]] = []
        self._end = self._room
        with storage_errors("write", self._path):
            self._file = self._path.open("w+b")

    def add(self, name: str, dtype: str, shape: tuple[int, ...], content: Iterable[bytes]) -> None:
        """Write a tensor behind those that are there."""
        with storage_errors("write", self._path):
            self._file.seek(self._end)
            for piece in content:
                self._file.write(piece)
                self._end += len(piece)
        self._tensors.append((name, dtype, shape))

    def finish(self, config: Mapping[str, object]) -> int:
        """Write what stands before the tensors, and the configuration; return the bytes of both."""
        head, _ = encode_header(self._tensors, {"format": "pt"})
        text = head[8:].ljust(self._room - 8)
        with storage_errors("write", self._path), self._file as file:
            file.seek(0)
            file.write(len(text).to_bytes(8, "little") + text)
            file.flush()
            os.fsync(file.fileno())
        content = (json.dumps(config, indent=2) + "\n").encode()
        path = self._folder / CONFIG
        with storage_errors("write", path), path.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        sync_directory(self._folder)
        return self._end + len(content)

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()


def adapter_config(
    ranks: Mapping[str, int], linear: Sequence[str], saved: Sequence[str]
) -> dict[str, object]:
    """Return the adapter_config.json of an adapter whose factors are scaled by 1.

    Args:
        ranks: By module.
        linear: All linear layers of the model.
        saved: Modules that the adapter has as a whole.
    """
    main = Counter(ranks.values()).most_common(1)[0][0] if ranks else 1
    others = {re.escape(module): rank for module, rank in ranks.items() if rank != main}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": main,
        "lora_alpha": main,
        "rank_pattern": others,
        "alpha_pattern": others,
        "target_modules": target_modules(ranks, linear),
        "modules_to_save": list(saved) or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_dropout": 0.0,
        "use_dora": False,
        "use_rslora": False,
    }


def target_modules(chosen: Collection[str], linear: Collection[str]) -> list[str]:
    """Return PEFT's ``target_modules``: last names where these mean just *chosen*."""
    of_kind: dict[str, list[str]] = {}
    for module in linear:
        of_kind.setdefault(module.rpartition(".")[2], []).append(module)
    found: list[str] = []
    for last, modules in of_kind.items():
        kept = [module for module in modules if module in chosen]
        found += [last] if len(kept) == len(modules) else kept
    return sorted(found)
