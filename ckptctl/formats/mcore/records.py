"""What trainers record of the model beside Megatron-Core's checkpoint.

::

    iter_0000010/run_config.yaml              Megatron-Bridge
    iter_0000010/args.json, or above it       ms-swift
    step=10-last/context/model.yaml, io.json  NeMo 2, beside weights/
    actor/transformer_config.json             verl, beside dist_ckpt/

Sources: ``megatron/bridge/training/utils/checkpoint_utils.py``; ``nemo/lightning/io/mixin.py``;
``verl/utils/megatron_utils.py``; ms-swift's ``megatron/arguments``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from ckptctl.errors import UnsupportedError
from ckptctl.formats.mcore.fiddle_json import model_in
from ckptctl.formats.mcore.files import RUN_CONFIG
from ckptctl.formats.shared.findings import Faults
from ckptctl.storage.files import source_files
from ckptctl.storage.json_reader import read_json
from ckptctl.storage.paths import is_there
from ckptctl.storage.yaml_text import LARGEST, parsed
from ckptctl.units import counted

ABOVE, IO = "../", "io.json"
LARGEST_JSON = 4 << 20
"""So many bytes of JSON are read: ``io.json`` has each object that NeMo made."""
FILES = (
    RUN_CONFIG,
    "args.json",
    f"{ABOVE}args.json",
    f"{ABOVE}transformer_config.json",
    f"{ABOVE}context/model.yaml",
    f"{ABOVE}context/{IO}",
)
"""As seen from the checkpoint; the last one says less than the one before it."""


def records(
    folder: Path, arguments: Mapping[str, Mapping[str, object]], faults: Faults
) -> dict[str, Mapping[str, object]]:
    """Return what is recorded of the model whose checkpoint is *folder*, by file.

    *arguments* are the trainer's, likewise.
    """
    found = {name: told for name, told in arguments.items() if told}
    for name in FILES:
        file = folder.parent / name.removeprefix(ABOVE) if name.startswith(ABOVE) else folder / name
        if is_there(file) and not (file.name == IO and FILES[-2] in found):
            record = faults.read(file.name, _reader(file.parent))
            if record:
                found[name] = record
    return found


def _reader(home: Path) -> Callable[[str], Mapping[str, object]]:
    def read(name: str) -> Mapping[str, object]:
        with source_files(home) as files:
            where = str(home / name)
            if name.endswith(".json"):
                content = read_json(files, name, LARGEST_JSON, constants=True)
                if isinstance(content, dict):
                    return model_in(content, where) if name == IO else content
                raise UnsupportedError("this JSON is not a configuration", where=where)
            size = files.size(name)
            if size > LARGEST:
                raise UnsupportedError(
                    "this YAML file is too large for a configuration",
                    where=where,
                    why=f"it has {counted(size, 'byte')}; the limit is {LARGEST:,}",
                )
            return parsed(files.read(name, 0, size).decode(errors="replace"), where)

    return read
