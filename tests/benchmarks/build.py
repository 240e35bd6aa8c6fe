"""Write Llama-shaped bf16 checkpoints of a wanted size, with stock writers and little memory.

Every tensor is a private mapping of one template file, so the memory needed is that of the
largest tensor. For a process of its own: who measures processes must not have torch loaded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_saver import save

from tests.benchmarks.build_shards import FORMS, write
from tests.benchmarks.families import KINDS, WIDE, config_for, shapes_for
from tests.benchmarks.quantized_sources import KINDS as QUANTIZED
from tests.benchmarks.quantized_sources import named
from tests.benchmarks.template import Shapes, size_of, template_for, tensor
from tests.checkpoints.adapters import PROJECTIONS, random_adapter, save_peft
from tests.checkpoints.llama import LlamaSpec, hf_config
from tests.checkpoints.mcore import mark
from tests.checkpoints.meta import meta_params
from tests.checkpoints.names import rename

BIG = LlamaSpec(hidden=2048, heads=32, kv_heads=8, vocab=32000, ffn=8192)
SMALL = LlamaSpec(hidden=256, heads=8, kv_heads=8, vocab=4000, ffn=1024)
MANY = LlamaSpec(hidden=16, heads=4, kv_heads=2, vocab=32, ffn=32)
SHARD = 500_000_000


def spec_for(size: str) -> LlamaSpec:
    """Return the model for *size*: bytes, or ``100000t`` for a number of small tensors."""
    if size.endswith("t"):
        return replace(MANY, layers=max(1, (int(size[:-1]) - 3) // 9))
    base = BIG if int(size) >= WIDE else SMALL
    fixed = size_of(replace(base, layers=0).shapes())
    layer = size_of(replace(base, layers=1).shapes()) - fixed
    return replace(base, layers=max(1, round((int(size) - fixed) / layer)))


def build(kind: str, folder: str | Path, size: str) -> None:
    """Write one source checkpoint.

    Args:
        kind: ``hf``, ``torch``, ``meta1``, ``meta2``, ``mcore``, ``gguf``, ``lora`` (``hf`` with
            an ``adapter`` in it) or ``assets`` (the configuration); one of
            :mod:`tests.benchmarks.quantized_sources` (``hf``), :mod:`tests.benchmarks.families` or
            :mod:`tests.benchmarks.build_shards`.
        folder: Created; ``torch`` writes ``model.pt`` in it.
        size: See :func:`spec_for`.
    """
    torch.set_num_threads(1)
    folder = Path(folder)
    folder.mkdir(parents=True)
    shapes, config = model_for(kind, size)
    template = template_for(shapes, folder.parent / "template.bin")
    if kind in QUANTIZED:
        (folder / "config.json").write_text(json.dumps(config))
        _build_hf(folder, _quantized(kind, shapes, template))
    elif kind in ("assets", "hf", "lora") or kind.endswith("-hf"):
        (folder / "config.json").write_text(json.dumps(config))
        if kind != "assets":
            _build_hf(folder, tensors(shapes, template))
        if kind == "lora":
            adapter = random_adapter(tensors(shapes, template), rank=16)
            save_peft(folder / "adapter", adapter)
    elif kind == "torch":
        torch.save(tensors(shapes, template), folder / "model.pt")
    elif kind.startswith("meta"):
        ranks = int(kind.removeprefix("meta"))
        for rank in range(ranks):
            shard = tensors(_meta_shapes(shapes, ranks), template)
            torch.save(shard, folder / f"consolidated.{rank:02d}.pth")
        (folder / "params.json").write_text(json.dumps(meta_params(config, ranks)))
    elif kind == "gguf":
        _build_gguf(folder / "model.gguf", config, tensors(shapes, template))
    elif kind == "mcore":
        save(tensors(_mcore_shapes(config), template), checkpoint_id=folder)
        mark(folder)
    elif kind in FORMS and not (kind == "dcp" and size.endswith("t")):
        write(kind, folder, shapes, template)
    else:
        save(tensors(shapes, template), checkpoint_id=folder)


def model_for(kind: str, size: str) -> tuple[Shapes, dict[str, Any]]:
    """Return the tensors of a source, and the ``config.json`` of such a model."""
    if kind in KINDS:
        shapes = shapes_for(kind, int(size))
        return shapes, config_for(kind, shapes)
    spec = spec_for(size)
    config = hf_config(spec, "bfloat16")
    if kind not in QUANTIZED:
        return spec.shapes(), config
    quantization = QUANTIZED[kind].config
    return spec.shapes(), {**config, "quantization_config": quantization}


def tensors(shapes: Shapes, template: Path) -> dict[str, torch.Tensor]:
    """Return tensors of *shapes*, each with a storage of its own."""
    return {name: tensor(shape, template) for name, shape in shapes.items()}


def _quantized(kind: str, shapes: Shapes, template: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a quantized model, of whose plain tensors *shapes* are."""
    found = dict[str, torch.Tensor]()
    for name, shape in shapes.items():
        if name.endswith(tuple(f"{module}.weight" for module in PROJECTIONS)):
            stored = QUANTIZED[kind].stored(*shape)
            found |= {
                named(name, end): tensor(size, template, dtype)
                for end, (size, dtype) in stored.items()
            }
            if QUANTIZED[kind].stores_shape:
                found[named(name, "_shape")] = torch.tensor(shape)
        else:
            found[name] = tensor(shape, template)
    return found


def _build_gguf(file: Path, config: Mapping[str, Any], every: Mapping[str, torch.Tensor]) -> None:
    """Write matrices in Q4_1, the embedding and the head in Q8_0, with the package's writer."""
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(file, "llama")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    kinds = gguf.GGMLQuantizationType
    for key, value in every.items():
        name = names.get_name(key, try_suffixes=(".weight",))
        array = value.float().numpy()
        if array.ndim == 1:
            writer.add_tensor(name, array)
        else:
            kind = kinds.Q4_1 if "layers" in key else kinds.Q8_0
            data = gguf.quantize(np.ascontiguousarray(array), kind)
            writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _build_hf(folder: Path, every: Mapping[str, torch.Tensor]) -> None:
    from safetensors.torch import save_file

    shapes = {name: (value.nbytes // 2,) for name, value in every.items()}
    shards = list(_shards(shapes))
    weight_map: dict[str, str] = {}
    for index, shard in enumerate(shards):
        file = f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors"
        held = {name: every[name] for name in shard}
        save_file(held, folder / file, metadata={"format": "pt"})
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


def _mcore_shapes(config: dict[str, Any]) -> Shapes:
    """Return the tensors of Megatron-Core's GPT model: fused, layers apart."""
    names = ("hidden_size", "intermediate_size", "vocab_size")
    width, hidden, vocab = (config[name] for name in names)
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    found: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": (vocab, width)}
    for layer in range(config["num_hidden_layers"]):
        inside = f"decoder.layers.{layer}."
        attention, mlp = f"{inside}self_attention.linear_", f"{inside}mlp.linear_"
        found[f"{attention}qkv.layer_norm_weight"] = (width,)
        found[f"{attention}qkv.weight"] = ((heads + 2 * groups) * (width // heads), width)
        found[f"{attention}proj.weight"] = (width, width)
        found[f"{mlp}fc1.layer_norm_weight"] = (width,)
        found[f"{mlp}fc1.weight"] = (2 * hidden, width)
        found[f"{mlp}fc2.weight"] = (width, hidden)
    found["decoder.final_layernorm.weight"] = (width,)
    found["output_layer.weight"] = (vocab, width)
    return found


def _meta_shapes(shapes: Shapes, ranks: int) -> Shapes:
    empty = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    found = {}
    for name, value in rename(empty, "hf", "meta").items():
        rows, *columns = value.shape
        if name.endswith(("wo.weight", "w2.weight")):
            columns = [columns[0] // ranks]
        elif columns:
            rows //= ranks
        found[name] = (rows, *columns)
    return found
