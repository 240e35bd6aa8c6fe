"""Checkpoints of every format, readers that are not ours, and what a refusal has to leave alone."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptctl
from ckptctl import formats
from ckptctl.errors import CkptError
from ckptctl.families import family
from ckptctl.tree import TreePath
from tests.checkpoints import load_any_reference, rename, save_dcp, save_hf, save_meta, save_torch
from tests.checkpoints.readers import READERS


def holds_llama(name: str) -> bool:
    """Return whether the format called *name* can hold a whole Llama."""
    known = formats.get_format(name)
    return not known.adapters and known.layout in (None, *family("llama3").layouts)


READ = {*READERS, "meta"}
"""Formats that :func:`read` reads."""
INNER = ("mcore",)
"""Formats whose files lie in a folder of the output: tests/contract/test_mcore.py."""
WRITABLE = tuple(
    name for name in formats.list_writable_names() if holds_llama(name) and name in READ
)
SIDE = {
    "generation_config.json": b'{"eos_token_id": [2, 3]}\n',
    "tokenizer.json": '{"ünï": 1}'.encode(),
    "tokenizer.model": bytes(range(256)),
}
_COLUMNS = ("wo", "w2")
_ROWS = ("wq", "wk", "wv", "w1", "w3", "output")


def single_file(name: str) -> bool:
    """Return whether the format called *name* is one file."""
    return formats.get_writable_format(name).single_file


def place(folder: Path, name: str, stem: str = "out") -> Path:
    """Return a fitting path for an output of format *name*."""
    return folder / (f"{stem}.pt" if single_file(name) else stem)


def save_side_files(folder: Path, config: Mapping[str, Any] | None) -> None:
    for name, content in SIDE.items():
        (folder / name).write_bytes(content)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config, indent=2))


def build(
    name: str, folder: Path, state: dict[str, torch.Tensor], config: dict[str, Any] | None
) -> Path:
    """Write *state*, under Hugging Face names, as format *name* with other people's code.

    A format that no builder knows is made by converting from dcp, which has every dtype.
    """
    path = place(folder, name, f"source-{name}")
    match name:
        case "hf":
            save_hf(path, state, config, shards=3)
        case "meta":
            assert config is not None
            save_meta(path, state, config, mp=2)
        case "dcp":
            save_dcp(path, state, thread_count=2, single_file_per_rank=False)
        case "torch":
            save_torch(path, state)
        case _:
            ckptctl.convert(build("dcp", folder / "made", state, config), path, to=name)
    if path.is_dir():
        save_side_files(path, config if name != "meta" else None)
    return path


def read(path: Path, config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return a Llama under Hugging Face names, read without ckptctl."""
    if path.is_dir() and list(path.glob("consolidated.*.pth")):
        return from_meta(join_meta(path, config), config)
    found = load_any_reference(path)
    return from_meta(found, config) if "tok_embeddings.weight" in found else found


def join_meta(path: Path, config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Merge model-parallel shards as ``fairscale``'s layers divide them."""
    shards = [torch.load(file, weights_only=True) for file in sorted(path.glob("*.pth"))]
    llama2 = config["num_key_value_heads"] == config["num_attention_heads"]
    merged = {}
    for name, first in shards[0].items():
        part, parts = name.split(".")[-2], [shard[name] for shard in shards]
        if part in _COLUMNS or (part == "tok_embeddings" and llama2):
            merged[name] = torch.cat(parts, 1)
        elif part in _ROWS or part == "tok_embeddings":
            merged[name] = torch.cat(parts, 0)
        else:
            assert all(torch.equal(first, other) for other in parts)
            merged[name] = first
    return merged


def from_meta(state: dict[str, torch.Tensor], config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return Meta's whole tensors as transformers has them."""
    state = {name: value for name, value in state.items() if name != "rope.freqs"}
    renamed = rename(state, "meta", "hf")
    for name, value in renamed.items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            query = name.endswith("q_proj.weight")
            heads = config["num_attention_heads" if query else "num_key_value_heads"]
            renamed[name] = to_halves(value, heads)
    if config.get("tie_word_embeddings") and "lm_head.weight" in renamed:
        assert torch.equal(renamed["lm_head.weight"], renamed["model.embed_tokens.weight"])
        del renamed["lm_head.weight"]
    return renamed


def to_halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Return rows from ``(h r p) d``, as Meta has them, as ``(h p r) d``."""
    rows, width = weight.shape
    split = weight.view(heads, rows // heads // 2, 2, width)
    return split.transpose(1, 2).reshape(rows, width).contiguous()


def snapshot(path: TreePath) -> dict[str, str]:
    """Return the content hash of every file, link and directory at and below *path*."""
    found = {}
    for item in [path, *sorted(path.rglob("*"))]:
        kind = "link" if item.is_symlink() else "directory" if item.is_dir() else "file"
        data = item.read_bytes() if kind == "file" and item.is_file() else b""
        found[str(item.relative_to(path))] = f"{kind} {hashlib.sha256(data).hexdigest()}"
    return found


@contextmanager
def refused(source: Path, target: Path, *codes: int) -> Iterator[pytest.ExceptionInfo[CkptError]]:
    """Expect one of our errors with one of *codes*, and nothing changed or left anywhere."""
    around = {folder: snapshot(folder) for folder in {source.parent, target.parent}}
    with pytest.raises(CkptError) as caught:
        yield caught
    error = caught.value
    assert error.exit_code in codes, (type(error).__name__, error.to_json())
    for folder, before in around.items():
        assert snapshot(folder) == before


def message(error: CkptError) -> str:
    """Return all that a user would read."""
    return " | ".join(filter(None, (error.what, error.where, error.why, error.hint)))
