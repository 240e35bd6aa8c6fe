"""torch's own ways to convert: ``python -m tests.benchmarks.peers WAY SRC DST``."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
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


def shards_hf(source: Path, target: Path) -> None:
    """``torch.distributed.checkpoint._consolidate_hf_safetensors``, with two threads."""
    from safetensors import safe_open
    from torch.distributed.checkpoint._consolidate_hf_safetensors import (
        consolidate_safetensors_files,
    )

    names: set[str] = set()
    for file in source.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            names |= set(opened.keys())
    target.mkdir()
    consolidate_safetensors_files(str(source), str(target), dict.fromkeys(names, 1), 2)


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


WAYS: dict[str, Callable[[Path, Path], None]] = {
    "dcp-torch": dcp_torch,
    "torch-dcp": torch_dcp,
    "hf-dcp": hf_dcp,
    "dcp-hf": dcp_hf,
    "shards-hf": shards_hf,
    "zero-hf": zero_hf,
}

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    WAYS[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
