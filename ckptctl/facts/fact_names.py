"""What files call the facts of a model: which keys of config.json are compared, and params.json.

Facts have the names that config.json gives them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from ckptctl.planner.config_facts import MODULES, Json


def walked(
    values: Json, enters: Callable[[str], bool], prefix: str = ""
) -> Iterator[tuple[str, object]]:
    """Yield what *values* state by full names, object by object where *enters* says so."""
    for key, value in values.items():
        name = prefix + key
        if isinstance(value, Mapping) and enters(name):
            yield from walked(value, enters, f"{name}.")
        else:
            yield name, value


def is_module(name: str) -> bool:
    """Whether *name* is that of an object which describes a model inside of the model."""
    return name.rpartition(".")[2] in MODULES


IGNORED: Mapping[str, tuple[str, ...]] = {
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
"""Keys of config.json that say nothing of what the tensors compute, by what they are about.

Whatever begins with an underscore belongs to them.
"""

NOTED = (
    "bos_token_id",
    "decoder_start_token_id",
    "eos_token_id",
    "max_position_embeddings",
    "pad_token_id",
)
"""Keys of config.json that change no logits: that two files differ on them is said in a note."""

PLACED = ("dynamic", "longrope", "su", "yarn")
"""Kinds of rotary scaling that ``max_position_embeddings`` takes part in."""

SILENT: Mapping[str, object] = {"rope.rope_type": "default", "quantization_config": None}
"""What a config.json means that does not say it, in every family."""

SAME_WORDS = {"swish": "silu"}
RENAMED = {
    "rotary_emb_base": "rope_theta",
    "rotary_pct": "partial_rotary_factor",
    "rope.partial_rotary_factor": "partial_rotary_factor",
    "original_max_position_embeddings": "rope.original_max_position_embeddings",
}
"""Names of versions of transformers for the same fact."""
