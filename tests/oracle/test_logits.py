"""What ckptctl writes computes what its source computes, by other people's code.

A round trip proves nothing about meaning: a mapper and its inverse can be wrong together. Here
every output is run by an implementation that does not know ckptctl, in both directions.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckptctl
from tests.checkpoints import (
    differences,
    load_any_reference,
    rename,
    save_hf,
    save_meta,
    save_torch,
    tiny_llama,
    to_meta_names,
)
from tests.checkpoints.llama import Config, Kind, StateDict
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
TITAN = ("torchtitan@0.2", "torchtitan@0.3")


def factor_of(config: Config) -> float:
    return float((config["rope_scaling"] or {"factor": 8.0})["factor"])


def source(
    tmp_path: Path, kind: Kind, **sizes: int
) -> tuple[Path, StateDict, Config, torch.Tensor]:
    """Return an hf folder in three shards, its state dict, its config and its logits."""
    state, config = tiny_llama(kind, "float32")
    folder = save_hf(tmp_path / "hf", state, config, shards=3)
    return folder, state, config, transformers_logits_of(state, config)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mp", [1, 2, 4])
def test_hf_to_meta_keeps_logits(tmp_path: Path, kind: Kind, mp: int) -> None:
    """``mp=4`` exceeds the two KV heads of llama3 and llama3_2."""
    folder, _, config, expected = source(tmp_path, kind)
    ckptctl.convert(folder, tmp_path / "meta", to="meta", model_type=kind, mp=mp)
    mine = MetaLlama(tmp_path / "meta", factor_of(config)).logits(tokens())
    assert distance(mine, expected) < TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mp", [1, 2, 4])
def test_meta_to_hf_with_generated_config_keeps_logits(tmp_path: Path, kind: Kind, mp: int) -> None:
    _, state, config, expected = source(tmp_path, kind)
    meta = save_meta(tmp_path / "meta", state, config, mp)
    ckptctl.convert(meta, tmp_path / "out", to="hf", model_type=kind)
    assert distance(transformers_logits(tmp_path / "out"), expected) < TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_resharded_meta_keeps_logits(tmp_path: Path, kind: Kind) -> None:
    _, state, config, expected = source(tmp_path, kind)
    meta = save_meta(tmp_path / "meta", state, config, 4)
    ckptctl.convert(meta, tmp_path / "two", to="meta", model_type=kind, mp=2)
    mine = MetaLlama(tmp_path / "two", factor_of(config)).logits(tokens())
    assert distance(mine, expected) < TOLERANCE


def test_unpermuted_meta_source_changes_logits(tmp_path: Path) -> None:
    """The negative control: what these comparisons would show if a mapping forgot the axes."""
    _, state, config, expected = source(tmp_path, "llama3")
    meta = save_meta(tmp_path / "meta", state, config, permute=False)
    ckptctl.convert(meta, tmp_path / "out", to="hf", model_type="llama3")
    assert distance(transformers_logits(tmp_path / "out"), expected) > WRONG


@pytest.mark.parametrize("kind", KINDS)
def test_chain_through_every_format_keeps_logits(tmp_path: Path, kind: Kind) -> None:
    """hf → dcp → meta → torch → hf."""
    folder, state, _, expected = source(tmp_path, kind)
    path = folder
    for target, name in (("dcp", "dcp"), ("meta", "meta"), ("torch", "torch.pt"), ("hf", "out")):
        assets = folder if target == "hf" else None
        layout = "hf" if target == "torch" else None
        ckptctl.convert(
            path, tmp_path / name, to=target, model_type=kind, assets=assets, to_layout=layout
        )
        path = tmp_path / name
    assert not differences(load_any_reference(tmp_path / "out"), state)
    assert distance(transformers_logits(tmp_path / "out"), expected) < TOLERANCE


def test_shipped_checkpoint_to_meta_keeps_logits(tmp_path: Path, tiny_llama3_hf: Path) -> None:
    ckptctl.convert(tiny_llama3_hf, tmp_path / "meta", to="meta")
    mine = MetaLlama(tmp_path / "meta").logits(tokens())
    assert distance(mine, transformers_logits(tiny_llama3_hf)) < TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_hf_to_torchtune_keeps_logits(tmp_path: Path, kind: Kind) -> None:
    pytest.importorskip("torchtune", reason="torchtune 0.6.1 is not installed")
    folder, _, config, expected = source(tmp_path, kind)
    ckptctl.convert(
        folder, tmp_path / "tune.pt", to="torch", to_layout="torchtune", model_type=kind
    )
    state = torch.load(tmp_path / "tune.pt", weights_only=True)
    assert distance(torchtune_logits(torchtune_model(kind, config), state), expected) < TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_torchtune_to_hf_keeps_logits(tmp_path: Path, kind: Kind) -> None:
    """A model that torchtune itself initialized, so that nothing here chose the names."""
    pytest.importorskip("torchtune", reason="torchtune 0.6.1 is not installed")
    folder, _, config, _ = source(tmp_path, kind)
    torch.manual_seed(5)
    model = torchtune_model(kind, config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (parameter.ndim == 1))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    save_torch(tmp_path / "tune.pt", state)
    ckptctl.convert(
        tmp_path / "tune.pt",
        tmp_path / "out",
        to="hf",
        from_layout="torchtune",
        model_type=kind,
        assets=folder,
    )
    expected = torchtune_logits(model, state)
    assert distance(transformers_logits(tmp_path / "out"), expected) < 10 * TOLERANCE


@pytest.mark.parametrize("layout", TITAN)
@pytest.mark.parametrize("kind", KINDS)
def test_torchtitan_output_equals_renamed_meta_tensors(
    tmp_path: Path, kind: Kind, layout: str
) -> None:
    """torchtitan rotates neighboring pairs as Meta does, so the oracle is Meta's tensors."""
    folder, state, config, _ = source(tmp_path, kind)
    expected = rename(to_meta_names(state, config), "meta", layout)  # type: ignore[arg-type]
    ckptctl.convert(folder, tmp_path / "titan", to="dcp", to_layout=layout, model_type=kind)
    found = load_any_reference(tmp_path / "titan")
    if config["tie_word_embeddings"]:
        head = rename({"lm_head.weight": state["model.embed_tokens.weight"]}, "hf", layout)  # type: ignore[arg-type]
        for name in head.keys() - found.keys():
            del expected[name]
    assert not differences(found, expected)
    ckptctl.convert(
        tmp_path / "titan", tmp_path / "out", to="hf", from_layout=layout, model_type=kind
    )
    assert not differences(load_any_reference(tmp_path / "out"), state)
