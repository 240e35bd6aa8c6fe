"""DeepSeek's rank files: experts that belong to one rank, everything else cut or copied."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptctl
from ckptctl import formats
from ckptctl.errors import (
    CkptError,
    DamagedError,
    MappingError,
    RefusedError,
    UnsupportedError,
)
from tests.checkpoints import save_hf

D, H, NOPE, ROPE, VALUE, LATENT, F, M, X, V = 32, 4, 8, 4, 8, 16, 24, 8, 4, 48
State = dict[str, torch.Tensor]
NAMES = {
    "embed_tokens": ("embed", 0),
    "input_layernorm": ("attn_norm", None),
    "post_attention_layernorm": ("ffn_norm", None),
    "q_proj": ("wq", 0),
    "kv_a_proj_with_mqa": ("wkv_a", None),
    "kv_a_layernorm": ("kv_norm", None),
    "kv_b_proj": ("wkv_b", 0),
    "o_proj": ("wo", 1),
    "gate": ("gate", None),
    "gate_proj": ("w1", 0),
    "down_proj": ("w2", 1),
    "up_proj": ("w3", 0),
    "norm": ("norm", None),
    "lm_head": ("head", 0),
}


def config() -> dict[str, object]:
    """Return the configuration of what :func:`hf` returns."""
    return {
        "model_type": "deepseek_v3",
        "vocab_size": V,
        "hidden_size": D,
        "intermediate_size": F,
        "moe_intermediate_size": M,
        "num_attention_heads": H,
        "num_key_value_heads": H,
        "q_lora_rank": None,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE,
        "v_head_dim": VALUE,
        "kv_lora_rank": LATENT,
        "num_hidden_layers": 2,
        "first_k_dense_replace": 1,
        "n_routed_experts": X,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
    }


def hf() -> State:
    """Return a DeepSeek-V3 of a dense layer and one with experts."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (V, D),
        "model.norm.weight": (D,),
        "lm_head.weight": (V, D),
    }
    for layer in range(2):
        at = f"model.layers.{layer}."
        shapes |= {
            at + "self_attn.q_proj.weight": (H * (NOPE + ROPE), D),
            at + "self_attn.kv_a_proj_with_mqa.weight": (LATENT + ROPE, D),
            at + "self_attn.kv_a_layernorm.weight": (LATENT,),
            at + "self_attn.kv_b_proj.weight": (H * (NOPE + VALUE), LATENT),
            at + "self_attn.o_proj.weight": (D, H * VALUE),
            at + "input_layernorm.weight": (D,),
            at + "post_attention_layernorm.weight": (D,),
        }
    shapes |= feed_forward("model.layers.0.mlp.", F)
    at = "model.layers.1.mlp."
    shapes |= {at + "gate.weight": (X, D), at + "gate.e_score_correction_bias": (X,)}
    shapes |= feed_forward(at + "shared_experts.", M)
    for expert in range(X):
        shapes |= feed_forward(f"{at}experts.{expert}.", M)
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def feed_forward(at: str, size: int) -> dict[str, tuple[int, ...]]:
    return {
        at + "gate_proj.weight": (size, D),
        at + "up_proj.weight": (size, D),
        at + "down_proj.weight": (D, size),
    }


def shard(rank: int, ranks: int) -> State:
    """Return what DeepSeek's ``convert.py`` gives rank *rank*, written from its rules."""
    found: State = {}
    for name, value in hf().items():
        *parents, last, kind = name.removeprefix("model.").split(".")
        new, dim = NAMES[last]
        named = {"self_attn": "attn", "mlp": "ffn"}
        ending = "bias" if kind == "e_score_correction_bias" else kind
        key = ".".join([*(named.get(part, part) for part in parents), new, ending])
        if "experts" in parents:
            share = X // ranks
            if int(parents[-1]) // share != rank:
                continue
        elif dim is not None:
            value = value.chunk(ranks, dim)[rank].contiguous()
        found[key] = value
    return found


def ranks_of(folder: Path, count: int) -> Path:
    folder.mkdir()
    for rank in range(count):
        save_file(shard(rank, count), folder / f"model{rank}-mp{count}.safetensors")
    return folder


def same(found: State, expected: State) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], value) for name, value in expected.items()
    )


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_deepseek_rank_files_match_reference_sharding(tmp_path: Path, ranks: int) -> None:
    source = save_hf(tmp_path / "hf", hf(), config())
    out = tmp_path / "out"
    ckptctl.convert(source, out, to="deepseek", mp=ranks, verify=True)
    assert len(list(out.glob("*.safetensors"))) == ranks
    for rank in range(ranks):
        assert same(load_file(out / f"model{rank}-mp{ranks}.safetensors"), shard(rank, ranks))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_deepseek_rank_files_convert_to_hf_layout(tmp_path: Path, ranks: int) -> None:
    given = ranks_of(tmp_path / "in", ranks)
    assert formats.detect_format(given).name == "deepseek"
    ckptctl.convert(given, tmp_path / "out.pt", to="torch", to_layout="hf")
    assert same(torch.load(tmp_path / "out.pt", weights_only=True), hf())


@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 2)])
def test_deepseek_rank_files_are_resharded(tmp_path: Path, before: int, after: int) -> None:
    given = ranks_of(tmp_path / "in", before)
    (tmp_path / "assets").mkdir()
    save_hf(tmp_path / "hf", hf(), config())
    out = tmp_path / "out"
    ckptctl.convert(given, out, to="deepseek", mp=after, assets=tmp_path / "hf")
    for rank in range(after):
        assert same(load_file(out / f"model{rank}-mp{after}.safetensors"), shard(rank, after))


def test_mtp_layers_are_refused_unless_excluded(tmp_path: Path) -> None:
    held = hf()
    copies = {n: t.clone() for n, t in held.items() if "layers.1." in n}
    layer = {n.replace("layers.1.", "layers.2."): t for n, t in copies.items()}
    layer |= {f"model.layers.2.{name}.weight": torch.ones(D) for name in ("enorm", "hnorm")}
    layer["model.layers.2.eh_proj.weight"] = torch.ones(D, 2 * D)
    layer["model.layers.2.shared_head.norm.weight"] = torch.ones(D)
    told = {**config(), "num_nextn_predict_layers": 1}
    source = save_hf(tmp_path / "hf", {**held, **layer}, told)
    with pytest.raises(MappingError, match="has no place for 28 tensors") as raised:
        ckptctl.convert(source, tmp_path / "out", to="deepseek")
    assert "they belong to MTP layers, which programs with that layout omit" in str(
        raised.value.why
    )
    assert "`exclude='model.layers.2.*'`; the output of the model stays the same" in str(
        raised.value.hint
    )
    ckptctl.convert(source, tmp_path / "out", to="deepseek", exclude="model.layers.2.*")
    assert same(load_file(tmp_path / "out/model0-mp1.safetensors"), shard(0, 1))


def test_resharding_without_head_count_is_an_error(tmp_path: Path) -> None:
    given = ranks_of(tmp_path / "in", 1)
    with pytest.raises(MappingError, match="num_attention_heads"):
        ckptctl.convert(given, tmp_path / "out", to="deepseek", mp=2)


def _gone(folder: Path) -> None:
    (folder / "model1-mp2.safetensors").unlink()


def _others(folder: Path) -> None:
    (folder / "model1-mp2.safetensors").rename(folder / "model1-mp3.safetensors")


def _lost(folder: Path) -> None:
    held = load_file(folder / "model1-mp2.safetensors")
    del held["layers.1.ffn.experts.2.w1.weight"]
    save_file(held, folder / "model1-mp2.safetensors")


def _swapped(folder: Path) -> None:
    held = [load_file(folder / f"model{rank}-mp2.safetensors") for rank in range(2)]
    for part in ("w1", "w2", "w3"):
        name = f"layers.1.ffn.experts.2.{part}.weight"
        held[0][name] = held[1].pop(name)
    for rank in range(2):
        save_file(held[rank], folder / f"model{rank}-mp2.safetensors")


def _norm(folder: Path) -> None:
    held = load_file(folder / "model1-mp2.safetensors")
    held["norm.weight"] += 1
    save_file(held, folder / "model1-mp2.safetensors")


def _lacking(folder: Path) -> None:
    held = load_file(folder / "model1-mp2.safetensors")
    del held["norm.weight"]
    save_file(held, folder / "model1-mp2.safetensors")


@pytest.mark.parametrize("damage", [_gone, _others, _swapped, _norm, _lacking])
def test_inconsistent_rank_files_are_rejected(tmp_path: Path, damage: object) -> None:
    given = ranks_of(tmp_path / "in", 2)
    damage(given)  # type: ignore[operator]
    with pytest.raises(DamagedError if damage is _gone else UnsupportedError):
        formats.open_checkpoint(given)


def test_missing_expert_is_an_error(tmp_path: Path) -> None:
    given = ranks_of(tmp_path / "in", 2)
    _lost(given)
    with pytest.raises(CkptError, match="the model is missing"):
        ckptctl.convert(given, tmp_path / "out.pt", to="torch", to_layout="hf")


def with_scales(state: State) -> State:
    """Return *state* with its projections in fp8 and a scale for each block of 128 x 128."""
    found: State = {}
    for name, value in state.items():
        found[name] = value
        if name.split(".")[-2] in NAMES and "_proj" in name:
            blocks = [-(-size // 128) for size in value.shape]
            found[name] = value.to(torch.float8_e4m3fn)
            found[f"{name}_scale_inv"] = torch.rand(blocks)
    return found


def test_scales_are_sharded_with_their_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"D": 256, "NOPE": 64, "ROPE": 64, "VALUE": 64, "LATENT": 128, "F": 256, "M": 256}
    for name, size in sizes.items():
        monkeypatch.setattr(f"{__name__}.{name}", size)
    state = with_scales(hf())
    source = save_hf(tmp_path / "hf", state, config())
    ckptctl.convert(source, tmp_path / "out", to="deepseek", mp=2)
    held = [load_file(tmp_path / "out" / f"model{rank}-mp2.safetensors") for rank in range(2)]
    for rank, found in enumerate(held):
        for new, old, dim in (
            ("wq", "q_proj", 0),
            ("wo", "o_proj", 1),
            ("wkv_a", "kv_a_proj_with_mqa", None),
        ):
            scale = state[f"model.layers.0.self_attn.{old}.weight_scale_inv"]
            expected = scale if dim is None else scale.chunk(2, dim)[rank]
            assert torch.equal(found[f"layers.0.attn.{new}.scale"], expected)
        mine = {key for key in found if "ffn.experts." in key and key.endswith("w1.scale")}
        assert mine == {f"layers.1.ffn.experts.{2 * rank + n}.w1.scale" for n in range(2)}
    ckptctl.convert(tmp_path / "out", tmp_path / "back", to="hf", assets=source)
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == state.keys()
    assert all(
        torch.equal(back[k].view(torch.uint8), v.view(torch.uint8)) for k, v in state.items()
    )


@pytest.mark.slow
def test_sharding_within_quantization_blocks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four ranks cut w1 of 384 rows, three blocks, at row 96; two would at 192; three do not."""
    sizes = {"D": 256, "NOPE": 128, "ROPE": 128, "VALUE": 128, "LATENT": 128, "M": 384, "V": 384}
    for name, size in {**sizes, "F": 12 * 128, "H": 12, "X": 12}.items():
        monkeypatch.setattr(f"{__name__}.{name}", size)
    state = with_scales(hf())
    source, out = save_hf(tmp_path / "hf", state, config()), tmp_path / "out"
    with pytest.raises(RefusedError, match="blocks of 128x128") as caught:
        ckptctl.convert(source, out, to="deepseek", mp=4)
    assert "`layers.1.ffn.shared_experts.w1.weight`" in (caught.value.why or "")
    assert "mp=3`" in (caught.value.hint or "")
    assert not out.exists()
    ckptctl.convert(source, tmp_path / "plain", to="deepseek", mp=4, dequantize="bf16")
    ckptctl.convert(source, out, to="deepseek", mp=3)
    for rank in range(3):
        found = load_file(out / f"model{rank}-mp3.safetensors")
        for new, old, dim in (("w1", "gate_proj", 0), ("w2", "down_proj", 1)):
            whole = dequantized(*(state[f"{SHARED}{old}.weight{end}"] for end in ("", SCALE)))
            key = f"layers.1.ffn.shared_experts.{new}"
            part = dequantized(found[f"{key}.weight"], found[f"{key}.scale"])
            assert torch.equal(part, whole.chunk(3, dim)[rank])


def test_splitting_uneven_quantization_blocks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """192 rows have two scales: of the first 96 and the last 96 rows 32 would get a wrong one."""
    for name, size in {"D": 256, "NOPE": 64, "ROPE": 64, "VALUE": 64, "LATENT": 128}.items():
        monkeypatch.setattr(f"{__name__}.{name}", size)
    monkeypatch.setattr(f"{__name__}.F", 256)
    monkeypatch.setattr(f"{__name__}.M", 192)
    source = save_hf(tmp_path / "hf", with_scales(hf()), config())
    with pytest.raises(RefusedError) as caught:
        ckptctl.convert(source, tmp_path / "out", to="deepseek", mp=2)
    assert "[256, 192]" in (caught.value.where or "") and "mp=1`" in (caught.value.hint or "")


SHARED, SCALE = "model.layers.1.mlp.shared_experts.", "_scale_inv"


def dequantized(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    spread = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return weight.float() * spread[: weight.shape[0], : weight.shape[1]]
