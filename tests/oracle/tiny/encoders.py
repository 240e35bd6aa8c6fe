"""Text encoders of image generators."""

from __future__ import annotations

from transformers import CLIPTextConfig, PretrainedConfig, T5Config

from tests.oracle.tiny.sizes import VOCAB


def clip_text(architecture: str = "CLIPTextModel") -> PretrainedConfig:
    """CLIP ViT-L/14, the text half."""
    config = CLIPTextConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=256,
        projection_dim=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=48,
        hidden_act="quick_gelu",
        bos_token_id=126,
        eos_token_id=127,
        pad_token_id=127,
    )
    config.architectures = [architecture]
    return config


def clip_text_with_projection() -> PretrainedConfig:
    """The same with the projection into the common space."""
    return clip_text("CLIPTextModelWithProjection")


def t5_encoder(d_kv: int = 16) -> PretrainedConfig:
    """The encoder of T5 1.1: gated GELU, relative position bias in layer 0."""
    config = T5Config(
        vocab_size=VOCAB,
        d_model=64,
        d_kv=d_kv,
        d_ff=96,
        num_layers=2,
        num_heads=4,
        relative_attention_num_buckets=32,
        relative_attention_max_distance=128,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
        is_encoder_decoder=False,
    )
    config.architectures = ["T5EncoderModel"]
    return config


def t5_encoder_wide() -> PretrainedConfig:
    """The same where ``num_heads * d_kv`` is not ``d_model``, as in T5 11B."""
    return t5_encoder(d_kv=24)


TINY = {
    "clip_text": clip_text,
    "clip_text.projection": clip_text_with_projection,
    "t5_encoder": t5_encoder,
    "t5_encoder.wide": t5_encoder_wide,
}
