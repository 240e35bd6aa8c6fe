"""An adapter in PEFT's form, written tensor by tensor: how large it gets is known at the end."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from ckptctl.errors import RefusedError, spell_option, storage_errors
from ckptctl.formats.peft import CONFIG, WEIGHTS
from ckptctl.ops.adapter_targets import TARGETS, WEIGHT, as_parameter, patterns, target_modules
from ckptctl.storage.file_system import sync_directory
from ckptctl.storage.safetensors_header import encode_header

DIGITS = 48
"""Characters that offsets and shapes of one tensor may need beyond those of an empty one."""
_NUMBERED = re.compile(r"\.\d+\.")


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
    ranks: Mapping[str, int],
    keys: Collection[str],
    saved: Sequence[str],
    stacks: Mapping[str, int],
    *,
    experts: bool,
    generates: bool,
) -> dict[str, object]:
    """Return the adapter_config.json of an adapter whose factors are scaled by 1.

    Args:
        ranks: By module.
        keys: All tensors of the model.
        saved: Modules that the adapter has as a whole.
        stacks: The ranks of parameters that hold experts.
        experts: Whether the model has such parameters at all.
        generates: Whether it is one that writes text.
    """
    single = {module for module in ranks if experts and as_parameter(module)}
    parameters = {**{module + WEIGHT: ranks[module] for module in single}, **stacks}
    modules = {module: rank for module, rank in ranks.items() if module not in single}
    of_all = {**modules, **parameters}
    main = Counter(of_all.values()).most_common(1)[0][0] if of_all else 1
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if generates else None,
        "base_model_name_or_path": None,
        "r": main,
        "lora_alpha": main,
        **patterns({name: (rank, rank) for name, rank in of_all.items()}, (main, main)),
        "target_modules": target_modules(modules, keys),
        **({TARGETS: sorted(parameters)} if parameters else {}),
        "modules_to_save": list(saved) or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_dropout": 0.0,
        "use_dora": False,
        "use_rslora": False,
    }


# ------------------------------------------------------- modules that PEFT saves as a whole
#
# PEFT looks for every tensor of such a module in the adapter, those of the modules inside of it
# included (``AuxiliaryTrainingWrapper.adapter_state_dict_load_map``).


def module_of(key: str) -> str:
    """Return the module of a parameter."""
    return key.rpartition(".")[0]


def outermost(modules: Iterable[str]) -> tuple[str, ...]:
    """Return those of *modules* that are in none of the others."""
    found = dict.fromkeys(modules)
    return tuple(one for one in found if not is_inside(one, found))


def is_inside(key: str, modules: Collection[str]) -> bool:
    """Return whether a tensor, or a module, is part of one of *modules*."""
    steps = key.split(".")
    return any(".".join(steps[:end]) in modules for end in range(1, len(steps)))


def require_module(
    name: str, names: Iterable[str], linear: Collection[str], tied: Collection[str], where: str
) -> None:
    """Refuse a tensor that PEFT cannot save: it has no module that could be saved as a whole."""
    module = module_of(name)
    what = f"`{name}` differs, but PEFT can only save whole modules"
    hint = f"pass {spell_option('--others leave-out')} to keep the tensor of the base"
    if name in tied:
        what = f"`{name}` differs, and other tensors are tied to it"
        why = "PEFT unties them when it saves one, and the others keep the values of the base"
        hint = f"convert both models with {spell_option('--untie')} first, or {hint}"
    elif not module:
        why = "it belongs to the model itself, not to a module"
    elif f"{module}.weight" in linear:
        why = f"`{module}.weight` of the same module has factors"
    elif any(
        _NUMBERED.search(one.removeprefix(module)) for one in names if is_inside(one, {module})
    ):
        why = f"`{module}` contains whole layers"
    else:
        return
    raise RefusedError(what, where=where, why=why, hint=hint)
