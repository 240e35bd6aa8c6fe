"""Table of configuration facts, with the name of each fact in every configuration format.

The first four columns are the names of a fact in config.json, params.json, Megatron-Core's
configuration and the metadata of a GGUF file (after the architecture), or ``-``. ``kind`` is the
kind of its value, a row of :data:`ckptctl.facts.kinds.FACT_KINDS`. ``default`` is the default of
transformers, or ``-`` if the field is required. ``neutral`` is the value of Megatron-Core's field
in families whose models do not vary it. Fields with the prefix ``moe_`` are ignored without
experts. Families select rows, may override defaults, and add rows that no other family has.

Sources: transformers' configuration classes; ``llama_models`` and mistral-inference's ``args.py``;
Megatron-Core's ``transformer_config.py`` (0.16); ``gguf/constants.py`` (0.19).
"""

from __future__ import annotations

import re
from ast import literal_eval
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

TABLE = """
config.json                            params.json                            Megatron-Core                             GGUF                                  kind      default   neutral
vocab_size                             vocab_size                             vocab_size                                vocab_size                            count     -         -
num_hidden_layers                      n_layers                               num_layers                                block_count                           count     -         -
hidden_size                            dim                                    hidden_size                               embedding_length                      count     -         -
intermediate_size                      hidden_dim                             ffn_hidden_size                           feed_forward_length                   count     -         -
num_attention_heads                    n_heads                                num_attention_heads                       attention.head_count                  count     -         -
num_key_value_heads                    n_kv_heads                             num_query_groups                          attention.head_count_kv               count     -         -
head_dim                               head_dim                               kv_channels                               attention.key_length                  count     -         -
tie_word_embeddings                    -                                      share_embeddings_and_output_weights       -                                     flag      False     -
rms_norm_eps                           norm_eps                               layernorm_epsilon                         attention.layer_norm_rms_epsilon      number    1e-6      -
norm_eps                               -                                      layernorm_epsilon                         -                                     number    1e-5      -
norm_epsilon                           -                                      layernorm_epsilon                         -                                     number    1e-5      -
layer_norm_eps                         -                                      layernorm_epsilon                         -                                     number    -         -
layer_norm_epsilon                     -                                      layernorm_epsilon                         -                                     number    -         -
max_position_embeddings                max_seq_len                            -                                         context_length                        count     -         -
bos_token_id                           -                                      -                                         tokenizer.ggml.bos_token_id           count     -         -
eos_token_id                           -                                      -                                         tokenizer.ggml.eos_token_id           count     -         -
pad_token_id                           -                                      -                                         tokenizer.ggml.padding_token_id       count     -         -

-                                      -                                      activation_func                           -                                     -         -         'silu'
-                                      -                                      gated_linear_unit                         -                                     -         -         True
-                                      -                                      normalization                             -                                     -         -         'RMSNorm'
-                                      -                                      position_embedding_type                   -                                     -         -         ('rope', 'yarn')
rope_theta                             rope_theta                             rotary_base                               rope.freq_base                        number    10000.0   -
rope.factor                            yarn.factor                            rotary_scaling_factor                     rope.scaling.factor                   number    -         -
rope.original_max_position_embeddings  yarn.original_max_position_embeddings  original_max_position_embeddings          rope.scaling.original_context_length  count     -         -
rope.beta_fast                         yarn.beta                              beta_fast                                 -                                     number    32.0      -
rope.beta_slow                         yarn.alpha                             beta_slow                                 -                                     number    1.0       -
rope.mscale                            -                                      mscale                                    -                                     number    1.0       -
rope.mscale_all_dim                    -                                      mscale_all_dim                            -                                     number    0.0       -
partial_rotary_factor                  -                                      rotary_percent                            -                                     number    0.5       1.0
rotary_dim                             -                                      rotary_percent                            -                                     rotated   -         -
-                                      -                                      rotary_interleaved                        -                                     -         -         False
-                                      -                                      seq_len_interpolation_factor              -                                     -         -         None
-                                      -                                      no_rope_freq                              -                                     -         -         None
-                                      -                                      mrope_section                             -                                     -         -         None
-                                      -                                      layernorm_zero_centered_gamma             -                                     -         -         False
-                                      -                                      apply_residual_connection_post_layernorm  -                                     -         -         False
-                                      -                                      add_bias_linear                           -                                     -         -         False
attention_bias                         -                                      add_qkv_bias                              -                                     flag      False     False
use_qk_norm                            -                                      qk_layernorm                              -                                     flag      False     False
-                                      -                                      qk_l2_norm                                -                                     -         -         False
-                                      -                                      multi_latent_attention                    -                                     -         -         False
q_lora_rank                            -                                      q_lora_rank                               -                                     optional  -         -
kv_lora_rank                           -                                      kv_lora_rank                              -                                     count     -         -
qk_nope_head_dim                       -                                      qk_head_dim                               -                                     count     -         -
qk_rope_head_dim                       -                                      qk_pos_emb_head_dim                       -                                     count     -         -
v_head_dim                             -                                      v_head_dim                                -                                     count     -         -
-                                      -                                      attention_output_gate                     -                                     -         -         False
-                                      -                                      experimental_attention_variant            -                                     -         -         None
index_n_heads                          -                                      dsa_indexer_n_heads                       -                                     count     -         -
index_head_dim                         -                                      dsa_indexer_head_dim                      -                                     count     -         -
index_topk                             -                                      dsa_indexer_topk                          -                                     count     -         -
full_attention_interval                -                                      linear_attention_freq                     -                                     interval  4         -
linear_conv_kernel_dim                 -                                      linear_conv_kernel_dim                    -                                     count     4         -
linear_key_head_dim                    -                                      linear_key_head_dim                       -                                     count     128       -
linear_value_head_dim                  -                                      linear_value_head_dim                     -                                     count     128       -
linear_num_key_heads                   -                                      linear_num_key_heads                      -                                     count     16        -
linear_num_value_heads                 -                                      linear_num_value_heads                    -                                     count     32        -
-                                      -                                      softmax_type                              -                                     -         -         'vanilla'
-                                      -                                      softmax_scale                             -                                     -         -         None
query_pre_attn_scalar                  -                                      query_pre_attn_scalar                     -                                     count     256       -
sliding_window                         sliding_window                         window_size                               attention.sliding_window              window    None      None
-                                      -                                      window_attn_skip_freq                     -                                     -         -         None
-                                      -                                      glu_linear_offset                         -                                     -         -         0.0
-                                      -                                      activation_func_clamp_value               -                                     -         -         None
attn_logit_softcapping                 -                                      attn_logit_softcapping                    attn_logit_softcapping                number    50.0      None
final_logit_softcapping                -                                      final_logit_softcapping                   final_logit_softcapping               number    30.0      None
-                                      -                                      heterogeneous_block_specs                 -                                     -         -         False

num_experts                            -                                      num_moe_experts                           expert_count                          count     -         None
num_local_experts                      -                                      num_moe_experts                           expert_count                          count     -         -
n_routed_experts                       -                                      num_moe_experts                           -                                     count     -         -
num_nextn_predict_layers               -                                      mtp_num_layers                            -                                     tally     0         (None, 0)
num_experts_per_tok                    moe.num_experts_per_tok                moe_router_topk                           expert_used_count                     count     -         -
norm_topk_prob                         -                                      moe_router_pre_softmax                    -                                     not       False     -
-                                      -                                      moe_router_score_function                 -                                     -         -         'softmax'
-                                      -                                      moe_router_enable_expert_bias             -                                     -         -         False
n_group                                -                                      moe_router_num_groups                     -                                     groups    1         None
topk_group                             -                                      moe_router_group_topk                     -                                     groups    1         None
topk_method                            -                                      moe_router_num_groups                     -                                     method    'greedy'  -
routed_scaling_factor                  -                                      moe_router_topk_scaling_factor            -                                     factor    1.0       (None, 1.0)
moe_intermediate_size                  -                                      moe_ffn_hidden_size                       expert_feed_forward_length            count     -         -
shared_expert_intermediate_size        -                                      moe_shared_expert_intermediate_size       -                                     count     -         (None, 0)
n_shared_experts                       -                                      moe_shared_expert_intermediate_size       -                                     shared    -         -
-                                      -                                      moe_shared_expert_gate                    -                                     -         -         False
first_k_dense_replace                  -                                      moe_layer_freq                            -                                     dense     -         1
-                                      -                                      moe_latent_size                           -                                     -         -         None
"""  # noqa: E501

LLAMA3_ROPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""RoPE scaling parameters of Llama 3.1, except for the factor."""


class RequiredDefault:
    """Placeholder for the default of a field that config.json must contain."""

    def __repr__(self) -> str:
        return "NEEDED"


NEEDED = RequiredDefault()


@dataclass(frozen=True, slots=True)
class Fact:
    """A fact of a model, parsed from one row of the table. Dotted names refer to nested objects.

    Attributes:
        config: Preferred name of the fact in config.json. RoPE parameters always have the prefix
            ``rope.``, in whichever format config.json contains them.
        params: Name of the fact in params.json, or empty if params.json has no such field.
        kind: The kind of its value, a row of :data:`ckptctl.facts.kinds.FACT_KINDS`.
        default: Value that transformers assumes if the field is missing in config.json.
        absent: Value if the field is missing in params.json, or None to omit it in config.json too.
        back: Whether the fact is written to params.json, not only read from there.
        megatron: Field name in Megatron-Core's configuration, or empty if there is no field.
        gguf: Key in GGUF metadata, after the architecture, or empty if there is no key.
    """

    config: str
    params: str = ""
    kind: str = "number"
    default: Any = NEEDED
    absent: object = None
    back: bool = True
    megatron: str = ""
    gguf: str = ""


def _parse_rows() -> Iterator[tuple[Fact, tuple[object, ...]]]:
    """Yield the fact of each row of the table, and the neutral values of its Megatron field."""
    for row in filter(None, TABLE.splitlines()[2:]):
        names = ("" if cell == "-" else cell for cell in re.split(" {2,}", row))
        config, params, megatron, gguf, kind, default, neutral = names
        value = literal_eval(default) if default else NEEDED
        fact = Fact(config, params, kind, value, megatron=megatron, gguf=gguf)
        values = literal_eval(neutral) if neutral else ()
        yield fact, values if isinstance(values, tuple) else (values,)


_ROWS = tuple(_parse_rows())
FACTS: Mapping[str, Fact] = {fact.config: fact for fact, _ in _ROWS if fact.config}
"""Mapping from field names in config.json to facts."""
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    fact.megatron: values for fact, values in _ROWS if values
}
"""Neutral values of each field of Megatron-Core. The first value is written."""


def get_facts(*names: str) -> tuple[Fact, ...]:
    """Get the facts with the given names in config.json, in the order of *names*."""
    return tuple(FACTS[name] for name in names)


TRAINING_ARGUMENT_FACTS = get_facts(
    *("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "head_dim"),
    *("rope_theta", "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"),
    *("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"),
    "moe_intermediate_size",
)
"""Facts that training arguments may contain in addition to other descriptions of the model."""
MODEL_ARGUMENT_KEYS = frozenset(fact.config for fact in TRAINING_ARGUMENT_FACTS) | {
    *("hidden_act", "num_key_value_heads", "tie_word_embeddings")
}
"""Fields of config.json that describe the model if they occur among training arguments."""
