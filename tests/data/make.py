"""Make ``tests/data/tiny-llama3-hf``: ``python -m tests.data.make [FOLDER]``.

A Llama 3.1 of 127,296 parameters, random weights and norms in bf16, GQA, scaled RoPE, written by
transformers' own ``save_pretrained`` in several shards, with a tokenizer that transformers loads.
The same versions of torch, transformers and tokenizers give the same bytes.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tests.checkpoints.llama import tiny_llama

FOLDER = Path(__file__).parent / "tiny-llama3-hf"
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ message.role }}: {{ message.content }}\n{% endfor %}"
)


def make(folder: Path) -> None:
    """Write the checkpoint to *folder*."""
    save_model(folder)
    save_tokenizer(folder)
    for file in folder.iterdir():
        file.chmod(0o644)  # safetensors 0.8 leaves 0600


def save_model(folder: Path) -> None:
    """Write weights, index, ``config.json`` and ``generation_config.json``."""
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    weights, config = tiny_llama("llama3", seed=20250731, spelling="v5")
    model: Any = LlamaForCausalLM(LlamaConfig(**config))
    model = model.to(torch.bfloat16)
    model.load_state_dict(weights, strict=True)
    generation: Any = GenerationConfig
    model.generation_config = generation(
        bos_token_id=1, eos_token_id=[2, 3], do_sample=True, temperature=0.6, top_p=0.9
    )
    model.save_pretrained(folder, max_shard_size="100KB")


def save_tokenizer(folder: Path) -> None:
    """Write a tokenizer of single ASCII characters: 128 entries, four of them special."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<unk>", "<s>", "</s>", "<eot>"]
    characters = [chr(code) for code in range(32, 127)]
    spare = [f"<reserved_{index}>" for index in range(128 - len(special) - len(characters))]
    vocabulary = {token: index for index, token in enumerate(special + characters + spare)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(""), "isolated")
    tokenizer.decoder = decoders.Fuse()
    wrapper: Any = PreTrainedTokenizerFast
    wrapper(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=["<eot>"],
        chat_template=TEMPLATE,
        model_max_length=131072,
    ).save_pretrained(folder)


if __name__ == "__main__":
    make(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
