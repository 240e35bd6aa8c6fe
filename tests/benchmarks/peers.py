"""The peers' own ways to convert: ``python -m tests.benchmarks.peers WAY SRC DST``."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any


def dcp_torch(source: Path, target: Path) -> None:
    """``torch.distributed.checkpoint.format_utils.dcp_to_torch_save``."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(source, target)


def torch_dcp(source: Path, target: Path) -> None:
    """``torch.distributed.checkpoint.format_utils.torch_save_to_dcp``."""
    from torch.distributed.checkpoint.format_utils import torch_save_to_dcp

    torch_save_to_dcp(source, target)


def hf_dcp(source: Path, target: Path) -> None:
    """``dcp.load`` through ``HuggingFaceStorageReader``, then ``dcp.save``."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_saver import save

    state = _load(HuggingFaceStorageReader(str(source)))
    save(state, storage_writer=FileSystemWriter(target), no_dist=True)


def dcp_hf(source: Path, target: Path) -> None:
    """``dcp.load``, then ``dcp.save`` through ``HuggingFaceStorageWriter``."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    state = _load(FileSystemReader(source))
    writer = HuggingFaceStorageWriter(str(target), dict.fromkeys(state, 1))
    save(state, storage_writer=writer, no_dist=True)


def shards_torch(source: Path, target: Path, files: int = 1) -> None:
    """``torch.distributed.checkpoint._consolidate_hf_safetensors``, with two threads."""
    from torch.distributed.checkpoint._consolidate_hf_safetensors import (
        consolidate_safetensors_files,
    )

    target.mkdir()
    consolidate_safetensors_files(str(source), str(target), _assign_files(source, files), 2)


def shards_nemo(source: Path, target: Path, files: int = 1) -> None:
    """``tools/offline_hf_consolidation.py`` of NeMo Automodel: its function and its threads."""
    peer = import_module(
        "nemo_automodel.components.checkpoint._backports.consolidate_hf_safetensors"
    )
    target.mkdir()
    indices = _assign_files(source, files)
    peer.consolidate_safetensors_files_on_every_rank(
        str(source), str(target), indices, num_threads=5
    )


def shards_torch_checkpointing(source: Path, target: Path, files: int = 1) -> None:
    """``torch_checkpointing.hf.consolidation``, without O_DIRECT, which tmpfs may not support."""
    peer = import_module("torch_checkpointing.hf.consolidation")
    storage = import_module("torch_checkpointing.storage.filesystem")
    target.mkdir()
    peer.consolidate_hf_safetensors_checkpoint(
        str(source),
        output_dir=str(target),
        fqn_to_index_mapping=_assign_files(source, files),
        storage_config=storage.LocalFileSystemStorageConfig(use_direct_io=False),
    )


def _assign_files(source: Path, files: int) -> dict[str, int]:
    """Map tensor names to the numbers of *files* output files of about the same size."""
    from safetensors import safe_open

    sizes: dict[str, int] = {}
    for file in sorted(source.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  # it is no mapping
                size = math.prod(opened.get_slice(name).get_shape())
                sizes[name] = sizes.get(name, 0) + size
    indices, end, total = {}, 0, sum(sizes.values())
    for name, size in sizes.items():
        end += size
        indices[name] = min(files, 1 + (end - 1) * files // total)
    return indices


def hf_mcore(source: Path, target: Path) -> None:
    """Megatron-Bridge's ``AutoBridge``, then ``dist_checkpointing.save`` of Megatron-Core."""
    from tests.benchmarks.bridge import convert

    convert(source, target)


def zero_hf(source: Path, target: Path) -> None:
    """``deepspeed.utils.zero_to_fp32``, to safetensors."""
    peer = import_module("deepspeed.utils.zero_to_fp32")
    peer.convert_zero_checkpoint_to_fp32_state_dict(
        str(source), str(target), safe_serialization=True
    )


def _load(reader: Any) -> dict[str, Any]:
    import torch
    from torch.distributed.checkpoint.state_dict_loader import load

    entries = reader.read_metadata().state_dict_metadata
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
    }
    load(state, storage_reader=reader, no_dist=True)
    return state


@dataclass(frozen=True)
class Way:
    """How one contestant converts.

    Attributes:
        run: Function of the paths of the source and of the target.
        contestant: Name in the tables.
        package: Module of the trainers' Python that it needs, or None for PyTorch.
    """

    run: Callable[[Path, Path], None]
    contestant: str = "torch"
    package: str | None = None


WAYS = {
    "dcp-torch": Way(dcp_torch),
    "torch-dcp": Way(torch_dcp),
    "hf-dcp": Way(hf_dcp),
    "dcp-hf": Way(dcp_hf),
    "hf-mcore": Way(hf_mcore, "megatron-bridge", "megatron.bridge"),
    "zero-hf": Way(zero_hf, "deepspeed", "deepspeed"),
}
for _files in (1, 4):
    WAYS |= {
        f"shards-torch-{_files}": Way(partial(shards_torch, files=_files)),
        f"shards-nemo-{_files}": Way(
            partial(shards_nemo, files=_files), "nemo-automodel", "nemo_automodel"
        ),
        f"shards-tc-{_files}": Way(
            partial(shards_torch_checkpointing, files=_files),
            "torch_checkpointing",
            "torch_checkpointing",
        ),
    }

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    WAYS[sys.argv[1]].run(Path(sys.argv[2]), Path(sys.argv[3]))
