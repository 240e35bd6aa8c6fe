"""Whose params.json a folder has: Mistral's or Meta's. Their weight files have the same names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ckptctl.errors import CkptError
from ckptctl.formats.assets import documents

PARAMS = "params.json"
_MISTRAL = ("hidden_dim", "head_dim", "moe", "vision_encoder", "num_local_experts")
_META = ("multiple_of", "ffn_dim_multiplier", "moe_args", "vision_args")
_FIRST_RELEASE = {
    "hidden_size": "dim",
    "intermediate_size": "hidden_dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "rms_norm_eps": "norm_eps",
}
_EXPERTS = {"num_local_experts": "num_experts", "num_experts_per_tok": "num_experts_per_tok"}


def is_mistral(folder: Path) -> bool:
    """Return whether *folder* has a params.json, and it is Mistral's."""
    try:
        params = documents(folder).get(PARAMS) if folder.is_dir() else None
    except CkptError:
        return False
    return params is not None and any(k in params for k in _MISTRAL) and not _is_meta(params)


def _is_meta(params: Mapping[str, object]) -> bool:
    return any(key in params for key in _META)


def in_todays_words(params: Mapping[str, object]) -> Mapping[str, object]:
    """Return *params* in the words that Mistral has used since.

    The params.json of Mixtral's first release has those of transformers; source: transformers'
    ``convert_mixtral_weights_to_hf.py``.
    """
    if "hidden_size" not in params or "dim" in params:
        return params
    kept = {k: v for k, v in params.items() if k not in _EXPERTS}
    renamed = {_FIRST_RELEASE.get(key, key): value for key, value in kept.items()}
    experts = {_EXPERTS[key]: params[key] for key in _EXPERTS if key in params}
    return renamed | ({"moe": experts} if experts else {})
