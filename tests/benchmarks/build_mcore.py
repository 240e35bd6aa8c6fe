"""Write what Megatron-Core saves of DeepSeek-V3 on many ranks, with sparse data.

``python -m tests.benchmarks.build_mcore FOLDER RANKS [EXPERT_TENSOR [LAYERS]]``: layers apart, cut
for tensor parallelism of 8; each expert by itself, cut for EXPERT_TENSOR (1). Chunks go to ranks in
turn, as in a fully parallel save. There are 48,825 of them, 182,457 with an EXPERT_TENSOR of 4, and
30,123 objects of Transformer Engine.
"""

from __future__ import annotations

import io
import json
import pickle
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from tests.checkpoints.mcore import mark

EDGE = 4096
TENSOR = 8
DENSE = 3
WIDTH, EXPERTS, VOCAB = 7168, 256, 129280
CONFIG = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": DENSE,
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
}
Shape = tuple[int, ...]


class Part(NamedTuple):
    """A chunk; one without sizes is an object."""

    name: str
    offsets: Shape | None
    sizes: Shape | None


def tensors(layers: int, expert_tensor: int) -> Iterator[tuple[str, Shape, Shape]]:
    """Yield name, shape and cuts along each dimension."""
    yield "embedding.word_embeddings.weight", (VOCAB, WIDTH), (TENSOR, 1)
    yield "output_layer.weight", (VOCAB, WIDTH), (TENSOR, 1)
    yield "decoder.final_layernorm.weight", (WIDTH,), (1,)
    for layer in range(layers):
        inside = f"decoder.layers.{layer}."
        yield f"{inside}input_layernorm.weight", (WIDTH,), (1,)
        yield from _attention(f"{inside}self_attention.")
        if layer < DENSE:
            yield f"{inside}mlp.linear_fc1.layer_norm_weight", (WIDTH,), (1,)
            yield from _gated(f"{inside}mlp.", 18432)
            continue
        yield f"{inside}pre_mlp_layernorm.weight", (WIDTH,), (1,)
        yield f"{inside}mlp.router.weight", (EXPERTS, WIDTH), (1, 1)
        yield f"{inside}mlp.router.expert_bias", (EXPERTS,), (1,)
        yield from _gated(f"{inside}mlp.shared_experts.", 2048)
        experts = f"{inside}mlp.experts.experts.linear_fc"
        yield f"{experts}1.weight", (EXPERTS, 4096, WIDTH), (EXPERTS, 2 * expert_tensor, 1)
        yield f"{experts}2.weight", (EXPERTS, WIDTH, 2048), (EXPERTS, 1, expert_tensor)


def _attention(inside: str) -> Iterator[tuple[str, Shape, Shape]]:
    yield f"{inside}linear_proj.weight", (WIDTH, 16384), (1, TENSOR)
    yield f"{inside}linear_q_down_proj.weight", (1536, WIDTH), (TENSOR, 1)
    yield f"{inside}linear_q_up_proj.weight", (24576, 1536), (TENSOR, 1)
    yield f"{inside}linear_q_up_proj.layer_norm_weight", (1536,), (1,)
    yield f"{inside}linear_kv_down_proj.weight", (576, WIDTH), (TENSOR, 1)
    yield f"{inside}linear_kv_up_proj.weight", (32768, 512), (TENSOR, 1)
    yield f"{inside}linear_kv_up_proj.layer_norm_weight", (512,), (1,)


def _gated(inside: str, hidden: int) -> Iterator[tuple[str, Shape, Shape]]:
    yield f"{inside}linear_fc1.weight", (2 * hidden, WIDTH), (2 * TENSOR, 1)
    yield f"{inside}linear_fc2.weight", (WIDTH, hidden), (1, TENSOR)


def _parts(name: str, shape: Shape, cuts: Shape) -> Iterator[Part]:
    sizes = tuple(size // count for size, count in zip(shape, cuts, strict=True))
    for place in product(*map(range, cuts)):
        yield Part(name, tuple(n * size for n, size in zip(place, sizes, strict=True)), sizes)
    module, _, kind = name.rpartition(".")
    if ".linear_" in module and kind == "weight":
        count = EXPERTS if ".experts.experts." in module else 1
        for number in range(count):
            yield Part(f"{module}._extra_state/shard_{number}_{count}", None, None)


def build(folder: Path, world: int, expert_tensor: int = 1, layers: int = 61) -> None:
    """Write a checkpoint of *world* ranks; only its metadata takes room."""
    folder.mkdir(parents=True)
    entries: dict[str, Any] = {}
    held: list[list[Part]] = [[] for _ in range(world)]
    count = 0
    for name, shape, cuts in tensors(layers, expert_tensor):
        kind = TensorProperties(dtype=torch.bfloat16)
        entries[name] = TensorStorageMetadata(kind, torch.Size(shape), [])
        for part in _parts(name, shape, cuts):
            held[count % world].append(part)
            count += 1
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for rank, parts in enumerate(held):
        # Each rank sends its own: what torch unpickles shares nothing with others.
        _add(folder / f"__{rank}_0.distcp", pickle.loads(pickle.dumps(parts)), entries, storage)
    with (folder / ".metadata").open("wb") as file:
        pickle.dump(Metadata(entries, None, storage, StorageMeta(), "2.6"), file)
    mark(folder)
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": layers}))


def _add(
    path: Path,
    parts: list[Part],
    entries: dict[str, Any],
    storage: dict[MetadataIndex, _StorageInfo],
) -> None:
    """Write the items of a rank, with holes for their elements, and what metadata says of them."""
    end = 0
    with path.open("wb") as file:
        for name, begin, sizes in parts:
            length, head, tail = _item(sizes)
            for at, content in ((end, head), (end + length - len(tail), tail)):
                file.seek(at)
                file.write(content)
            if begin is None or sizes is None:
                index = MetadataIndex(name)
                entries[name] = BytesStorageMetadata()
            else:
                offsets, chunks = torch.Size(begin), entries[name].chunks
                index = MetadataIndex(name, offsets, len(chunks))
                chunks.append(ChunkStorageMetadata(offsets, torch.Size(sizes)))
            storage[index] = _StorageInfo(path.name, end, length)
            end += length


_KNOWN: dict[Shape | None, tuple[int, bytes, bytes]] = {}


def _item(sizes: Shape | None) -> tuple[int, bytes, bytes]:
    """Return the length of an item, its first and its last bytes."""
    if sizes not in _KNOWN:
        buffer = io.BytesIO()
        torch.save(None if sizes is None else torch.zeros(sizes, dtype=torch.bfloat16), buffer)
        whole = buffer.getvalue()
        _KNOWN[sizes] = len(whole), whole[:EDGE], whole[-min(EDGE, len(whole)) :]
    return _KNOWN[sizes]


if __name__ == "__main__":
    build(Path(sys.argv[1]), *map(int, sys.argv[2:]))
