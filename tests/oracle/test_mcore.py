"""What ckptctl writes for Megatron-Core is what it loads and computes, and the other way round.

Megatron-Core's own ``GPTModel`` on gloo ranks, divided in every way, against transformers.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

import ckptctl
from tests.checkpoints.readers import differences
from tests.oracle.mcore_install import require_megatron, run_on_megatron_ranks
from tests.oracle.tiny import family_of

pytest.importorskip("transformers", reason="the oracle extra is not installed")

from tests.oracle import hf_models
from tests.oracle.mcore_models import MODELS, NEWER, PADDED, VOCABULARY, Ranks, Recipe, recipe, tiny
from tests.oracle.models import TOLERANCE, distance

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(
        importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"
    ),
]
JOBS = "tests.oracle.mcore_ranks"
WRONG = 0.1
"""Any axis in another order moves the logits by more than this part of the largest."""

LESS_EXACT = {
    "qwen3_5_text": (1e-4, 0.01),
    "qwen3_5_moe_text": (1e-4, 0.01),
    "qwen3_next": (1e-4, 0.01),
}
"""Other bounds of the difference, right and wrong: delta nets make up most of these models."""

DENSE = (Ranks(), Ranks(2, 1), Ranks(1, 2), Ranks(2, 2))
EXPERTS = (*DENSE, Ranks(1, 1, 2), Ranks(2, 1, 2))
SPARSE = (Ranks(), Ranks(1, 1, 2))
"""Sparse attention needs sequence parallelism on tensor-parallel ranks, and shares choices."""
EVERY = ("qwen3", "qwen3_moe", "deepseek_v3", "nemotron_h")
"""Models that are divided in every way; others are whole and divided most."""
UNLIKE = {"moe_layer_freq", "linear_attention_freq", "is_hybrid_model"}
"""Fields of models whose layers are not alike: they are never stacked."""
SPELLINGS = ("stacked", "separate", "singleton")
NAMES = (*SPELLINGS, "local")
"""The last: stacked under the names of the local specification."""

NORM = re.compile(r"decoder\.layers\.(\d+)\.(.*norm.*weight)")


class Proof(NamedTuple):
    """What was made of one model.

    Attributes:
        name: The key of ``TINY``.
        recipe: The same model for Megatron-Core.
        folder: Has ``hf/``, ours (``apart/``, ``stacked/``) and what the ranks wrote.
        logits: Of transformers.
    """

    name: str
    recipe: Recipe
    folder: Path
    logits: torch.Tensor

    @property
    def family(self) -> str:
        return family_of(self.name)

    @property
    def tolerance(self) -> float:
        return LESS_EXACT.get(self.name, (TOLERANCE, WRONG))[0]

    @property
    def least_wrong(self) -> float:
        return LESS_EXACT.get(self.name, (TOLERANCE, WRONG))[1]

    def apart(self, found: torch.Tensor) -> float:
        """Return the largest difference as a part of the largest logit."""
        return distance(found, self.logits) / float(self.logits.abs().max())

    def read(self, file: str) -> Any:
        return torch.load(self.folder / file, weights_only=True)


def divisions(name: str, made: Recipe) -> tuple[Ranks, ...]:
    if name in NEWER:
        return SPARSE
    every = EXPERTS if made.experts else DENSE
    return every if name in EVERY else (every[0], every[-1])


@pytest.fixture(scope="module", params=(*MODELS, *NEWER))
def proof(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Proof:
    """Write a model of transformers for Megatron-Core and have its ranks load, run and save it."""
    name = request.param
    if name in NEWER and version("megatron-core").startswith("0.16."):
        pytest.skip("sparse attention of Megatron-Core 0.16 has other tensors")
    if name == "deepseek_v2.lite" and not version("megatron-core").startswith("0.16."):
        pytest.skip("Megatron-Core 0.19 norms the input of its queries again, unlike the model")
    folder = tmp_path_factory.mktemp(name)
    made = recipe(name)
    model = hf_models.random_model(tiny(name))
    hf_models.save(model, folder / "hf")
    given = {"apart": folder / "apart"}
    family = family_of(name)
    ckptctl.convert(folder / "hf", given["apart"], to="mcore", model_type=family)
    if not UNLIKE & made.options.keys():
        given["stacked"] = folder / "stacked"
        ckptctl.convert(
            folder / "hf", given["stacked"], to="mcore", model_type=family, stack_layers=True
        )
    how = divisions(name, made)
    worlds = sorted({ranks.world for ranks in how})
    run_on_megatron_ranks(f"{JOBS}:prove", worlds, folder, made, how, given, timeout=240)
    return Proof(name, made, folder, hf_models.logits(model))


def test_mcore_names_and_shapes_match_live_model(proof: Proof) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    metadata = FileSystemReader(proof.folder / "apart" / "release").read_metadata()
    found = {
        key: tuple(value.size)
        for key, value in metadata.state_dict_metadata.items()
        if hasattr(value, "size")
    }
    expected = proof.read("listed.pt")["separate"]
    for key in found.keys() & set(PADDED):
        assert found[key][0] >= VOCABULARY and found[key][1:] == expected[key][1:]
        found[key] = expected[key]
    assert found == expected


def test_norm_names_match_transformer_engine_spec(proof: Proof) -> None:
    """Those of Transformer Engine cannot be run here; its specification can be read."""
    if proof.recipe.pattern:
        pytest.skip("the model that runs has Transformer Engine's specification")
    norms = proof.read("norms.pt")

    def is_fused(keys: Iterable[str]) -> bool:
        names = [match.groups() for match in map(NORM.fullmatch, keys) if match]
        assert len(names) >= 8
        return all(name in norms[int(i)] for i, name in names)

    assert is_fused(proof.read("listed.pt")["separate"])
    assert not (proof.recipe.named_twice and is_fused(proof.read("local.pt")))


def test_newest_megatron_norms_queries_without_latent_again() -> None:
    """DeepSeek-V2-Lite has no such norm: queries and latents read one normed state."""
    require_megatron("0.19", "before, the specification alone decided")
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.mla_qk_norm_config import QKNormConfigResolver
    from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules

    plain, fused = type("Linear", (), {}), type("NormedLinear", (), {})
    engine = SimpleNamespace(
        layer_norm=lambda **_: IdentityOp,
        column_parallel_linear=lambda: plain,
        column_parallel_layer_norm_linear=lambda: fused,
    )
    parts = MLASelfAttentionSubmodules(
        linear_q_proj=plain,
        linear_kv_up_proj=fused,
        linear_proj=plain,
        q_layernorm=IdentityOp,
        kv_layernorm=IdentityOp,
    )
    config = SimpleNamespace(
        q_lora_rank=None,
        experimental_attention_variant=None,
        transformer_impl="transformer_engine",
        normalization="RMSNorm",
        qk_l2_norm=False,
        qk_layernorm=True,
    )
    resolver = "megatron.core.transformer.mla_qk_norm_config.get_backend"
    with mock.patch(resolver, lambda _: engine):
        made = QKNormConfigResolver(config, parts).resolve()
        assert (made["linear_q_proj"], made["linear_kv_up_proj"]) == (fused, fused)
        config.qk_layernorm = False
        with pytest.raises(ValueError, match="supposed to be disabled"):
            QKNormConfigResolver(config, parts).resolve()


def test_hf_to_mcore_keeps_logits(proof: Proof) -> None:
    found = {
        file.stem.removeprefix("logits-"): proof.apart(proof.read(file.name))
        for file in sorted(proof.folder.glob("logits-[as][pt]*.pt"))
    }
    print(proof.name, "hf -> mcore", {name: f"{value:.1e}" for name, value in found.items()})
    assert len(found) >= len(divisions(proof.name, proof.recipe))
    assert max(found.values()) <= proof.tolerance


def test_wrong_weight_orders_change_logits(proof: Proof) -> None:
    found = {name: proof.apart(logits) for name, logits in proof.read("wrong.pt").items()}
    print(proof.name, "wrong", {name: f"{value:.2f}" for name, value in found.items()})
    assert min(found.values()) > proof.least_wrong
    assert len(found) >= 6


def needs(proof: Proof, spelling: str) -> None:
    if spelling == "local" and not proof.recipe.named_twice:
        pytest.skip("its norms have the same names in both specifications, or there is only one")


@pytest.mark.parametrize("spelling", NAMES)
def test_megatron_save_converts_to_live_weights(
    proof: Proof, spelling: str, tmp_path: Path
) -> None:
    """However ranks divided it."""
    needs(proof, spelling)
    expected = proof.read("live-local.pt" if spelling == "local" else "live.pt")
    for ranks in divisions(proof.name, proof.recipe):
        source, out = proof.folder / f"saved-{spelling}-{ranks}", tmp_path / f"{ranks}.pt"
        ckptctl.convert(source, out, to="torch")
        state = torch.load(out, weights_only=True)
        found = {key: value for key, value in state.items() if torch.is_tensor(value)}
        for state in (found, expected):
            state |= {key: state[key][:VOCABULARY] for key in state.keys() & set(PADDED)}
        assert not differences(found, expected), ranks


@pytest.mark.parametrize("spelling", NAMES)
def test_mcore_to_hf_keeps_logits(proof: Proof, spelling: str, tmp_path: Path) -> None:
    needs(proof, spelling)
    ranks = divisions(proof.name, proof.recipe)[-1]
    source = proof.folder / f"saved-{spelling}-{ranks}"
    ckptctl.convert(
        source,
        tmp_path / "hf",
        to="hf",
        assets=proof.folder / "hf",
        model_type=proof.family,
    )
    found = hf_models.logits(hf_models.load_strict(tmp_path / "hf"))
    expected = proof.read(f"logits-changed-{ranks}.pt")
    apart = distance(found, expected) / float(expected.abs().max())
    print(proof.name, "mcore -> hf", spelling, str(ranks), f"{apart:.1e}")
    assert apart <= proof.tolerance
    assert proof.apart(found) > proof.least_wrong
