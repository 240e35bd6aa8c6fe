"""Write Llama-shaped bf16 checkpoints of a wanted size, with stock writers and little memory.

Every tensor is a private mapping of one template file, so the memory needed is that of the
largest tensor. Run as ``python -m tests.benchmarks.build KIND FOLDER BYTES``; a process of its
own, because who measures must not have torch loaded.
"""

from __future__ import annotations

import json
import math
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from tests.benchmarks.families import KINDS, WIDE, config_for, shapes_for
from tests.checkpoints.adapters import PROJECTIONS, random_adapter, save_peft
from tests.checkpoints.llama import LlamaSpec, hf_config
from tests.checkpoints.meta import meta_params
from tests.checkpoints.names import rename
from tests.gloo import run_on_ranks

BIG = LlamaSpec(hidden=2048, heads=32, kv_heads=8, vocab=32000, ffn=8192)
SMALL = LlamaSpec(hidden=256, heads=8, kv_heads=8, vocab=4000, ffn=1024)
MANY = LlamaSpec(hidden=16, heads=4, kv_heads=2, vocab=32, ffn=32)
SHARD = 500_000_000
MAPPED = 1 << 20
SCALES = "_scale_inv"
Shapes = Mapping[str, tuple[int, ...]]


def spec_for(size: str) -> LlamaSpec:
    """Return the model for *size*: bytes, or ``100000t`` for a number of small tensors."""
    if size.endswith("t"):
        return replace(MANY, layers=max(1, (int(size[:-1]) - 3) // 9))
    base = BIG if int(size) >= WIDE else SMALL
    fixed = size_of(replace(base, layers=0).shapes())
    layer = size_of(replace(base, layers=1).shapes()) - fixed
    return replace(base, layers=max(1, round((int(size) - fixed) / layer)))


def build(kind: str, folder: Path, size: str) -> None:
    """Write one source checkpoint.

    Args:
        kind: ``hf``, ``dcp``, ``torch``, ``meta1``, ``meta2``, ``fp8`` (``hf`` with scales for
            blocks), ``lora`` (``hf`` with an ``adapter`` in it) or ``assets`` (only the
            configuration); or one of :mod:`tests.benchmarks.families`.
        folder: Created; ``torch`` writes ``model.pt`` in it.
        size: See :func:`spec_for`.
    """
    folder.mkdir(parents=True)
    if kind in KINDS:
        _build_family(kind, folder, int(size))
        return
    spec = spec_for(size)
    config = hf_config(spec, "bfloat16")
    if kind == "fp8":
        config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    if kind in ("assets", "hf", "fp8", "lora"):
        (folder / "config.json").write_text(json.dumps(config))
    template = template_for(spec.shapes(), folder.parent / "template.bin")
    if kind == "fp8":
        _build_hf(folder, _quantised(spec.shapes()), template)
    elif kind in ("hf", "lora"):
        _build_hf(folder, spec.shapes(), template)
        if kind == "lora":
            adapter = random_adapter(tensors(spec.shapes(), template), rank=16)
            save_peft(folder / "adapter", adapter)
    elif kind == "torch":
        torch.save(tensors(spec.shapes(), template), folder / "model.pt")
    elif kind == "dcp":
        world = 1 if size.endswith("t") else 2
        run_on_ranks(
            _build_dcp, [world], str(folder), dict(spec.shapes()), str(template), timeout=1800
        )
    elif kind.startswith("meta"):
        ranks = int(kind.removeprefix("meta"))
        for rank in range(ranks):
            shard = tensors(_meta_shapes(spec, ranks), template)
            torch.save(shard, folder / f"consolidated.{rank:02d}.pth")
        (folder / "params.json").write_text(json.dumps(meta_params(config, ranks)))


def _build_family(kind: str, folder: Path, size: int) -> None:
    shapes = shapes_for(kind, size)
    template = template_for(shapes, folder.parent / "template.bin")
    if kind.endswith("-hf"):
        (folder / "config.json").write_text(json.dumps(config_for(kind, shapes)))
        _build_hf(folder, shapes, template)
    else:
        _build_dcp(0, 1, str(folder), shapes, str(template))


def tensors(shapes: Shapes, template: Path) -> dict[str, torch.Tensor]:
    """Return tensors of *shapes*, each with a storage of its own: float8 where it has scales."""
    dtypes = dict.fromkeys(shapes, torch.bfloat16)
    for name in [name for name in shapes if name.endswith(SCALES)]:
        dtypes |= {name: torch.float32, name.removesuffix(SCALES): torch.float8_e4m3fn}
    return {name: tensor(shape, template, dtypes[name]) for name, shape in shapes.items()}


def _quantised(shapes: Shapes) -> Shapes:
    found = dict(shapes)
    for name, shape in shapes.items():
        if name.endswith(tuple(f"{module}.weight" for module in PROJECTIONS)):
            found[name + SCALES] = tuple(-(-size // 128) for size in shape)
    return found


def tensor(
    shape: tuple[int, ...], template: Path, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """Return a tensor of bytes of *template*."""
    nbytes = math.prod(shape) * dtype.itemsize
    # 100,000 mappings would be more than a process may have.
    mapped = torch.from_file(str(template), shared=False, size=nbytes, dtype=torch.uint8)
    found = mapped.view(dtype).view(shape)
    return found if nbytes >= MAPPED else found.clone()


def _build_hf(folder: Path, shapes: Shapes, template: Path) -> None:
    from safetensors.torch import save_file

    shards = list(_shards(shapes))
    weight_map: dict[str, str] = {}
    for index, shard in enumerate(shards):
        file = f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors"
        save_file(tensors(shard, template), folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    index_file = {"metadata": {"total_size": size_of(shapes)}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index_file))


def _shards(shapes: Shapes) -> Iterator[dict[str, tuple[int, ...]]]:
    shard: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        if shard and size_of(shard | {name: shape}) > SHARD:
            yield shard
            shard = {}
        shard[name] = shape
    yield shard


def _build_dcp(rank: int, world: int, folder: str, shapes: Shapes, template: str) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    if world == 1:
        save(tensors(shapes, Path(template)), checkpoint_id=folder)
        return
    mesh = init_device_mesh("cpu", (world,))
    state = {}
    for name, shape in shapes.items():
        local = tensor((shape[0] // world, *shape[1:]), Path(template))
        state[name] = DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=local.stride()
        )
    save(state, checkpoint_id=folder)


def _meta_shapes(spec: LlamaSpec, ranks: int) -> dict[str, tuple[int, ...]]:
    empty = {name: torch.empty(shape, device="meta") for name, shape in spec.shapes().items()}
    found = {}
    for name, value in rename(empty, "hf", "meta").items():
        rows, *columns = value.shape
        if name.endswith(("wo.weight", "w2.weight")):
            columns = [columns[0] // ranks]
        elif columns:
            rows //= ranks
        found[name] = (rows, *columns)
    return found


def size_of(shapes: Shapes) -> int:
    return 2 * sum(math.prod(shape) for shape in shapes.values())


def template_for(shapes: Shapes, path: Path, times: int = 1) -> Path:
    """Write random bytes, as many as the largest tensor has, if they are not there."""
    nbytes = times * max(size_of({name: shape}) for name, shape in shapes.items())
    if not path.exists() or path.stat().st_size < nbytes:
        values = (torch.randn(1 << 20) * 0.02).bfloat16().view(torch.uint8)
        block = (values & 0xBF).numpy().tobytes()  # no byte is a NaN of float8
        path.write_bytes(block * -(-nbytes // len(block)))
    return path


if __name__ == "__main__":
    from tests.benchmarks import build as importable  # ranks find functions by module name

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    importable.build(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
