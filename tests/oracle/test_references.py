"""The oracles against each other, ckptctl apart: they agree, and they notice what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoints import rename, save_hf, save_meta, tiny_llama, to_meta_names
from tests.checkpoints.llama import Config, Kind
from tests.oracle.meta_llama import MetaLlama
from tests.oracle.models import (
    TOLERANCE,
    WRONG,
    distance,
    tokens,
    torchtune_logits,
    torchtune_model,
    transformers_logits,
    transformers_logits_of,
)

pytest.importorskip("transformers", reason="the oracle extra is not installed")
pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]
KINDS: tuple[Kind, ...] = ("llama2", "llama3", "llama3_2")


def factor_of(config: Config) -> float:
    return float((config["rope_scaling"] or {"factor": 8.0})["factor"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mp", [1, 2, 4])
def test_reference_agrees_with_transformers(tmp_path: Path, kind: Kind, mp: int) -> None:
    state, config = tiny_llama(kind, "float32")
    folder = save_meta(tmp_path / "meta", state, config, mp)
    mine = MetaLlama(folder, factor_of(config)).logits(tokens())
    assert distance(mine, transformers_logits_of(state, config)) < TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_unpermuted_reference_differs_from_transformers(tmp_path: Path, kind: Kind) -> None:
    state, config = tiny_llama(kind, "float32")
    folder = save_meta(tmp_path / "meta", state, config, permute=False)
    mine = MetaLlama(folder, factor_of(config)).logits(tokens())
    assert distance(mine, transformers_logits_of(state, config)) > WRONG


def test_swapped_norms_change_logits(tmp_path: Path) -> None:
    state, config = tiny_llama("llama3", "float32")
    first, second = (
        f"model.layers.0.{name}.weight" for name in ("input_layernorm", "post_attention_layernorm")
    )
    swapped = {**state, first: state[second], second: state[first]}
    mine = MetaLlama(save_meta(tmp_path / "meta", swapped, config)).logits(tokens())
    assert distance(mine, transformers_logits_of(state, config)) > WRONG


def test_wrong_rope_factor_changes_logits(tmp_path: Path) -> None:
    state, config = tiny_llama("llama3_2", "float32")
    folder = save_meta(tmp_path / "meta", state, config)
    expected = transformers_logits_of(state, config)
    assert distance(MetaLlama(folder, 8.0).logits(tokens()), expected) > 10 * TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_v4_and_v5_configs_give_same_logits(tmp_path: Path, kind: Kind) -> None:
    found = []
    for spelling in ("v4", "v5"):
        state, config = tiny_llama(kind, "float32", spelling=spelling)
        found.append(transformers_logits(save_hf(tmp_path / spelling, state, config, shards=2)))
    assert distance(*found) == 0


def test_data_loads_with_its_tokenizer(tiny_llama3_hf: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_llama3_hf)
    assert len(tokenizer) == 128
    assert tokenizer.decode(tokenizer("Hello, shard 7!")["input_ids"]) == "Hello, shard 7!"
    assert transformers_logits(tiny_llama3_hf).shape == (2, 48, 128)


@pytest.mark.parametrize("kind", KINDS)
def test_torchtune_agrees_with_transformers(kind: Kind) -> None:
    pytest.importorskip("torchtune", reason="torchtune 0.6.1 is not installed")
    state, config = tiny_llama(kind, "float32")
    model = torchtune_model(kind, config)
    meta = to_meta_names(state, config)
    wrong = to_meta_names(state, config, permute=False)
    if kind == "llama3_2":
        del meta["output.weight"], wrong["output.weight"]
    expected = transformers_logits_of(state, config)
    right = torchtune_logits(model, rename(meta, "meta", "torchtune"))
    assert distance(right, expected) < TOLERANCE
    assert distance(torchtune_logits(model, rename(wrong, "meta", "torchtune")), expected) > WRONG
