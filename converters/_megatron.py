"""How Megatron-Core describes the models of each family: a style each, shared words above.

Sources: Megatron-Core's ``transformer_config.py`` (0.16) and ``moe_utils.py``, the bridges and
providers of Megatron-Bridge 0.3, slime's ``scripts/models``, transformers' configuration classes.
"""

from dataclasses import replace

from ckptctl.planner.layouts import NEEDED, MegatronStyle, Word

MODELS = "megatron.bridge.models."
GPT = f"{MODELS}gpt_provider.GPTModelProvider"
MLA = f"{MODELS}mla_provider.MLAModelProvider"
BLOCK = "megatron.core.models.gpt.gpt_layer_specs.get_gpt_decoder_block_spec"

LAYERS = Word("num_hidden_layers", "num_layers")
HIDDEN = Word("hidden_size", "hidden_size")
FFN = Word("intermediate_size", "ffn_hidden_size")
HEADS = Word("num_attention_heads", "num_attention_heads")
GROUPS = Word("num_key_value_heads", "num_query_groups")
CHANNELS = Word("head_dim", "kv_channels")
VOCABULARY = Word("vocab_size", "vocab_size")
EPSILON = Word("rms_norm_eps", "layernorm_epsilon", "number", 1e-6)
THETA = Word("rope_theta", "rotary_base", "number", 10000.0)
TIED = Word("tie_word_embeddings", "share_embeddings_and_output_weights", "flag", False)
WINDOW = Word("sliding_window", "window_size", "window", None)
PARTIAL = Word("partial_rotary_factor", "rotary_percent", "number", 0.5)
QKV_BIAS = Word("attention_bias", "add_qkv_bias", "flag", False)

SIZES = (LAYERS, HIDDEN, FFN, HEADS, GROUPS, CHANNELS, VOCABULARY)
DENSE = (*SIZES, EPSILON, THETA, TIED)

TOP = Word("num_experts_per_tok", "moe_router_topk")
EXPERTS = Word("num_experts", "num_moe_experts")
LOCAL_EXPERTS = replace(EXPERTS, config="num_local_experts")
EXPERT_FFN = Word("moe_intermediate_size", "moe_ffn_hidden_size")
ONLY_FFN = replace(EXPERT_FFN, config="intermediate_size")
# Megatron-Core's softmax over the chosen experts alone is transformers' renormalization.
RENORMED = Word("norm_topk_prob", "moe_router_pre_softmax", "not", False)
# No layer is dense: what the dense ones would have is the same.
COPIED_FFN = {"ffn_hidden_size": "moe_ffn_hidden_size"}

ROUTED = (
    TOP,
    EXPERT_FFN,
    replace(EXPERTS, config="n_routed_experts"),
    Word("n_shared_experts", "moe_shared_expert_intermediate_size", "shared"),
    Word("first_k_dense_replace", "moe_layer_freq", "dense"),
    Word("n_group", "moe_router_num_groups", "groups", 1),
    Word("topk_group", "moe_router_group_topk", "groups", 1),
    Word("routed_scaling_factor", "moe_router_topk_scaling_factor", "factor", 1.0),
)
FURTHER = Word("num_nextn_predict_layers", "mtp_num_layers", "tally", 0)

LATENT = (
    *(word for word in DENSE if word != CHANNELS),
    Word("q_lora_rank", "q_lora_rank", "optional"),
    Word("kv_lora_rank", "kv_lora_rank"),
    Word("qk_nope_head_dim", "qk_head_dim"),
    Word("qk_rope_head_dim", "qk_pos_emb_head_dim"),
    Word("v_head_dim", "v_head_dim"),
)
LATENT_FIELDS = {"multi_latent_attention": (True,), "qk_layernorm": (True,)}
SIGMOID = {
    "moe_router_score_function": ("sigmoid",),
    "moe_router_enable_expert_bias": (True,),
    "moe_router_pre_softmax": (False, True),
}

SILU = {"hidden_act": ("silu", "swish")}
UNBIASED = {**SILU, "attention_bias": (False,)}
NO_WINDOW = {**SILU, "use_sliding_window": (False,)}
ALL_SPARSE = {"decoder_sparse_step": (1,), "mlp_only_layers": ((),)}

LLAMA = MegatronStyle(
    words=DENSE,
    model_type="llama",
    config={**UNBIASED, "mlp_bias": (False,)},
    provider=GPT,
    named=("LlamaModelProvider", "Llama2", "Llama3", "CodeLlama", "LlamaConfig"),
)

MISTRAL = MegatronStyle(
    words=(*DENSE, replace(WINDOW, default=4096)),
    model_type="mistral",
    config=SILU,
    provider=f"{MODELS}mistral.mistral_provider.MistralModelProvider",
    named=("Mistral",),
)

MIXTRAL = MegatronStyle(
    words=(*(word for word in DENSE if word != FFN), TOP, LOCAL_EXPERTS, ONLY_FFN, WINDOW),
    model_type="mixtral",
    fields={"moe_router_pre_softmax": (False,)},
    config=SILU,
    provider=GPT,
    named=("Mixtral",),
    copies=COPIED_FFN,
)

QWEN2 = MegatronStyle(
    words=DENSE,
    model_type="qwen2",
    fields={"add_qkv_bias": (True,)},
    config=NO_WINDOW,
    provider=GPT,
    named=("Qwen2ModelProvider", "Qwen25ModelProvider", "Qwen2Config", "Qwen25Config"),
)

QWEN3 = MegatronStyle(
    words=DENSE,
    model_type="qwen3",
    fields={"qk_layernorm": (True,)},
    config={**UNBIASED, "use_sliding_window": (False,)},
    provider=GPT,
    named=("Qwen3ModelProvider", "Qwen3Config"),
)

SHARED_FFN = Word("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size")

QWEN2_MOE = MegatronStyle(
    words=(*DENSE, TOP, EXPERTS, EXPERT_FFN, RENORMED, SHARED_FFN),
    model_type="qwen2_moe",
    fields={"add_qkv_bias": (True,), "moe_shared_expert_gate": (True,)},
    config={**NO_WINDOW, **ALL_SPARSE, "qkv_bias": (True,)},
)

QWEN3_MOE = MegatronStyle(
    words=(*DENSE, TOP, EXPERTS, EXPERT_FFN, RENORMED),
    model_type="qwen3_moe",
    fields={"qk_layernorm": (True,)},
    config={**QWEN3.config, **ALL_SPARSE},
    provider=GPT,
    named=("Qwen3MoE", "Qwen3Config30B_A3B", "Qwen3Config235B_A22B"),
)

LINEAR = (
    Word("full_attention_interval", "linear_attention_freq", default=4),
    Word("linear_conv_kernel_dim", "linear_conv_kernel_dim", default=4),
    Word("linear_key_head_dim", "linear_key_head_dim", default=128),
    Word("linear_value_head_dim", "linear_value_head_dim", default=128),
    Word("linear_num_key_heads", "linear_num_key_heads", default=16),
    Word("linear_num_value_heads", "linear_num_value_heads", default=32),
)

QWEN3_NEXT = MegatronStyle(
    words=(
        *(word for word in DENSE if word != CHANNELS),
        replace(CHANNELS, default=256),
        *(TOP, EXPERTS, EXPERT_FFN, replace(RENORMED, default=True)),
        replace(PARTIAL, default=0.25),
        SHARED_FFN,
        # No published config.json states them.
        replace(FURTHER, default=NEEDED),
        *LINEAR,
    ),
    model_type="qwen3_next",
    fields={
        "qk_layernorm": (True,),
        "layernorm_zero_centered_gamma": (True,),
        "attention_output_gate": (True,),
        "moe_shared_expert_gate": (True,),
        # slime's layers are a plug-in of its own.
        "experimental_attention_variant": ("gated_delta_net", None),
    },
    config={**UNBIASED, **ALL_SPARSE},
    provider=f"{MODELS}qwen.qwen_provider.Qwen3NextModelProvider",
    named=("Qwen3Next",),
    pattern=("linear_attention", 4),
)

DEEPSEEK_V2 = MegatronStyle(
    words=(
        *(*LATENT, *ROUTED, RENORMED),
        Word("topk_method", "moe_router_num_groups", "method", "greedy"),
    ),
    model_type="deepseek_v2",
    fields=LATENT_FIELDS,
    config={
        **UNBIASED,
        "topk_method": ("greedy", "group_limited_greedy"),
        "scoring_func": ("softmax",),
    },
    provider=MLA,
    named=("DeepSeekV2",),
    spec=BLOCK,
)

DEEPSEEK_V3 = MegatronStyle(
    words=(*LATENT, *ROUTED, FURTHER),
    model_type="deepseek_v3",
    fields={**LATENT_FIELDS, **SIGMOID},
    config={
        **UNBIASED,
        "norm_topk_prob": (True,),
        "topk_method": ("noaux_tc",),
        "scoring_func": ("sigmoid",),
    },
    provider=MLA,
    named=("DeepSeekV3", "Moonlight", "KimiK2"),
    spec=BLOCK,
)

GLM4 = MegatronStyle(
    words=(*DENSE, PARTIAL, QKV_BIAS),
    model_type="glm4",
    fields={
        "rotary_interleaved": (True,),
        "post_self_attn_layernorm": (True,),
        "post_mlp_layernorm": (True,),
    },
    config=SILU,
)

GLM4_MOE = MegatronStyle(
    words=(
        *DENSE,
        *ROUTED,
        FURTHER,
        PARTIAL,
        QKV_BIAS,
        Word("use_qk_norm", "qk_layernorm", "flag", False),
    ),
    model_type="glm4_moe",
    fields=SIGMOID,
    config={**SILU, "norm_topk_prob": (True,)},
    provider=GPT,
    named=("GLMMoE", "GLM45Model", "GLM45Air"),
    spec=BLOCK,
)

GEMMA = {
    "activation_func": ("fast_gelu",),
    "layernorm_zero_centered_gamma": (True,),
}
GEMMA_CONFIG = {"hidden_activation": ("gelu_pytorch_tanh",), "attention_bias": (False,)}

GEMMA1 = MegatronStyle(
    words=(
        *(word for word in DENSE if word not in (CHANNELS, TIED)),
        replace(CHANNELS, default=256),
        replace(TIED, default=True),
    ),
    model_type="gemma",
    fields=GEMMA,
    # Its first files say "gelu" and mean the approximation.
    config={"hidden_act": ("gelu_pytorch_tanh", "gelu"), "attention_bias": (False,)},
    provider=f"{MODELS}gemma.gemma_provider.GemmaModelProvider",
    named=("GemmaModelProvider", "GemmaConfig", "CodeGemma"),
)

GEMMA2 = MegatronStyle(
    words=(
        *(word for word in DENSE if word not in (CHANNELS, TIED)),
        replace(CHANNELS, default=256),
        replace(TIED, default=True),
        replace(WINDOW, default=4096),
        Word("query_pre_attn_scalar", "query_pre_attn_scalar", default=256),
        Word("attn_logit_softcapping", "attn_logit_softcapping", "number", 50.0),
        Word("final_logit_softcapping", "final_logit_softcapping", "number", 30.0),
    ),
    model_type="gemma2",
    fields=GEMMA,
    config=GEMMA_CONFIG,
    provider=f"{MODELS}gemma.gemma2_provider.Gemma2ModelProvider",
    named=("Gemma2",),
    pattern=("sliding_attention", 2),
)

GEMMA3_TEXT = MegatronStyle(
    words=(
        *(LAYERS, HIDDEN, FFN, HEADS, VOCABULARY, EPSILON),
        replace(GROUPS, default=4),
        replace(CHANNELS, default=256),
        replace(THETA, default=1000000.0),
        replace(TIED, default=True),
        Word("sliding_window", "window_size", default=4096),
        Word("query_pre_attn_scalar", "softmax_scale", "root", 256),
    ),
    model_type="gemma3_text",
    # Its layers have these norms whatever the field says.
    fields={**GEMMA, "qk_layernorm": (False, True), "interleaved_attn_pattern": ((5, 1),)},
    config={
        **GEMMA_CONFIG,
        "attn_logit_softcapping": (None,),
        "final_logit_softcapping": (None,),
        "use_bidirectional_attention": (False,),
    },
    provider=f"{MODELS}gemma.gemma3_provider.Gemma3ModelProvider",
    named=("Gemma3ModelProvider", "Gemma3Config"),
    pattern=("sliding_attention", 6),
    local=True,
)

GEMMA3 = replace(
    GEMMA3_TEXT,
    model_type="gemma3",
    provider="",
    named=("Gemma3VLModelProvider",),
    prefix="text_config.",
    translated=False,
)

NEMOTRON = MegatronStyle(
    words=(
        *(word for word in DENSE if word != EPSILON),
        Word("norm_eps", "layernorm_epsilon", "number", 1e-5),
        PARTIAL,
    ),
    model_type="nemotron",
    fields={
        "normalization": ("LayerNorm",),
        "layernorm_zero_centered_gamma": (True,),
        "activation_func": ("squared_relu",),
        "gated_linear_unit": (False,),
    },
    config={"hidden_act": ("relu2",), "attention_bias": (False,), "mlp_bias": (False,)},
    provider=GPT,
    named=("NemotronModelProvider", "NemotronConfig", "Nemotron3", "Nemotron4"),
)

STARCODER2 = MegatronStyle(
    words=(
        *(word for word in DENSE if word not in (EPSILON, TIED)),
        Word("norm_epsilon", "layernorm_epsilon", "number", 1e-5),
        replace(TIED, default=True),
        WINDOW,
    ),
    model_type="starcoder2",
    fields={
        "normalization": ("LayerNorm",),
        "activation_func": ("gelu", "fast_gelu"),
        "gated_linear_unit": (False,),
        "add_bias_linear": (True,),
        "add_qkv_bias": (False, True),
    },
    config={"hidden_act": ("gelu_pytorch_tanh", "gelu"), "use_bias": (True,)},
    named=("Starcoder2",),
    # Whether "gelu" is the approximation depends on how Megatron-Core runs it.
    translated=False,
)

OLMOE = MegatronStyle(
    words=(*(word for word in DENSE if word != FFN), TOP, EXPERTS, ONLY_FFN, RENORMED),
    model_type="olmoe",
    fields={"qk_layernorm": (True,)},
    config={**UNBIASED, "clip_qkv": (None,)},
    provider=GPT,
    named=("OlMoE",),
    copies=COPIED_FFN,
    spec=f"{MODELS}olmoe.olmoe_provider.olmoe_layer_spec",
)

PHI3 = MegatronStyle(
    words=(*DENSE, WINDOW, replace(PARTIAL, default=1.0)),
    model_type="phi3",
    config=SILU,
    named=("Phi3",),
)

GPT_OSS = MegatronStyle(
    words=(
        *(word for word in DENSE if word not in (FFN, CHANNELS)),
        replace(CHANNELS, default=64),
        *(TOP, LOCAL_EXPERTS, ONLY_FFN),
        replace(WINDOW, default=128),
    ),
    model_type="gpt_oss",
    fields={
        "activation_func": ("quick_gelu",),
        "glu_linear_offset": (1.0,),
        "activation_func_clamp_value": (7.0,),
        "add_bias_linear": (True,),
        "add_qkv_bias": (False, True),
        "softmax_type": ("learnable",),
        "window_attn_skip_freq": (2,),
        "moe_router_pre_softmax": (False,),
        "position_embedding_type": ("yarn", "rope"),
    },
    config={**SILU, "attention_bias": (True,)},
    provider=f"{MODELS}gpt_oss.gpt_oss_provider.GPTOSSProvider",
    named=("GPTOSS",),
    copies=COPIED_FFN,
    pattern=("sliding_attention", 2),
)
