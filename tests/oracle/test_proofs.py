"""The table of ``ckptctl models`` claims what these tests compare, no more and no less."""

from __future__ import annotations

import pytest

from ckptctl import families
from tests.oracle.tiny import TINY, family_of

pytest.importorskip("transformers", reason="the oracle extra is not installed")

from tests.oracle import gguf_files, mcore_models, mlx_models
from tests.oracle.peers import PEERS
from tests.oracle.test_families import in_memory_layout

pytestmark = pytest.mark.oracle

ELSEWHERE = {
    ("llama3_2", "meta"): "test_logits.py",
    ("llama4", "meta"): "test_meta_shards.py (vision) and the text of llama4_text",
    ("gemma3", "hf-fresh"): "test_gemma.py",
    ("ministral3_vision", "mcore"): "test_mcore_seeing.py",
    **{(name, "mcore"): "test_mcore_gemma4.py" for name in ("gemma4", "gemma4_text")},
    **{
        (name, layout): "test_qwen_vl.py"
        for name in ("qwen3_5_moe", "qwen3_5_moe_text")
        for layout in ("hf-3.5", "hf-fresh")
    },
    **{(name, "hf-fresh"): "test_qwen_vl.py" for name in ("qwen4_exp", "qwen4_exp_text")},
    **{("deepseek_v41", layout): "test_deepseek_v41.py" for layout in ("hf", "mlx")},
    ("clip_text", "hf-fresh"): "test_families.py, in_memory_layout",
    **{
        (name, "hf-fresh"): "test_fresh.py"
        for name in (
            *(
                "kimi_k25",
                "deepseek_v4",
                "kimi_linear",
                "bailing_hybrid",
                "hy_v4",
                "ernie4_5_vl_moe",
            ),
            *("llava", "llava_next", "llava_onevision", "paligemma"),
        )
    },
}
"""Compared by a test of its own."""


def compared() -> set[tuple[str, str]]:
    known = families.list_model_types()
    found = {
        (family_of(name), peer.LAYOUT)
        for peer in PEERS
        for name in peer.BUILDERS
        if family_of(name) in known
    }
    for name in TINY:
        family = family_of(name)
        if family in known:
            found |= {(family, "hf"), (family, in_memory_layout(name, family))}
    found |= {(family_of(name), one) for name in mlx_models.TINY for one in ("hf", "mlx")}
    for name in (*mcore_models.MODELS, *mcore_models.NEWER):
        found |= {(family_of(name), "mcore"), (family_of(name), "mcore-local")}
    found |= {(family_of(name), "gguf") for name in {*gguf_files.NAMES} - {*gguf_files.UNREAD}}
    layouts = {
        (name, layout) for name, f in families.load_families().items() for layout in f.layouts
    }
    return (found | ELSEWHERE.keys()) & layouts


def test_claimed_proofs_are_all_compared() -> None:
    claimed = {(n, layout) for n, f in families.load_families().items() for layout in f.proofs}
    assert claimed - compared() == set()


def test_compared_layouts_are_all_claimed() -> None:
    claimed = {(n, layout) for n, f in families.load_families().items() for layout in f.proofs}
    assert compared() - claimed == set()
