"""gpt-oss 20B and 120B: experts with biases, attention sinks.

Sources: transformers' ``modeling_gpt_oss.py`` and ``convert_gpt_oss_weights_to_hf.py``, OpenAI's
``gpt_oss/torch/model.py`` and ``weights.py`` (``openai``), torchtitan's ``models/gpt_oss`` (0.2 and
0.3; its own adapter to Hugging Face only knows the names of quantized experts). All of these
rotate halves and interleave the rows of gate and up. Only Hugging Face's unquantized experts are
transposed. In MXFP4, 32 elements along the input are 16 bytes and one scale, ``[out, in]`` in both
layouts that have it. In Megatron-Core (Megatron-Bridge's ``gpt_oss_bridge.py``), the gate of an
expert precedes its up. mlx-lm's ``gpt_oss.py`` has gate and up in two tensors. llm-compressor's
``modeling/moe/gpt_oss.py`` has a linear layer for each projection of each expert, which is what
compressed-tensors can store.
"""

from ckptctl.planner.layouts import SIZES, Drop, Family, Tie

from . import _megatron, _proofs, mixtral, qwen2, qwen2_moe

BEFORE = """
logical  axes  hf                         openai            torchtitan@0.2, torchtitan@0.3
embed    v d   model.embed_tokens.weight  embedding.weight  tok_embeddings.weight
"""

LAYER = """
logical      axes     hf: model.layers.{i}.            openai: block.{i}.    torchtitan@0.2, torchtitan@0.3: layers.{i}.
norm_1       d        input_layernorm.weight           attn.norm.scale       attention_norm.weight
q            (h e) d  self_attn.q_proj.weight          attn.qkv.weight#0     attention.qkv_linear.wq.weight
k            (k e) d  self_attn.k_proj.weight          attn.qkv.weight#1     attention.qkv_linear.wk.weight
v            (k e) d  self_attn.v_proj.weight          attn.qkv.weight#2     attention.qkv_linear.wv.weight
q_bias?attention  (h e)  self_attn.q_proj.bias            attn.qkv.bias#0       attention.qkv_linear.wq.bias
k_bias?attention  (k e)  self_attn.k_proj.bias            attn.qkv.bias#1       attention.qkv_linear.wk.bias
v_bias?attention  (k e)  self_attn.v_proj.bias            attn.qkv.bias#2       attention.qkv_linear.wv.bias
sinks        h        self_attn.sinks                  attn.sinks            attention.sinks
o            d (h e)  self_attn.o_proj.weight          attn.out.weight       attention.wo.weight
o_bias?attention  d      self_attn.o_proj.bias            attn.out.bias         attention.wo.bias
norm_2       d        post_attention_layernorm.weight  mlp.norm.scale        ffn_norm.weight
router       x d      mlp.router.weight                mlp.gate.weight       moe.router.gate.weight
router_bias  x        mlp.router.bias                  mlp.gate.bias         moe.router.gate.bias
w13@plain    x (f c) d  mlp.experts.gate_up_proj x d (f c)  mlp.mlp1_weight  moe.routed_experts.inner_experts.mlp1_weight_EGD
w13_blocks@mxfp4  x (f c) db b  mlp.experts.gate_up_proj_blocks  mlp.mlp1_weight.blocks  -
w13_scales@mxfp4  x (f c) db    mlp.experts.gate_up_proj_scales  mlp.mlp1_weight.scales  -
w13_bias     x (f c)  mlp.experts.gate_up_proj_bias    mlp.mlp1_bias         moe.routed_experts.inner_experts.mlp1_bias_EG
w2@plain     x d f    mlp.experts.down_proj x f d      mlp.mlp2_weight       moe.routed_experts.inner_experts.mlp2_weight_EDF
w2_blocks@mxfp4  x d fb b  mlp.experts.down_proj_blocks  mlp.mlp2_weight.blocks  -
w2_scales@mxfp4  x d fb    mlp.experts.down_proj_scales  mlp.mlp2_weight.scales  -
w2_bias      x d      mlp.experts.down_proj_bias       mlp.mlp2_bias         moe.routed_experts.inner_experts.mlp2_bias_ED
"""  # noqa: E501

AFTER = """
logical  axes  hf                 openai              torchtitan@0.2  torchtitan@0.3
norm     d     model.norm.weight  norm.scale          norm.weight     norm.weight
output   v d   lm_head.weight     unembedding.weight  output.weight   lm_head.weight
"""

TITAN_02 = """
logical   torchtitan@0.2: layers.{i}.
q         attention.wq.weight
k         attention.wk.weight
v         attention.wv.weight
q_bias    attention.wq.bias
k_bias    attention.wk.bias
v_bias    attention.wv.bias
w13       moe.experts.mlp1_weight
w13_bias  moe.experts.mlp1_bias
w2        moe.experts.mlp2_weight
w2_bias   moe.experts.mlp2_bias
"""

MCORE = """
logical      mcore: decoder.layers.{i}.
sinks        self_attention.core_attention.softmax_offset
o_bias       self_attention.linear_proj.bias
norm_2       pre_mlp_layernorm.weight
router       mlp.router.weight
router_bias  mlp.router.bias
w13          mlp.experts.experts.linear_fc1.weight x (c f) d
w13_bias     mlp.experts.experts.linear_fc1.bias x (c f)
w2           mlp.experts.experts.linear_fc2.weight
w2_bias      mlp.experts.experts.linear_fc2.bias
"""

MLX = """
logical     mlx: model.layers.{i}.mlp.experts.
w13         {c=gate_proj|up_proj}.weight x f d
w13_blocks  -
w13_scales  -
w13_bias    {c=gate_proj|up_proj}.bias x f
w2          down_proj.weight
w2_blocks   -
w2_scales   -
w2_bias     down_proj.bias
"""

LLM_COMPRESSOR = """
logical     llm-compressor: model.layers.{i}.mlp.experts.
w13         {x}.{c=gate_proj|up_proj}.weight f d
w13_blocks  -
w13_scales  -
w13_bias    {x}.{c=gate_proj|up_proj}.bias f
w2          {x}.down_proj.weight d f
w2_blocks   -
w2_scales   -
w2_bias     {x}.down_proj.bias d
"""

BALANCE = "torchtitan's own bias for balancing experts, which gpt-oss does not have"

FAMILY = Family(
    name="gpt_oss",
    title="gpt-oss 20B, 120B",
    layouts=(
        "hf",
        "llm-compressor",
        "openai",
        "torchtitan@0.2",
        "torchtitan@0.3",
        "mlx",
        "mcore",
        "mcore-local",
    ),
    tables=(
        BEFORE,
        LAYER,
        AFTER,
        TITAN_02,
        LLM_COMPRESSOR,
        MLX,
        *qwen2_moe.MCORE_ENDS,
        qwen2.MCORE_ATTENTION,
        MCORE,
        mixtral.MCORE_LOCAL,
    ),
    like={"mcore-local": "mcore"},
    architecture="GptOssForCausalLM",
    drops=(
        Drop(
            "torchtitan@0.2",
            "layers.{i}.moe.expert_bias",
            BALANCE,
            zeros="x",
            next_to="router_bias",
        ),
        Drop(
            "torchtitan@0.3",
            "layers.{i}.moe.expert_bias_E",
            BALANCE,
            zeros="x",
            next_to="router_bias",
        ),
    ),
    ties=(
        Tie("output", of="embed", stored_in=("openai", "torchtitan@0.2", "torchtitan@0.3", "mlx")),
    ),
    constants={"c": 2, "b": 16},
    composite={"h": ("k", "q")},
    variants=(("plain", "mxfp4"),),
    quantized=("mxfp4",),
    sizes={**SIZES, "x": ("num_local_experts", "")},
    proofs=_proofs.get_proofs(
        "hf",
        "llm-compressor",
        "openai",
        "torchtitan@0.2",
        "torchtitan@0.3",
        "mlx",
        "mcore",
        "mcore-local",
    ),
    config_signs=({"model_type": "gpt_oss"},),
    megatron=_megatron.GPT_OSS,
    tiny=dict(v=24, d=16, f=12, h=8, k=4, e=4, x=4, db=3, fb=5, i=2),
)
