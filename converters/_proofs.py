"""Programs whose logits validate the layouts of families, with the versions of the tests."""

TRANSFORMERS = "transformers 5.24"
MLX_LM = "mlx-lm 0.32.2"
MLX_VLM = "mlx-vlm 0.7.10"
MCORE_019 = "megatron-core 0.19.2 without Transformer Engine"
BRIDGE_06 = "megatron-bridge 0.6.2 without Transformer Engine"
_DEFAULT_PROGRAMS = {
    "hf": TRANSFORMERS,
    "hf-v5": TRANSFORMERS,
    "hf-fresh": TRANSFORMERS,
    "hf-3.5": TRANSFORMERS,
    "torchtune": "torchtune 0.6.1",
    "torchtitan@0.3": "torchtitan 0.3.0",
    "torchtitan@0.2": "torchtitan 0.2.2",
    "llm-compressor": "llm-compressor 0.14.0",
    "mlx": MLX_LM,
    "gguf": f"{TRANSFORMERS}, from GGUF",
    "meta": "llama-models 0.3.0",
    "mistral": "mistral-inference 1.6.0",
    "deepseek": "a model reimplemented from DeepSeek's papers",
    "olmo-core": "OLMo-core 3.0.0",
    "olmo": "OLMo 0.6.0",
    "openai": "gpt-oss 0.0.9",
    "mcore": "megatron-core 0.16.1 without Transformer Engine",
    "mcore-local": "megatron-core 0.16.1",
}


def get_proofs(*layouts: str, **others: str) -> dict[str, str]:
    """Map *layouts* to the programs that validate them. *others* override the default program."""
    return {layout: others.get(layout, _DEFAULT_PROGRAMS.get(layout, "")) for layout in layouts}
