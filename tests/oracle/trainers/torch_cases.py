"""Which of torch's parallelisms run on how many ranks, and with what they are saved."""

from __future__ import annotations

WRITERS = ("dcp", "async", "rank_local", "hf_shards", "hf_floats", "experimental", "files")


def kinds(world: int) -> tuple[str, ...]:
    """Return the kinds of ``jobs.torch_models`` that *world* ranks can be."""
    squares = ("hsdp", "fsdp2_tp") if world == 4 else ()
    flat = ("fsdp1", "fsdp1_mesh") if world > 1 else ()
    return ("fsdp2", "fsdp2_bf16", "tp", *flat, *squares)


def writers(kind: str) -> tuple[str, ...]:
    """Return what can save *kind*: only two of them know ShardedTensors and work without CUDA."""
    return ("dcp", "rank_local", "files") if kind == "fsdp1" else WRITERS
