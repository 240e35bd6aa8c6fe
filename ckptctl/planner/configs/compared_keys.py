"""Keys of config.json: which of them are compared, and what they mean under which names."""

from __future__ import annotations

from collections.abc import Mapping

IGNORED: Mapping[str, tuple[str, ...]] = {
    "where the model comes from": ("architectures", "auto_map", "transformers_version"),
    "the element type, which the tensors have": ("dtype", "torch_dtype", "use_bfloat16"),
    "the tokenizer": ("model_max_length", "tokenizer_class"),
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
    "what a call returns": (
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

TOLD = frozenset(
    {
        *("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads"),
        *("num_key_value_heads", "head_dim", "hidden_act", "tie_word_embeddings", "rope_theta"),
        *("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"),
        *("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"),
        "moe_intermediate_size",
    }
)
"""Keys of config.json that among the arguments of a training mean the model."""

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

ROPE = frozenset({"rope_scaling", "rope_parameters"})
"""What says how rotary frequencies are scaled; null there means that they are not."""

FULL = "full_attention"
"""Of rotary frequencies for each kind of layer those that others call the model's."""
