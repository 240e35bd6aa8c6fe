"""``--vocab-size``: rows of zeros are added, or rows are cut off."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import ckptctl
from ckptctl.errors import CkptError
from tests.checkpoints import load_any_reference, save_hf, tiny_llama
from tests.checkpoints.golden import Golden

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.mark.parametrize("to", ["hf", "dcp"])
def test_larger_vocab_size_pads_with_zeros(tmp_path: Path, to: str) -> None:
    state, config = tiny_llama("llama3")
    source = save_hf(tmp_path / "in", state, config, shards=2)
    ckptctl.convert(source, tmp_path / "out", to=to, vocab_size=160)
    found = load_any_reference(tmp_path / "out")
    for key in (EMBED, HEAD):
        assert found[key].shape == (160, 64) and found[key].dtype == torch.bfloat16
        assert torch.equal(found[key][:128], state[key])
        assert not found[key][128:].any()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == 160


def test_padded_vocab_is_sharded_and_truncated_back(tmp_path: Path) -> None:
    state, config = tiny_llama("llama3")
    source = save_hf(tmp_path / "in", state, config)
    ckptctl.convert(source, tmp_path / "meta", to="meta", mp=2, vocab_size=132)
    rank = torch.load(tmp_path / "meta" / "consolidated.01.pth", weights_only=True)
    embed = rank["tok_embeddings.weight"]
    assert torch.equal(embed[:62], state[EMBED][66:]) and not embed[62:].any()
    assert json.loads((tmp_path / "meta" / "params.json").read_text())["vocab_size"] == 132
    cut = ckptctl.convert(tmp_path / "meta", tmp_path / "back", to="hf", vocab_size=128)
    assert any("vocab_size=128` drops the last 4 rows" in note for note in cut.plan.notes)
    found = load_any_reference(tmp_path / "back")
    assert all(torch.equal(found[key], state[key]) for key in state)


def test_vocab_size_of_unknown_model_is_an_error(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(3)}, tmp_path / "in.pt")
    with pytest.raises(CkptError, match="known model type"):
        ckptctl.convert(tmp_path / "in.pt", tmp_path / "out", to="dcp", vocab_size=4)


def test_vocab_axis_fused_with_other_axis_is_refused(tmp_path: Path) -> None:
    source = Golden.read("llama3_vision").save(tmp_path / "in")
    with pytest.raises(CkptError, match="fused with another axis") as caught:
        ckptctl.convert(source, tmp_path / "out", to="hf", vocab_size=256)
    assert caught.value.where == "tensor `language_model.model.embed_tokens.weight`"
