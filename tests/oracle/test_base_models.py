"""What transformers saves of a model without its head: known, whole, and read again."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import ckptctl
from ckptctl import families
from ckptctl.errors import MissingTensorsError
from ckptctl.planner.layouts import BASE
from tests.oracle.tiny import TINY, family_of

pytest.importorskip("transformers", reason="the oracle extra is not installed")

from safetensors.torch import load_file, save_file

from tests.oracle import hf_models

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]

ANEW = (
    *("qwen3_5_moe", "qwen3_5_moe_text", "qwen3_vl_moe", "qwen4_exp", "qwen4_exp_text"),
    *("kimi_linear", "bailing_hybrid", "hy_v4"),
)
"""Families that transformers 5 saves with other names or experts than they were published."""
NOT_BY_PUBLISHED_NAME = ("bailing_hybrid",)
"""Families of which transformers reads no model without a head under published names."""
NOT_ALONE = ("step3p5",)
"""Text models that transformers reads under their published names only inside of others."""
WRAPPED = [name for name in TINY if families.family(family_of(name)).wrapper_prefix]


@pytest.mark.parametrize("name", WRAPPED)
def test_headless_model_is_detected_and_reloads_in_transformers(tmp_path: Path, name: str) -> None:
    if name in NOT_ALONE:
        pytest.skip("transformers reads its published names only as a part of another model")
    family = families.family(family_of(name))
    model = hf_models.random_model(TINY[name]())
    base = getattr(model, family.wrapper_prefix.rstrip("."))
    base.save_pretrained(tmp_path / "in")
    found = ckptctl.inspect(tmp_path / "in")
    assert found.layout in family.base_layouts and not found.lacks
    assert (found.layout == BASE) == (family_of(name) not in ANEW)
    assert family.name in (found.model_type, *found.candidates)
    assert ckptctl.verify(tmp_path / "in").verdict == "complete"
    layouts = {BASE, "hf", found.layout} - {BASE if name in NOT_BY_PUBLISHED_NAME else None}
    for layout in layouts:
        ckptctl.convert(tmp_path / "in", tmp_path / layout, to="hf", to_layout=layout)
        again = type(base).from_pretrained(tmp_path / layout, dtype=torch.float32)
        state = again.state_dict()
        assert all(torch.equal(state[key], value) for key, value in base.state_dict().items())
    file = tmp_path / "in" / "model.safetensors"
    state = load_file(file)
    gone = next(key for key in state if re.search(r"(^|\.)(layers|h)\.0\.", key))
    for lost in (*(key for key in state if not re.search(r"\.\d+\.", key)), gone):
        save_file({key: value for key, value in state.items() if key != lost}, file)
        assert lost in ckptctl.inspect(tmp_path / "in").lacks
    with pytest.raises(MissingTensorsError):
        ckptctl.convert(tmp_path / "in", tmp_path / "out", to="dcp")
