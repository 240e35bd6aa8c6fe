"""Meta's Llama checkpoints, written from their definition.

Sources: llama-models ``models/llama3/model.py`` (names, which layers are column or row parallel),
meta-llama/llama ``llama/model.py`` (``ParallelEmbedding`` of Llama 2 splits dimension 1), and the
published ``params.json`` files.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Literal

import torch

from tests.checkpoints.names import rename

Style = Literal["llama2", "llama3"]
_DIM0 = ("wq", "wk", "wv", "w1", "w3", "output")
_DIM1 = ("wo", "w2")
_FFN = ((256, None), (256, 1.5), (1024, 1.3), (4096, 1.3), (32, None), (32, 1.3))


def to_interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Return q or k rows from ``(h p r) d``, where transformers rotates halves, as ``(h r p) d``.

    Args:
        weight: ``[heads * head_dim, dim]`` with the first halves of all pairs of a head first.
        heads: Number of heads in it.

    Returns:
        The same shape, the two rows of each rotated pair side by side.
    """
    rows, width = weight.shape
    split = weight.view(heads, 2, rows // heads // 2, width)
    return split.transpose(1, 2).reshape(rows, width).contiguous()


def to_meta_names(
    state: dict[str, torch.Tensor], config: dict[str, Any], permute: bool = True
) -> dict[str, torch.Tensor]:
    """Return a Hugging Face state dict as Meta's, whole tensors.

    Args:
        state: Under Hugging Face names; a missing ``lm_head.weight`` means tied embeddings.
        config: Its ``config.json``.
        permute: False leaves q and k rows as they are: wrong, for negative controls.
    """
    meta = rename(state, "hf", "meta")
    if "output.weight" not in meta:
        meta["output.weight"] = meta["tok_embeddings.weight"].clone()
    for name in [name for name in meta if permute and name.endswith(("wq.weight", "wk.weight"))]:
        query = name.endswith("wq.weight")
        heads = config["num_attention_heads" if query else "num_key_value_heads"]
        meta[name] = to_interleaved(meta[name], heads)
    return meta


def style_of(config: dict[str, Any]) -> Style:
    """Return which generation's conventions *config* asks for."""
    rope = config.get("rope_parameters") or config
    return "llama2" if rope.get("rope_theta", 1e4) == 1e4 else "llama3"


def meta_params(config: dict[str, Any], mp: int = 1, style: Style | None = None) -> dict[str, Any]:
    """Return ``params.json`` for *config* as Meta spells it.

    Raises:
        ValueError: No known ``multiple_of`` and ``ffn_dim_multiplier`` give the hidden size.
    """
    width, heads = config["hidden_size"], config["num_attention_heads"]
    multiple, factor = _ffn(width, config["intermediate_size"])
    params: dict[str, Any] = {
        "dim": width,
        "multiple_of": multiple,
        "n_heads": heads,
        "n_layers": config["num_hidden_layers"],
        "norm_eps": config["rms_norm_eps"],
        "vocab_size": config["vocab_size"],
    }
    if factor is not None:
        params["ffn_dim_multiplier"] = factor
    if config["num_key_value_heads"] != heads:
        params["n_kv_heads"] = max(config["num_key_value_heads"], mp)
    if (style or style_of(config)) == "llama2":
        return params | {"vocab_size": -1}
    rope = config.get("rope_parameters") or config
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    params["rope_theta"] = rope["rope_theta"]
    if scaling.get("rope_type") == "llama3":
        params["use_scaled_rope"] = True
    return params


def ffn_size(width: int, multiple: int, factor: float | None) -> int:
    """Return the hidden size of Meta's feed-forward layer (``FeedForward.__init__``)."""
    hidden = int(2 * (4 * width) / 3)
    if factor is not None:
        hidden = int(factor * hidden)
    return multiple * ((hidden + multiple - 1) // multiple)


def _ffn(width: int, hidden: int) -> tuple[int, float | None]:
    for multiple, factor in _FFN:
        if ffn_size(width, multiple, factor) == hidden:
            return multiple, factor
    exact = (hidden + 0.5) / int(2 * (4 * width) / 3)
    if ffn_size(width, 1, exact) != hidden:
        raise ValueError(f"no formula gives {hidden} for a width of {width}")
    return 1, exact


def save_meta(
    folder: Path,
    state: dict[str, torch.Tensor],
    config: dict[str, Any],
    mp: int = 1,
    *,
    style: Style | None = None,
    permute: bool = True,
) -> Path:
    """Write ``consolidated.NN.pth`` and ``params.json``.

    Args:
        folder: Created.
        state: Under Hugging Face names.
        config: Its ``config.json``.
        mp: Number of model-parallel shards; may exceed the number of KV heads, which are then
            repeated as in Meta's 16-shard Llama 3.1 405B.
        style: ``llama2`` splits the embedding on dimension 1 and adds ``rope.freqs``; None: by
            the configuration.
        permute: False writes a wrong checkpoint, for negative controls.

    Returns:
        *folder*.
    """
    style = style or style_of(config)
    folder.mkdir(parents=True)
    whole = to_meta_names(state, config, permute)
    for rank in range(mp):
        shard = {
            name: _shard(name, value, rank, mp, config, style) for name, value in whole.items()
        }
        if style == "llama2":
            shard["rope.freqs"] = _frequencies(config, whole["norm.weight"].dtype)
        torch.save(shard, folder / f"consolidated.{rank:02d}.pth")
    (folder / "params.json").write_text(json.dumps(meta_params(config, mp, style)))
    return folder


def _shard(
    name: str, value: torch.Tensor, rank: int, mp: int, config: dict[str, Any], style: Style
) -> torch.Tensor:
    part = name.split(".")[-2]
    if part in ("wk", "wv") and mp > config["num_key_value_heads"]:
        value = _repeat_heads(value, config["num_key_value_heads"], mp)
    if part == "tok_embeddings":
        axis = 1 if style == "llama2" else 0
    elif part in _DIM0 or part in _DIM1:
        axis = 0 if part in _DIM0 else 1
    else:
        return value.clone()
    if value.shape[axis] % mp:
        raise ValueError(f"{name}: {value.shape[axis]} does not divide into {mp}")
    return value.chunk(mp, axis)[rank].clone(memory_format=torch.contiguous_format)


def _repeat_heads(value: torch.Tensor, heads: int, mp: int) -> torch.Tensor:
    rows, width = value.shape
    per_head = value.view(heads, rows // heads, width)
    return per_head.repeat_interleave(mp // heads, dim=0).reshape(-1, width)


def _frequencies(config: dict[str, Any], dtype: torch.dtype) -> torch.Tensor:
    half = config["hidden_size"] // config["num_attention_heads"] // 2
    powers = torch.arange(half, dtype=torch.float32) / half
    return torch.exp(-math.log(10000.0) * powers).to(dtype)
