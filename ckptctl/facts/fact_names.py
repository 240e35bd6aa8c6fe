"""Keys of config.json that are compared, ignored or renamed.

A fact about a model is named like its key in config.json.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from ckptctl.planner.config_facts import SUBMODEL_KEYS, Json


def walk_values(
    values: Json, should_enter: Callable[[str], bool], prefix: str = ""
) -> Iterator[tuple[str, object]]:
    """Yield all values with dotted names, descending into objects that *should_enter* accepts."""
    for key, value in values.items():
        name = prefix + key
        if isinstance(value, Mapping) and should_enter(name):
            yield from walk_values(value, should_enter, f"{name}.")
        else:
            yield name, value


def is_module(name: str) -> bool:
    """Return whether *name* is the key of an object that describes a submodel."""
    return name.rpartition(".")[2] in SUBMODEL_KEYS


IGNORED_KEYS: Mapping[str, tuple[str, ...]] = {
    "origin of the model": ("architectures", "auto_map", "transformers_version"),
    "dtype, which the tensors themselves show": ("dtype", "torch_dtype", "use_bfloat16"),
    "tokenizer": ("model_max_length", "tokenizer_class"),
    "training": (
        "attention_dropout",
        "attention_probs_dropout_prob",
        "aux_loss_alpha",
        "classifier_dropout",
        "dropout",
        "dropout_rate",
        "embd_pdrop",
        "embedding_dropout",
        "gradient_checkpointing",
        "hidden_dropout",
        "hidden_dropout_prob",
        "initializer_factor",
        "initializer_range",
        "pretraining_tp",
        "projector_dropout",
        "resid_pdrop",
        "residual_dropout",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "seq_aux",
    ),
    "output settings": (
        "id2label",
        "label2id",
        "num_labels",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "problem_type",
        "return_dict",
        "task_specific_params",
        "torchscript",
        "use_cache",
    ),
}
"""Keys of config.json that do not affect what the tensors compute, by topic.

Keys that begin with an underscore are ignored too.
"""

LOGIT_NEUTRAL_KEYS = (
    "bos_token_id",
    "decoder_start_token_id",
    "eos_token_id",
    "max_position_embeddings",
    "pad_token_id",
)
"""Keys of config.json that do not affect logits, so that differences are only noted."""

POSITION_SCALED_ROPES = ("dynamic", "longrope", "su", "yarn")
"""Values of ``rope_type`` whose frequencies depend on ``max_position_embeddings``."""

IMPLIED_VALUES: Mapping[str, object] = {"rope.rope_type": "default", "quantization_config": None}
"""Values that a config.json of any family implies if it does not set the key."""

CANONICAL_VALUES = {"swish": "silu"}
CANONICAL_LAYER_TYPES = {"mamba": "linear_attention", "attention": "full_attention"}
"""Canonical words for layer types in lists, as in transformers' ``remap_legacy_layer_types``."""
CANONICAL_KEYS = {
    "rotary_emb_base": "rope_theta",
    "rotary_pct": "partial_rotary_factor",
    "rope.partial_rotary_factor": "partial_rotary_factor",
    "original_max_position_embeddings": "rope.original_max_position_embeddings",
}
"""Canonical names of keys that versions of transformers spell differently."""
