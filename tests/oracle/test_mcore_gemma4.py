"""Gemma 4 in Megatron-Bridge's own dense model, on gloo ranks, against transformers."""

from __future__ import annotations

import importlib.util
import json
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from packaging.version import Version

import ckptctl
from ckptctl.errors import CkptError
from tests.checkpoints.readers import differences, load_any_reference
from tests.oracle.mcore_install import run_on_megatron_ranks

pytest.importorskip("transformers", reason="the oracle extra is not installed")

from tests.oracle import hf_models
from tests.oracle.mcore_models import Ranks
from tests.oracle.models import TOLERANCE, distance, tokens
from tests.oracle.tiny import TINY

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(
        importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"
    ),
]
JOBS = "tests.oracle.mcore_gemma4_ranks:"
DIVISIONS = {
    "gemma4_text": (Ranks(), Ranks(2)),
    "gemma4_text.large": (Ranks(),),  # one key head in layers with full attention
}
STACKED = ("gemma4_text.large",)
"""Models whose layers Bridge stacks: those of one width."""
LEAST_WRONG = 0.01


class Proof(NamedTuple):
    """What was made of one model.

    Attributes:
        name: The key of ``TINY``.
        config: config.json, as published.
        folder: Has ``hf/``, ours (``mcore/``) and what the ranks wrote.
        logits: Of transformers.
    """

    name: str
    config: dict[str, Any]
    folder: Path
    logits: torch.Tensor

    def apart(self, found: torch.Tensor, expected: torch.Tensor | None = None) -> float:
        """Return the largest difference as a part of the largest logit."""
        expected = self.logits if expected is None else expected
        return distance(found[..., : expected.shape[-1]], expected) / float(expected.abs().max())

    def read(self, file: str) -> Any:
        return torch.load(self.folder / file, weights_only=True)

    def is_unused(self, layer: int, name: str) -> bool:
        """Return whether transformers' model has no such projection in a layer."""
        is_shared = layer >= len(self.config["layer_types"]) - self.config["num_kv_shared_layers"]
        is_full = self.config["layer_types"][layer] == "full_attention"
        return is_shared or (name == "v" and is_full and self.config["attention_k_eq_v"])


def published(config: dict[str, Any]) -> dict[str, Any]:
    """Return *config* as the Hub has it: sizes of layers of one kind in fields of their own."""
    by_layer = config.pop("per_layer_config", None) or {}
    full = config["layer_types"].index("full_attention")
    sizes = by_layer.get(str(full), {})
    return config | {
        "global_head_dim": sizes.get("head_dim", config["head_dim"]),
        "num_global_key_value_heads": sizes.get(
            "num_key_value_heads", config["num_key_value_heads"]
        ),
    }


def require_bridge() -> None:
    """Skip the test if there is no Megatron-Bridge with a model of Gemma 4."""
    try:
        version = Version(metadata.version("megatron-bridge"))
    except metadata.PackageNotFoundError:
        pytest.skip("megatron-bridge is not installed")
    if version < Version("0.6"):
        pytest.skip(f"megatron-bridge {version} is installed, 0.6 is needed")


@pytest.fixture(scope="module", params=DIVISIONS)
def proof(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Proof:
    """Write a model of transformers for Bridge, and have its ranks load, run and save it."""
    require_bridge()
    name = request.param
    folder = tmp_path_factory.mktemp(name)
    model = hf_models.random_model(TINY[name]())
    hf_models.save(model, folder / "hf")
    config = published(json.loads((folder / "hf/config.json").read_text()))
    ckptctl.convert(folder / "hf", folder / "mcore", to="mcore")
    worlds = sorted({ranks.world for ranks in DIVISIONS[name]})
    arguments = (config, DIVISIONS[name], folder / "mcore")
    run_on_megatron_ranks(f"{JOBS}prove", worlds, folder, *arguments, timeout=240)
    return Proof(name, config, folder, hf_models.logits(model))


def test_names_and_shapes_match_bridges_model(proof: Proof) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    saved = FileSystemReader(proof.folder / "mcore/release").read_metadata().state_dict_metadata
    found = {key: tuple(value.size) for key, value in saved.items() if hasattr(value, "size")}
    assert found == proof.read("listed.pt")
    kinds = {key.split(".")[3] for key in found if "self_attention" in key}
    assert kinds == {"self_attention_sliding", "self_attention_global"}


def test_fused_projections_match_bridges_conversion(proof: Proof) -> None:
    """Also where Bridge repeats keys as values, or has zeros for keys of earlier layers."""
    pairs = proof.read("fused.pt")
    assert len(pairs) == len(proof.config["layer_types"])
    for found, expected in pairs:
        assert torch.equal(found, expected)


def test_norms_of_unused_keys_are_ones(proof: Proof) -> None:
    """As in a new model of Bridge, which has no weights of transformers to load there."""
    norms = proof.read("norms.pt")
    assert len(norms) == len(proof.config["layer_types"])
    for layer, norm in enumerate(norms):
        assert bool((norm == 1).all()) == proof.is_unused(layer, "k"), layer


def test_hf_to_mcore_keeps_logits(proof: Proof) -> None:
    found = {
        str(ranks): proof.apart(proof.read(f"logits-{ranks}.pt")) for ranks in DIVISIONS[proof.name]
    }
    print(proof.name, "hf -> mcore", {name: f"{value:.1e}" for name, value in found.items()})
    assert max(found.values()) <= TOLERANCE


def test_only_unused_projections_keep_logits(proof: Proof) -> None:
    """Other orders of queries or keys change the logits, except of keys that are not used."""
    for name, found in proof.read("wrong.pt").items():
        part, layer = name.split("-")
        apart = proof.apart(found)
        if part == "keys" and proof.is_unused(int(layer), "k"):
            assert apart <= TOLERANCE, name
        else:
            assert apart > LEAST_WRONG, name


@pytest.mark.parametrize("spelling", ["separate", "stacked"])
def test_bridges_save_converts_to_hf_and_keeps_logits(
    proof: Proof, spelling: str, tmp_path: Path
) -> None:
    """Where weights that the model does not use have changed too."""
    for ranks in DIVISIONS[proof.name]:
        source = proof.folder / f"saved-{spelling}-{ranks}"
        out = tmp_path / str(ranks)
        ckptctl.convert(source, out, to="hf", assets=proof.folder / "hf")
        found = hf_models.logits(hf_models.load_strict(out))
        apart = proof.apart(found, proof.read(f"logits-changed-{ranks}.pt")[..., : found.shape[-1]])
        print(proof.name, "mcore -> hf", spelling, str(ranks), f"{apart:.1e}")
        assert apart <= TOLERANCE
        assert proof.apart(found) > LEAST_WRONG


def test_stacked_layers_of_unknown_kind_are_an_error(proof: Proof, tmp_path: Path) -> None:
    if proof.name not in STACKED:
        pytest.skip("Bridge saves its layers separately")
    source = proof.folder / f"saved-stacked-{Ranks()}"
    (source / "iter_0000010/run_config.yaml").rename(tmp_path / "run_config.yaml")
    with pytest.raises(CkptError, match="numbers of stacked layers are unknown"):
        ckptctl.convert(source, tmp_path / "out", to="hf", assets=proof.folder / "hf")
    (tmp_path / "run_config.yaml").rename(source / "iter_0000010/run_config.yaml")


def test_config_with_other_layer_types_is_an_error(proof: Proof, tmp_path: Path) -> None:
    config = json.loads((proof.folder / "hf/config.json").read_text())
    config["layer_types"] = config["layer_types"][::-1]
    (tmp_path / "assets").mkdir()
    (tmp_path / "assets/config.json").write_text(json.dumps(config))
    source = proof.folder / f"saved-separate-{Ranks()}"
    with pytest.raises(CkptError):
        ckptctl.convert(source, tmp_path / "out", to="hf", assets=tmp_path / "assets")


@pytest.mark.parametrize("name", ["gemma4", "gemma4.large"])
def test_model_with_towers_converts_to_bridge_and_back(name: str, tmp_path: Path) -> None:
    require_bridge()
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    model = hf_models.random_model(TINY[name]())
    source = hf_models.save(model, tmp_path / "hf")
    config = json.loads((source / "config.json").read_text())
    config["text_config"] = published(config["text_config"])
    ckptctl.convert(source, tmp_path / "mcore", to="mcore")
    job = f"{JOBS}load_seeing"
    run_on_megatron_ranks(job, [1], tmp_path, config, tmp_path / "mcore", timeout=240)

    folder = tmp_path / "mcore/release"
    saved = FileSystemReader(folder).read_metadata().state_dict_metadata
    found = {key: tuple(value.size) for key, value in saved.items() if hasattr(value, "size")}
    assert found == torch.load(tmp_path / "listed.pt", weights_only=True)

    expected = load_any_reference(source)
    towers = torch.load(tmp_path / "state.pt", weights_only=True)
    assert len(towers) > 20
    assert not differences(towers, {key: expected[f"model.{key}"] for key in towers})

    ids = tokens()
    with torch.no_grad():
        logits = model.eval()(input_ids=ids).logits
    text = torch.load(tmp_path / "logits.pt", weights_only=True)[..., : logits.shape[-1]]
    assert distance(text, logits[..., : text.shape[-1]]) <= TOLERANCE * float(logits.abs().max())

    ckptctl.convert(tmp_path / "saved", tmp_path / "back", to="hf", assets=source)
    assert not differences(load_any_reference(tmp_path / "back"), expected)
