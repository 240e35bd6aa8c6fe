"""Each family in Megatron-Core's configuration, after the facts and fields that families share.

Sources: Megatron-Core's ``transformer_config.py`` (0.16; 0.19 for sparse attention) and
``moe_utils.py``, the bridges and providers of Megatron-Bridge 0.3 and (newer families) 0.6, slime's
``scripts/models``, transformers' configuration classes.
"""

from dataclasses import replace

from ckptctl.planner.layouts import FACTS, NEEDED, Fact, MegatronStyle, get_facts


def put_under(prefix: str, *tables: str) -> tuple[str, ...]:
    """Put *prefix* before the keys of *tables* whose only layout is ``mcore``."""
    return tuple(_put_under(prefix, table) for table in tables)


def _put_under(prefix: str, table: str) -> str:
    before, layout, after = table.partition("mcore")
    own_prefix, newline, rows = after.partition("\n")
    return f"{before}{layout}: {prefix}{own_prefix.removeprefix(': ')}{newline}{rows}"


MODELS = "megatron.bridge.models."
GPT = f"{MODELS}gpt_provider.GPTModelProvider"
MLA = f"{MODELS}mla_provider.MLAModelProvider"
BLOCK = "megatron.core.models.gpt.gpt_layer_specs.get_gpt_decoder_block_spec"
VARIANTS = "megatron.core.models.gpt.experimental_attention_variant_module_specs."
VARIANT_BLOCK = f"{VARIANTS}get_transformer_block_with_experimental_attention_variant_spec"

SIZES = get_facts(
    *("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "vocab_size"),
)
FFN, CHANNELS, GROUPS = get_facts("intermediate_size", "head_dim", "num_key_value_heads")
EPSILON, THETA, TIED = get_facts("rms_norm_eps", "rope_theta", "tie_word_embeddings")
WINDOW, PARTIAL = get_facts("sliding_window", "partial_rotary_factor")
DENSE = (*SIZES, EPSILON, THETA, TIED)

# Megatron-Core's softmax over only the chosen experts is transformers' renormalization.
TOP, EXPERTS, EXPERT_FFN, NORM_TOPK_PROB = get_facts(
    *("num_experts_per_tok", "num_experts", "moe_intermediate_size", "norm_topk_prob")
)
LOCAL_EXPERTS = FACTS["num_local_experts"]
ONLY_FFN = replace(EXPERT_FFN, config="intermediate_size")
# No layer is dense, so the size of dense layers is a copy.
COPIED_FFN = {"ffn_hidden_size": "moe_ffn_hidden_size"}

ROUTED = get_facts(
    *("num_experts_per_tok", "moe_intermediate_size", "n_routed_experts", "n_shared_experts"),
    *("first_k_dense_replace", "n_group", "topk_group", "routed_scaling_factor"),
)
MTP_LAYERS = FACTS["num_nextn_predict_layers"]

LATENT = (
    *(fact for fact in DENSE if fact != CHANNELS),
    *get_facts("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"),
    FACTS["v_head_dim"],
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
    facts=DENSE,
    model_type="llama",
    config={**UNBIASED, "mlp_bias": (False,)},
    provider=GPT,
    class_prefixes=("LlamaModelProvider", "Llama2", "Llama3", "CodeLlama", "LlamaConfig"),
)

MISTRAL = MegatronStyle(
    facts=(*DENSE, replace(WINDOW, default=4096)),
    model_type="mistral",
    config=SILU,
    provider=f"{MODELS}mistral.mistral_provider.MistralModelProvider",
    class_prefixes=("Mistral",),
)

MINISTRAL3_VISION = MegatronStyle(
    facts=(
        *SIZES,
        replace(EPSILON, default=1e-5),
        replace(THETA, default=1000000.0),
        TIED,
        Fact("image_token_index", "", "count", 10, megatron="image_token_id"),
    ),
    model_type="mistral3",
    config={**SILU, "sliding_window": (None,)},
    extra_config={"text_config.model_type": "ministral3"},
    provider=f"{MODELS}ministral3.ministral3_provider.Ministral3ModelProvider",
    class_prefixes=("Ministral3",),
    config_prefix="text_config.",
    outer_facts=("tie_word_embeddings", "image_token_index"),
    # No field of Megatron-Core scales queries by position. Bridge's attention reads this.
    has_arguments=False,
    nested_configs={
        "hf_config": ("transformers.models.mistral3.configuration_mistral3.Mistral3Config", "")
    },
    translated=False,
)

MIXTRAL = MegatronStyle(
    facts=(*(fact for fact in DENSE if fact != FFN), TOP, LOCAL_EXPERTS, ONLY_FFN, WINDOW),
    model_type="mixtral",
    fields={"moe_router_pre_softmax": (False,)},
    config=SILU,
    provider=GPT,
    class_prefixes=("Mixtral",),
    copies=COPIED_FFN,
)

QWEN2 = MegatronStyle(
    facts=DENSE,
    model_type="qwen2",
    fields={"add_qkv_bias": (True,)},
    config=NO_WINDOW,
    provider=GPT,
    class_prefixes=("Qwen2ModelProvider", "Qwen25ModelProvider", "Qwen2Config", "Qwen25Config"),
)

QWEN3 = MegatronStyle(
    facts=DENSE,
    model_type="qwen3",
    fields={"qk_layernorm": (True,)},
    config={**UNBIASED, "use_sliding_window": (False,)},
    provider=GPT,
    class_prefixes=("Qwen3ModelProvider", "Qwen3Config"),
)

SHARED_FFN = FACTS["shared_expert_intermediate_size"]

QWEN2_MOE = MegatronStyle(
    facts=(*DENSE, TOP, EXPERTS, EXPERT_FFN, NORM_TOPK_PROB, SHARED_FFN),
    model_type="qwen2_moe",
    fields={"add_qkv_bias": (True,), "moe_shared_expert_gate": (True,)},
    config={**NO_WINDOW, **ALL_SPARSE, "qkv_bias": (True,)},
)

QWEN3_MOE = MegatronStyle(
    facts=(*DENSE, TOP, EXPERTS, EXPERT_FFN, NORM_TOPK_PROB),
    model_type="qwen3_moe",
    fields={"qk_layernorm": (True,)},
    config={**QWEN3.config, **ALL_SPARSE},
    provider=GPT,
    class_prefixes=("Qwen3MoE", "Qwen3Config30B_A3B", "Qwen3Config235B_A22B"),
)

QWEN3_VL_CONFIGS = "transformers.models.qwen3_vl{}.configuration_qwen3_vl{}.Qwen3VL{}"

QWEN3_VL = replace(
    QWEN3,
    facts=(
        *DENSE,
        Fact("rope.mrope_section", "", "sections", [24, 20, 20], megatron="mrope_section"),
        Fact("image_token_id", "", "count", 151655, megatron="image_token_id"),
        Fact("video_token_id", "", "count", 151656, megatron="video_token_id"),
        Fact("vision_start_token_id", "", "count", 151652, megatron="vision_start_token_id"),
        Fact("vision_end_token_id", "", "count", 151653, megatron="vision_end_token_id"),
    ),
    model_type="qwen3_vl",
    fields={**QWEN3.fields, "position_embedding_type": ("mrope",)},
    provider=f"{MODELS}qwen_vl.qwen3_vl_provider.Qwen3VLModelProvider",
    class_prefixes=("Qwen3VLModelProvider",),
    config_prefix="text_config.",
    outer_facts=(
        *("tie_word_embeddings", "image_token_id", "video_token_id"),
        *("vision_start_token_id", "vision_end_token_id"),
    ),
    nested_configs={
        "vision_config": (QWEN3_VL_CONFIGS.format("", "", "VisionConfig"), "vision_config"),
        "hf_text_config": (QWEN3_VL_CONFIGS.format("", "", "TextConfig"), "text_config"),
    },
    translated=False,
)

QWEN3_VL_MOE = replace(
    QWEN3_VL,
    facts=(*QWEN3_VL.facts, TOP, EXPERTS, EXPERT_FFN),
    model_type="qwen3_vl_moe",
    fields={**QWEN3_VL.fields, "moe_router_pre_softmax": (False,)},
    config={**QWEN3_VL.config, **ALL_SPARSE, "norm_topk_prob": (True,)},
    provider=f"{MODELS}qwen_vl.qwen3_vl_provider.Qwen3VLMoEModelProvider",
    class_prefixes=("Qwen3VLMoE",),
    copies={"head_dim": "kv_channels"},
    nested_configs={
        name: (QWEN3_VL_CONFIGS.format("_moe", "_moe", f"Moe{kind}Config"), section)
        for name, kind, section in (
            ("vision_config", "Vision", "vision_config"),
            ("hf_text_config", "Text", "text_config"),
        )
    },
)

LINEAR = get_facts(
    *("full_attention_interval", "linear_conv_kernel_dim"),
    *("linear_key_head_dim", "linear_value_head_dim"),
    *("linear_num_key_heads", "linear_num_value_heads"),
)

QWEN3_NEXT = MegatronStyle(
    facts=(
        *(fact for fact in DENSE if fact != CHANNELS),
        replace(CHANNELS, default=256),
        *(TOP, EXPERTS, EXPERT_FFN, replace(NORM_TOPK_PROB, default=True)),
        replace(PARTIAL, default=0.25),
        SHARED_FFN,
        # Missing in all published config.json files.
        replace(MTP_LAYERS, default=NEEDED),
        *LINEAR,
    ),
    model_type="qwen3_next",
    fields={
        "qk_layernorm": (True,),
        "layernorm_zero_centered_gamma": (True,),
        "attention_output_gate": (True,),
        "moe_shared_expert_gate": (True,),
        # slime implements these layers as a separate plug-in.
        "experimental_attention_variant": ("gated_delta_net", None),
    },
    config={**UNBIASED, **ALL_SPARSE},
    provider=GPT,
    class_prefixes=("Qwen3Next",),
    layer_spec=VARIANT_BLOCK,
    layer_pattern=("linear_attention", 4),
)

QWEN3_5_FACTS = (
    *(fact for fact in DENSE if fact not in (CHANNELS, FFN)),
    replace(CHANNELS, default=256),
    replace(PARTIAL, default=0.25),
    replace(MTP_LAYERS, config="mtp_num_hidden_layers", default=NEEDED),
    *LINEAR,
)
QWEN3_5_FIELDS = {
    name: values for name, values in QWEN3_NEXT.fields.items() if name != "moe_shared_expert_gate"
}

QWEN3_5_TEXT = MegatronStyle(
    facts=(*QWEN3_5_FACTS, FFN),
    model_type="qwen3_5_text",
    fields=QWEN3_5_FIELDS,
    config=UNBIASED,
    provider=GPT,
    layer_spec=VARIANT_BLOCK,
    layer_pattern=("linear_attention", 4),
)

QWEN3_5_MOE_TEXT = MegatronStyle(
    facts=(
        *QWEN3_5_FACTS,
        *(TOP, EXPERTS, EXPERT_FFN, replace(NORM_TOPK_PROB, default=True)),
        SHARED_FFN,
    ),
    model_type="qwen3_5_moe_text",
    fields=QWEN3_NEXT.fields,
    config=UNBIASED,
    provider=GPT,
    copies=COPIED_FFN,
    layer_spec=VARIANT_BLOCK,
    layer_pattern=("linear_attention", 4),
)

DEEPSEEK_V2 = MegatronStyle(
    facts=(*LATENT, *ROUTED, NORM_TOPK_PROB, FACTS["topk_method"]),
    model_type="deepseek_v2",
    fields=LATENT_FIELDS,
    config={
        **UNBIASED,
        "topk_method": ("greedy", "group_limited_greedy"),
        "scoring_func": ("softmax",),
    },
    provider=MLA,
    class_prefixes=("DeepSeekV2",),
    layer_spec=BLOCK,
)

DEEPSEEK_V3 = MegatronStyle(
    facts=(*LATENT, *ROUTED, MTP_LAYERS),
    model_type="deepseek_v3",
    fields={**LATENT_FIELDS, **SIGMOID},
    config={
        **UNBIASED,
        "norm_topk_prob": (True,),
        "topk_method": ("noaux_tc",),
        "scoring_func": ("sigmoid",),
    },
    provider=MLA,
    class_prefixes=("DeepSeekV3", "Moonlight", "KimiK2"),
    layer_spec=BLOCK,
)

KIMI_K25 = replace(
    DEEPSEEK_V3,
    facts=tuple(fact for fact in DEEPSEEK_V3.facts if fact != TIED),
    model_type="kimi_k25",
    fields={**DEEPSEEK_V3.fields, "share_embeddings_and_output_weights": (False,)},
    # Bridge's provider contains a configuration class of the model's own code.
    provider="",
    class_prefixes=("KimiK25",),
    layer_spec="",
    config_prefix="text_config.",
    translated=False,
)

INDEXER = get_facts("index_n_heads", "index_head_dim", "index_topk")
SPARSE = {
    "experimental_attention_variant": ("dsa",),
    "dsa_indexer_k_norm_epsilon": (1e-6,),
    # An orthogonal matrix, which does not change scores.
    "dsa_indexer_rotate_activation": (False, True),
    "dsa_indexer_scoring_relu": (True,),
}

DEEPSEEK_V32 = replace(
    DEEPSEEK_V3,
    facts=(*DEEPSEEK_V3.facts, *INDEXER),
    model_type="deepseek_v32",
    fields={
        **DEEPSEEK_V3.fields,
        **SPARSE,
        "dsa_indexer_rope_interleaved": (False,),
        "dsa_indexer_topk_freq": (1,),
    },
    class_prefixes=(),
    layer_spec=VARIANT_BLOCK,
    layer_pattern=("indexed_attention", 0),
)


GLM_MOE_DSA = replace(
    DEEPSEEK_V32,
    facts=(
        *DEEPSEEK_V32.facts,
        Fact("indexer_types", kind="index period", megatron="dsa_indexer_topk_freq"),
        Fact("indexer_types", kind="index start", megatron="dsa_indexer_skip_topk_offset"),
    ),
    model_type="glm_moe_dsa",
    fields={**DEEPSEEK_V3.fields, **SPARSE, "dsa_indexer_rope_interleaved": (True,)},
    config={**DEEPSEEK_V3.config, "indexer_rope_interleave": (True,)},
)

GLM4 = MegatronStyle(
    facts=(*DENSE, PARTIAL, FACTS["attention_bias"]),
    model_type="glm4",
    fields={
        "rotary_interleaved": (True,),
        "post_self_attn_layernorm": (True,),
        "post_mlp_layernorm": (True,),
    },
    config=SILU,
)

GLM4_MOE = MegatronStyle(
    facts=(*DENSE, *ROUTED, MTP_LAYERS, PARTIAL, *get_facts("attention_bias", "use_qk_norm")),
    model_type="glm4_moe",
    fields=SIGMOID,
    config={**SILU, "norm_topk_prob": (True,)},
    provider=GPT,
    class_prefixes=("GLMMoE", "GLM45Model", "GLM45Air"),
    layer_spec=BLOCK,
)

GEMMA = {
    "activation_func": ("fast_gelu",),
    "layernorm_zero_centered_gamma": (True,),
}
GEMMA_CONFIG = {"hidden_activation": ("gelu_pytorch_tanh",), "attention_bias": (False,)}

GEMMA1 = MegatronStyle(
    facts=(
        *(fact for fact in DENSE if fact not in (CHANNELS, TIED)),
        replace(CHANNELS, default=256),
        replace(TIED, default=True),
    ),
    model_type="gemma",
    fields=GEMMA,
    # The first published files contain "gelu" for the approximation.
    config={"hidden_act": ("gelu_pytorch_tanh", "gelu"), "attention_bias": (False,)},
    provider=f"{MODELS}gemma.gemma_provider.GemmaModelProvider",
    class_prefixes=("GemmaModelProvider", "GemmaConfig", "CodeGemma"),
)

GEMMA2 = MegatronStyle(
    facts=(
        *(fact for fact in DENSE if fact not in (CHANNELS, TIED)),
        replace(CHANNELS, default=256),
        replace(TIED, default=True),
        replace(WINDOW, default=4096),
        FACTS["query_pre_attn_scalar"],
        *get_facts("attn_logit_softcapping", "final_logit_softcapping"),
    ),
    model_type="gemma2",
    fields=GEMMA,
    config=GEMMA_CONFIG,
    provider=f"{MODELS}gemma.gemma2_provider.Gemma2ModelProvider",
    class_prefixes=("Gemma2",),
    layer_pattern=("sliding_attention", 2),
)

GEMMA3_TEXT = MegatronStyle(
    facts=(
        *(fact for fact in SIZES if fact not in (GROUPS, CHANNELS)),
        EPSILON,
        replace(GROUPS, default=4),
        replace(CHANNELS, default=256),
        replace(THETA, default=1000000.0),
        replace(TIED, default=True),
        replace(WINDOW, kind="count", default=4096),
        Fact("query_pre_attn_scalar", "", "root", 256, megatron="softmax_scale"),
    ),
    model_type="gemma3_text",
    # Layers have these norms regardless of the field.
    fields={**GEMMA, "qk_layernorm": (False, True), "interleaved_attn_pattern": ((5, 1),)},
    config={
        **GEMMA_CONFIG,
        "attn_logit_softcapping": (None,),
        "final_logit_softcapping": (None,),
        "use_bidirectional_attention": (False,),
    },
    provider=f"{MODELS}gemma.gemma3_provider.Gemma3ModelProvider",
    class_prefixes=("Gemma3ModelProvider", "Gemma3Config"),
    layer_pattern=("sliding_attention", 6),
    has_local_rope=True,
)

GEMMA3 = replace(
    GEMMA3_TEXT,
    model_type="gemma3",
    provider="",
    class_prefixes=("Gemma3VLModelProvider",),
    config_prefix="text_config.",
    translated=False,
)

NEMOTRON = MegatronStyle(
    facts=(
        *(fact for fact in DENSE if fact != EPSILON),
        FACTS["norm_eps"],
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
    class_prefixes=("NemotronModelProvider", "NemotronConfig", "Nemotron3", "Nemotron4"),
)

HYBRID = f"{MODELS}hybrid.hybrid_provider.HybridModelProvider"

NEMOTRON_H = MegatronStyle(
    facts=(
        *SIZES,
        replace(FACTS["layer_norm_epsilon"], default=1e-5),
        TIED,
        Fact("layers_block_type", kind="layer letters", megatron="hybrid_layer_pattern"),
        Fact("mamba_num_heads", "", "count", 128, megatron="mamba_num_heads"),
        Fact("mamba_head_dim", "", "count", 64, megatron="mamba_head_dim"),
        Fact("n_groups", "", "count", 8, megatron="mamba_num_groups"),
        Fact("ssm_state_size", "", "count", 128, megatron="mamba_state_dim"),
        replace(TOP, default=2),
        replace(EXPERT_FFN, default=7688),
        replace(FACTS["n_routed_experts"], default=8),
        Fact(
            "moe_shared_expert_intermediate_size",
            *("", "count", 7688),
            megatron="moe_shared_expert_intermediate_size",
        ),
        Fact("moe_latent_size", "", "optional", None, megatron="moe_latent_size"),
        *get_facts("n_group", "topk_group", "routed_scaling_factor"),
        MTP_LAYERS,
        Fact(
            "mtp_layers_block_type",
            kind="MTP letters",
            default=["full_attention", "moe"],
            megatron="mtp_hybrid_override_pattern",
        ),
    ),
    model_type="nemotron_h",
    fields={
        **SIGMOID,
        "activation_func": ("squared_relu",),
        "gated_linear_unit": (False,),
        "position_embedding_type": ("none",),
        "is_hybrid_model": (True,),
    },
    config={
        "mlp_hidden_act": ("relu2",),
        "mamba_hidden_act": ("silu", "swish"),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "use_bias": (False,),
        "mamba_proj_bias": (False,),
        "use_conv_bias": (True,),
        "conv_kernel": (4,),
        "n_shared_experts": (1,),
        "norm_topk_prob": (True,),
        "residual_in_fp32": (False,),
    },
    provider=HYBRID,
    class_prefixes=("NemotronHModel", "NemotronNano", "Nemotron3Nano", "MambaModelProvider"),
    has_optional_experts=True,
)

STARCODER2 = MegatronStyle(
    facts=(
        *(fact for fact in DENSE if fact not in (EPSILON, TIED)),
        FACTS["norm_epsilon"],
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
    class_prefixes=("Starcoder2",),
    # Whether "gelu" is the approximation depends on how Megatron-Core runs it.
    translated=False,
)

OLMOE = MegatronStyle(
    facts=(*(fact for fact in DENSE if fact != FFN), TOP, EXPERTS, ONLY_FFN, NORM_TOPK_PROB),
    model_type="olmoe",
    fields={"qk_layernorm": (True,)},
    config={**UNBIASED, "clip_qkv": (None,)},
    provider=GPT,
    class_prefixes=("OlMoE",),
    copies=COPIED_FFN,
    layer_spec=f"{MODELS}olmoe.olmoe_provider.olmoe_layer_spec",
)

PHI3 = MegatronStyle(
    facts=(*DENSE, WINDOW, replace(PARTIAL, default=1.0)),
    model_type="phi3",
    config=SILU,
    class_prefixes=("Phi3",),
)

GPT_OSS = MegatronStyle(
    facts=(
        *(fact for fact in DENSE if fact not in (FFN, CHANNELS)),
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
    provider=GPT,
    class_prefixes=("GPTOSS",),
    copies=COPIED_FFN,
    layer_pattern=("sliding_attention", 2),
)

MINIMAX_M2 = MegatronStyle(
    facts=(
        *(fact for fact in DENSE if fact != FFN),
        *(TOP, LOCAL_EXPERTS, ONLY_FFN),
        FACTS["rotary_dim"],
    ),
    model_type="minimax_m2",
    # The layers norm queries and keys over all heads.
    fields={**SIGMOID, "qk_layernorm": (True,)},
    config={
        **SILU,
        "scoring_func": ("sigmoid",),
        "use_qk_norm": (True,),
        "use_routing_bias": (True,),
        "qk_norm_type": ("per_layer",),
    },
    provider=GPT,
    copies=COPIED_FFN,
    layer_spec=f"{MODELS}minimax_m2.minimax_m2_provider.minimax_m2_layer_spec",
)
