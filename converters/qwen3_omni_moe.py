"""Qwen 3 Omni 30B-A3B: Qwen 3 MoE that sees and hears (thinker), and speaks (talker, code2wav).

=========  =====================================================================================
submodel   tensors
=========  =====================================================================================
thinker    Qwen 3 MoE, the vision tower of Qwen 3 VL and an audio tower; always there
talker     Qwen 3 MoE with shared experts, which writes the first codebook of speech, and a small
           dense model that writes the others
code2wav   a decoder that computes sound from codebooks: four stages after two that upsample
=========  =====================================================================================

Thinking models and captioners have only the thinker (``enable_audio_output``). transformers 5 has
the thinker's tensors under ``thinker.model`` and packed experts in memory (``hf-v5``). mlx-vlm has
stacked experts and channels-last convolutions.

Sources: transformers' ``modeling_qwen3_omni_moe.py`` and ``conversion_mapping.py``
(``Qwen2_5OmniThinkerForConditionalGeneration``, ``qwen2_moe``), mlx-vlm's
``models/qwen3_omni_moe``.
"""

from ckptctl.planner.layouts import CHOSEN, Demand, Family

from . import _proofs, qwen2_moe, qwen3_5, qwen3_5_text, qwen3_moe, qwen3_vl

MERGER = """
merger_norm       vd     merger.ln_q.weight
merger_norm_bias  vd     merger.ln_q.bias
merger_w1         vn vm  merger.mlp.0.weight
merger_w1_bias    vn     merger.mlp.0.bias
merger_w2         d vn   merger.mlp.2.weight
merger_w2_bias    d      merger.mlp.2.bias
"""

DEEPSTACK = """
deep_norm       vm     ln_q.weight
deep_norm_bias  vm     ln_q.bias
deep_w1         vn vm  mlp.0.weight
deep_w1_bias    vn     mlp.0.bias
deep_w2         d vn   mlp.2.weight
deep_w2_bias    d      mlp.2.bias
"""

VISUAL = (
    "logical  axes  hf: thinker.visual." + qwen3_5.VISION,
    "logical  axes  hf: thinker.visual.blocks.{u}."
    + qwen3_5.VISION_ATTENTION
    + qwen3_5.VISION_LAYER,
    "logical  axes  hf: thinker.visual." + MERGER,
    "logical  axes  hf: thinker.visual.merger_list.{w}." + DEEPSTACK,
)

AUDIO = """
logical            axes          hf: thinker.audio_tower.
audio_conv_1       aa one kh kw  conv2d1.weight
audio_conv_1_bias  aa            conv2d1.bias
audio_conv_2       ab aa kh kw   conv2d2.weight
audio_conv_2_bias  ab            conv2d2.bias
audio_conv_3       ac ab kh kw   conv2d3.weight
audio_conv_3_bias  ac            conv2d3.bias
audio_input        ad ai         conv_out.weight
audio_norm         ad            ln_post.weight
audio_norm_bias    ad            ln_post.bias
audio_w1           an ad         proj1.weight
audio_w1_bias      an            proj1.bias
audio_w2           d an          proj2.weight
audio_w2_bias      d             proj2.bias
"""

AUDIO_LAYER = """
logical            axes   hf: thinker.audio_tower.layers.{n}.
audio_q            aq ad  self_attn.q_proj.weight
audio_q_bias       aq     self_attn.q_proj.bias
audio_k            aq ad  self_attn.k_proj.weight
audio_k_bias       aq     self_attn.k_proj.bias
audio_v            aq ad  self_attn.v_proj.weight
audio_v_bias       aq     self_attn.v_proj.bias
audio_o            ad aq  self_attn.out_proj.weight
audio_o_bias       ad     self_attn.out_proj.bias
audio_norm_1       ad     self_attn_layer_norm.weight
audio_norm_1_bias  ad     self_attn_layer_norm.bias
audio_w1           af ad  fc1.weight
audio_w1_bias      af     fc1.bias
audio_w2           ad af  fc2.weight
audio_w2_bias      ad     fc2.bias
audio_norm_2       ad     final_layer_norm.weight
audio_norm_2_bias  ad     final_layer_norm.bias
"""

NORM_2 = """
norm_2  d  post_attention_layernorm.weight
"""

OUTPUT = """
logical  axes  hf
output   v d   thinker.lm_head.weight
"""

TALKER = """
logical                       axes   hf: talker.
talker_text_w1?speech         tf d   text_projection.linear_fc1.weight
talker_text_w1_bias?speech    tf     text_projection.linear_fc1.bias
talker_text_w2?speech         td tf  text_projection.linear_fc2.weight
talker_text_w2_bias?speech    td     text_projection.linear_fc2.bias
talker_hidden_w1?speech       tf d   hidden_projection.linear_fc1.weight
talker_hidden_w1_bias?speech  tf     hidden_projection.linear_fc1.bias
talker_hidden_w2?speech       td tf  hidden_projection.linear_fc2.weight
talker_hidden_w2_bias?speech  td     hidden_projection.linear_fc2.bias
talker_embed?speech           tv td  model.codec_embedding.weight
talker_norm?speech            td     model.norm.weight
talker_output?speech          tv td  codec_head.weight
"""

TALKER_LAYER = """
logical                    axes        hf: talker.model.layers.{t}.
talker_q?speech            (th te) td  self_attn.q_proj.weight
talker_k?speech            (tk te) td  self_attn.k_proj.weight
talker_v?speech            (tk te) td  self_attn.v_proj.weight
talker_o?speech            td (th te)  self_attn.o_proj.weight
talker_q_norm?speech       te          self_attn.q_norm.weight
talker_k_norm?speech       te          self_attn.k_norm.weight
talker_norm_1?speech       td          input_layernorm.weight
talker_router?speech       y td        mlp.gate.weight
talker_expert_w1?speech    y tm td     mlp.experts.{y}.gate_proj.weight
talker_expert_w3?speech    y tm td     mlp.experts.{y}.up_proj.weight
talker_expert_w2?speech    y td tm     mlp.experts.{y}.down_proj.weight
talker_shared_w1?speech    ts td       mlp.shared_expert.gate_proj.weight
talker_shared_w3?speech    ts td       mlp.shared_expert.up_proj.weight
talker_shared_w2?speech    td ts       mlp.shared_expert.down_proj.weight
talker_shared_gate?speech  one td      mlp.shared_expert_gate.weight
talker_norm_2?speech       td          post_attention_layernorm.weight
"""

CODES = """
logical             axes     hf: talker.code_predictor.
code_embed?speech   g cv cd  model.codec_embedding.{g}.weight
code_norm?speech    cd       model.norm.weight
code_output?speech  g cv cd  lm_head.{g}.weight
"""

CODE_LAYER = """
logical             axes        hf: talker.code_predictor.model.layers.{c}.
code_q?speech       (ch ce) cd  self_attn.q_proj.weight
code_k?speech       (ck ce) cd  self_attn.k_proj.weight
code_v?speech       (ck ce) cd  self_attn.v_proj.weight
code_o?speech       cd (ch ce)  self_attn.o_proj.weight
code_q_norm?speech  ce          self_attn.q_norm.weight
code_k_norm?speech  ce          self_attn.k_norm.weight
code_norm_1?speech  cd          input_layernorm.weight
code_w1?speech      cf cd       mlp.gate_proj.weight
code_w3?speech      cf cd       mlp.up_proj.weight
code_w2?speech      cd cf       mlp.down_proj.weight
code_norm_2?speech  cd          post_attention_layernorm.weight
"""

WAVE_LAYER = """
logical              axes        hf: code2wav.pre_transformer.layers.{b}.
wave_q?speech        (wh we) wd  self_attn.q_proj.weight
wave_k?speech        (wk we) wd  self_attn.k_proj.weight
wave_v?speech        (wk we) wd  self_attn.v_proj.weight
wave_o?speech        wd (wh we)  self_attn.o_proj.weight
wave_scale_1?speech  wd          self_attn_layer_scale.scale
wave_norm_1?speech   wd          input_layernorm.weight
wave_w1?speech       wf wd       mlp.gate_proj.weight
wave_w3?speech       wf wd       mlp.up_proj.weight
wave_w2?speech       wd wf       mlp.down_proj.weight
wave_scale_2?speech  wd          mlp_layer_scale.scale
wave_norm_2?speech   wd          post_attention_layernorm.weight
"""

WAVE_BEFORE = """
logical                 axes      hf: code2wav.
wave_embed?speech       wc wd     code_embedding.weight
wave_norm?speech        wd        pre_transformer.norm.weight
wave_input?speech       sa wd st  decoder.0.conv.weight
wave_input_bias?speech  sa        decoder.0.conv.bias
"""

UPSAMPLE = """
logical                  axes            hf: code2wav.upsample.{n}.
up_{n}?speech            wi wd {kernel}  0.conv.weight
up_{n}_bias?speech       wd              0.conv.bias
up_{n}_conv?speech       wd one st       1.dwconv.conv.weight
up_{n}_conv_bias?speech  wd              1.dwconv.conv.bias
up_{n}_norm?speech       wd              1.norm.weight
up_{n}_norm_bias?speech  wd              1.norm.bias
up_{n}_w1?speech         wp wd           1.pwconv1.weight
up_{n}_w1_bias?speech    wp              1.pwconv1.bias
up_{n}_w2?speech         wd wp           1.pwconv2.weight
up_{n}_w2_bias?speech    wd              1.pwconv2.bias
up_{n}_scale?speech      wd              1.gamma
"""

STAGE = """
logical                 axes                    hf: code2wav.decoder.{n}.block.
stage_{n}_alpha?speech  {size}                  0.alpha
stage_{n}_beta?speech   {size}                  0.beta
stage_{n}?speech        {size} {half} {kernel}  1.conv.weight
stage_{n}_bias?speech   {half}                  1.conv.bias
"""

UNIT = """
logical                          axes               hf: code2wav.decoder.{n}.block.{m}.
unit_{n}_{m}_alpha_1?speech      {half}             act1.alpha
unit_{n}_{m}_beta_1?speech       {half}             act1.beta
unit_{n}_{m}_conv_1?speech       {half} {same} st   conv1.conv.weight
unit_{n}_{m}_conv_1_bias?speech  {half}             conv1.conv.bias
unit_{n}_{m}_alpha_2?speech      {half}             act2.alpha
unit_{n}_{m}_beta_2?speech       {half}             act2.beta
unit_{n}_{m}_conv_2?speech       {half} {same} one  conv2.conv.weight
unit_{n}_{m}_conv_2_bias?speech  {half}             conv2.conv.bias
"""

WAVE_AFTER = """
logical                  axes       hf: code2wav.decoder.
wave_alpha?speech        se         5.alpha
wave_beta?speech         se         5.beta
wave_output?speech       one se st  6.conv.weight
wave_output_bias?speech  one        6.conv.bias
"""

HF_V5 = """
logical           hf-v5: talker.model.layers.{t}.
talker_expert_w1  mlp.experts.gate_up_proj#0.1
talker_expert_w3  mlp.experts.gate_up_proj#1.1
talker_expert_w2  mlp.experts.down_proj
"""

MLX_AUDIO = """
logical       mlx: thinker.audio_tower.
audio_conv_1  conv2d1.weight aa kh kw one
audio_conv_2  conv2d2.weight ab kh kw aa
audio_conv_3  conv2d3.weight ac kh kw ab
"""

MLX_TALKER = """
logical           mlx: talker.model.layers.{t}.
talker_expert_w1  mlp.switch_mlp.gate_proj.weight
talker_expert_w3  mlp.switch_mlp.up_proj.weight
talker_expert_w2  mlp.switch_mlp.down_proj.weight
"""

MLX_WAVE = """
logical      mlx: code2wav.
wave_input   decoder.0.conv.weight sa st wd
wave_output  decoder.6.conv.weight one st se
"""

MLX_UPSAMPLE = """
logical      mlx: code2wav.upsample.{n}.
up_{n}       0.conv.weight wd {kernel} wi
up_{n}_conv  1.dwconv.conv.weight wd st one
"""

MLX_STAGE = """
logical    mlx: code2wav.decoder.{n}.block.
stage_{n}  1.conv.weight {half} {kernel} {size}
"""

MLX_UNIT = """
logical              mlx: code2wav.decoder.{n}.block.{m}.
unit_{n}_{m}_conv_1  conv1.conv.weight {half} st {same}
unit_{n}_{m}_conv_2  conv2.conv.weight {half} one {same}
"""

STAGES = (
    {"n": 1, "size": "sa", "half": "sb", "same": "rb", "kernel": "ka"},
    {"n": 2, "size": "sb", "half": "sc", "same": "rc", "kernel": "kb"},
    {"n": 3, "size": "sc", "half": "sd", "same": "rd", "kernel": "kc"},
    {"n": 4, "size": "sd", "half": "se", "same": "re", "kernel": "kd"},
)

UPSAMPLES = ({"n": 0, "kernel": "ua"}, {"n": 1, "kernel": "ub"})
UNITS = tuple({**stage, "m": m} for stage in STAGES for m in (2, 3, 4))

CODE2WAV = (
    WAVE_BEFORE,
    WAVE_LAYER,
    *(UPSAMPLE.format(**upsample) for upsample in UPSAMPLES),
    *(STAGE.format(**stage) for stage in STAGES),
    *(UNIT.format(**unit) for unit in UNITS),
    WAVE_AFTER,
)

MLX = (
    "logical  axes  mlx: thinker.vision_tower." + qwen3_5.MERGER,
    "logical  axes  mlx: thinker.vision_tower.deepstack_merger_list.{w}." + qwen3_vl.DEEPSTACK,
    qwen3_5.MLX_PATCH.replace("vision_tower.", "thinker.vision_tower."),
    MLX_AUDIO,
    qwen2_moe.MLX.replace("mlx: model.", "mlx: thinker.language_model.model."),
    MLX_TALKER,
    MLX_WAVE,
    *(MLX_UPSAMPLE.format(**upsample) for upsample in UPSAMPLES),
    *(MLX_STAGE.format(**stage) for stage in STAGES),
    *(MLX_UNIT.format(**unit) for unit in UNITS),
)

PREFIXES = {
    "hf-v5": {
        "thinker.audio_tower.": "thinker.model.audio_tower.",
        "thinker.visual.": "thinker.model.visual.",
        "thinker.model.": "thinker.model.language_model.",
    },
    "mlx": {
        "thinker.visual.": "thinker.vision_tower.",
        "thinker.model.": "thinker.language_model.model.",
        "thinker.lm_head.": "thinker.language_model.lm_head.",
    },
}

VISION_FORMULAS = tuple(
    (axis, formula.replace("vision_config.", "thinker_config.vision_config."))
    for axis, formula in qwen3_5.VISION_FORMULAS
)

WAVE_SIZES = {"sa": 1, "sb": 2, "sc": 4, "sd": 8, "se": 16, "rb": 2, "rc": 4, "rd": 8, "re": 16}
"""Divisors of the size of the first stage."""

FAMILY = Family(
    name="qwen3_omni_moe",
    title="Qwen 3 Omni",
    aliases=("qwen3_omni",),
    layouts=("hf", "hf-v5", "mlx"),
    tables=(
        *VISUAL,
        AUDIO,
        AUDIO_LAYER,
        "logical  axes  hf: thinker.model." + qwen3_5_text.EMBED,
        "logical  axes  hf: thinker.model.layers.{i}."
        + qwen3_vl.ATTENTION
        + qwen2_moe.FEED_FORWARD
        + NORM_2,
        "logical  axes  hf: thinker.model." + qwen3_5_text.NORM,
        OUTPUT,
        TALKER,
        TALKER_LAYER,
        CODES,
        CODE_LAYER,
        *CODE2WAV,
        qwen2_moe.PACKED.replace("hf-v5: model.", "hf-v5: thinker.model.language_model."),
        HF_V5,
        *MLX,
    ),
    like={"hf-v5": "hf"},
    prefixes=PREFIXES,
    architecture="Qwen3OmniMoeForConditionalGeneration",
    unquantized=qwen3_vl.UNQUANTIZED,
    variants=(("dense", "moe"),),
    kinds=tuple(kind.with_prefix("thinker_config.text_config") for kind in qwen2_moe.FAMILY.kinds),
    demands=(
        Demand(("speech",), {"enable_audio_output": CHOSEN}),
        Demand(("speech",), {"enable_audio_output": None}),  # transformers' default is true
    ),
    constants={"one": 1, "kh": 3, "kw": 3, "st": 7},
    composite=qwen3_moe.FAMILY.composite,
    formulas=(
        *VISION_FORMULAS,
        ("w", "len(thinker_config.vision_config.deepstack_visual_indexes)"),
        ("d", "thinker_config.audio_config.output_dim"),
        ("aq", "thinker_config.audio_config.d_model"),
        ("an", "thinker_config.audio_config.d_model"),
        ("d", "talker_config.thinker_hidden_size"),
        ("g", "talker_config.code_predictor_config.num_code_groups - 1"),
        ("wc", "code2wav_config.codebook_size * code2wav_config.num_quantizers"),
        ("wi", "code2wav_config.hidden_size"),
        ("wp", "4 * code2wav_config.hidden_size"),
        *(
            (axis, f"code2wav_config.decoder_dim / {divisor}")
            for axis, divisor in WAVE_SIZES.items()
        ),
    ),
    sizes={
        **{
            axis: ("thinker_config.text_config." + names[0], "")
            for axis, names in qwen3_moe.FAMILY.sizes.items()
        },
        **{
            axis: ("thinker_config." + names[0], "") for axis, names in qwen3_5.VISION_SIZES.items()
        },
        "aa": ("thinker_config.audio_config.downsample_hidden_size", ""),
        "ab": ("thinker_config.audio_config.downsample_hidden_size", ""),
        "ac": ("thinker_config.audio_config.downsample_hidden_size", ""),
        "ad": ("thinker_config.audio_config.d_model", ""),
        "af": ("thinker_config.audio_config.encoder_ffn_dim", ""),
        "n": ("thinker_config.audio_config.encoder_layers", ""),
        "tv": ("talker_config.text_config.vocab_size", ""),
        "td": ("talker_config.text_config.hidden_size", ""),
        "tf": ("talker_config.text_config.intermediate_size", ""),
        "th": ("talker_config.text_config.num_attention_heads", ""),
        "tk": ("talker_config.text_config.num_key_value_heads", ""),
        "te": ("talker_config.text_config.head_dim", ""),
        "y": ("talker_config.text_config.num_experts|num_local_experts", ""),
        "tm": ("talker_config.text_config.moe_intermediate_size", ""),
        "ts": ("talker_config.text_config.shared_expert_intermediate_size", ""),
        "t": ("talker_config.text_config.num_hidden_layers", ""),
        "cv": ("talker_config.code_predictor_config.vocab_size", ""),
        "cd": ("talker_config.code_predictor_config.hidden_size", ""),
        "ch": ("talker_config.code_predictor_config.num_attention_heads", ""),
        "ck": ("talker_config.code_predictor_config.num_key_value_heads", ""),
        "ce": ("talker_config.code_predictor_config.head_dim", ""),
        "cf": ("talker_config.code_predictor_config.intermediate_size", ""),
        "c": ("talker_config.code_predictor_config.num_hidden_layers", ""),
        "wd": ("code2wav_config.hidden_size", ""),
        "wh": ("code2wav_config.num_attention_heads", ""),
        "wk": ("code2wav_config.num_key_value_heads", ""),
        "wf": ("code2wav_config.intermediate_size", ""),
        "b": ("code2wav_config.num_hidden_layers", ""),
    },
    proofs=_proofs.get_proofs("hf", "hf-v5", "mlx", mlx=_proofs.MLX_VLM),
    config_signs=({"model_type": "qwen3_omni_moe"},),
    tiny={**qwen3_moe.FAMILY.tiny, **qwen3_5.VISION_TINY, "w": 2}
    | {"aa": 4, "ab": 5, "ac": 3, "ai": 9, "ad": 11, "an": 12, "aq": 6, "af": 17, "n": 2}
    | {"tv": 21, "td": 14, "tf": 15, "th": 4, "tk": 2, "te": 6, "y": 3, "tm": 7, "ts": 9, "t": 2}
    | {"g": 3, "cv": 13, "cd": 16, "ch": 4, "ck": 2, "ce": 5, "cf": 19, "c": 2}
    | {"wd": 10, "wi": 8, "wh": 4, "wk": 2, "we": 3, "wf": 22, "wc": 26, "wp": 20, "b": 2}
    | {"ua": 2, "ub": 3, "ka": 4, "kb": 5, "kc": 6, "kd": 7}
    | {"sa": 12, "sb": 6, "sc": 5, "sd": 4, "se": 3, "rb": 8, "rc": 7, "rd": 9, "re": 2},
)
