"""config.json of text models that mlx-lm calls by the name of the model with pictures."""

import pytest

from ckptctl.families import families, family
from ckptctl.planner.configs.alone import for_layout
from ckptctl.planner.mapping.detect import configured

OWN = {"model_type": "qwen3_5_text", "hidden_size": 64, "architectures": ["Qwen3_5ForCausalLM"]}
AS_MLX = OWN | {"model_type": "qwen3_5"}
NESTED = {
    "model_type": "qwen3_5",
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "tie_word_embeddings": True,
    "text_config": {"model_type": "qwen3_5_text", "hidden_size": 64},
}
SEEING = NESTED | {"vision_config": {"depth": 2}}


def test_mlx_lm_knows_it_by_another_name_and_back():
    text = family("qwen3_5_text")
    assert for_layout(OWN, text, "mlx") == AS_MLX
    assert for_layout(AS_MLX, text, "mlx") == AS_MLX
    assert for_layout(AS_MLX, text, "hf") == OWN
    assert for_layout(OWN, text, "hf") == OWN
    assert for_layout(NESTED, text, "hf") == OWN | {"tie_word_embeddings": True}
    assert for_layout(NESTED, text, "mlx") == NESTED


def test_of_others_nothing_changes():
    for name, layout in (("qwen3_5", "hf"), ("qwen3_5_text", "hf"), ("llama3", "mlx")):
        assert for_layout(SEEING, family(name), layout) == SEEING
    assert for_layout(OWN, None, "mlx") == OWN
    assert for_layout({"model_type": "llama"}, family("qwen3_5_text"), "mlx") == {
        "model_type": "llama"
    }


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (OWN, "qwen3_5_text"),
        (AS_MLX, "qwen3_5_text"),
        (NESTED, "qwen3_5_text"),
        (SEEING, "qwen3_5"),
    ],
)
def test_the_vision_config_tells_which_model_it_is(config, name):
    assert configured(families(), config) == [name]
