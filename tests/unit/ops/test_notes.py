"""What a plan says beside its files, and what an error says of a model that is not known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import ckptctl
from ckptctl.errors import MappingError
from tests.checkpoints import save_hf, tiny_llama
from tests.checkpoints.golden import Golden


def test_a_model_type_that_does_not_fit_is_said(tmp_path: Path) -> None:
    source = Golden.read("mixtral").save(tmp_path / "mixtral")
    plan = ckptctl.plan_conversion(source, tmp_path / "out", to="dcp", model_type="qwen3_moe")
    assert "names are kept: no layout of `qwen3_moe` has these keys" in plan.notes
    assert plan.model_type is None and "unknown model" in plan.statement
    with pytest.raises(MappingError, match="not known") as caught:
        ckptctl.plan_conversion(
            source, tmp_path / "out", to="dcp", to_layout="hf-v5", model_type="qwen3_moe"
        )
    assert caught.value.why == "no layout of `qwen3_moe` has these keys"


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        (None, None),
        ("hf", None),
        ("hf-v5", "transformers 5 reads layout hf-v5, earlier versions may not"),
        ("mistral", "transformers reads layout hf, and this is layout mistral"),
    ],
)
def test_what_transformers_does_not_read(tmp_path: Path, layout: str, said: str | None) -> None:
    source = Golden.read("mixtral").save(tmp_path / "mixtral")
    plan = ckptctl.plan_conversion(source, tmp_path / "out", to="hf", to_layout=layout)
    assert [note for note in plan.notes if "transformers" in note] == ([said] if said else [])
    other = ckptctl.plan_conversion(source, tmp_path / "out", to="dcp", to_layout=layout)
    assert not any("transformers" in note for note in other.notes)


@pytest.mark.parametrize(
    ("stated", "said"),
    [
        ("lamma", "`lamma`, which no known family has (near: `llama`)"),
        ("zzz", "`zzz`, which no known family has"),
        ("qwen3", "no known family has these keys"),
        (None, "no known family has these keys"),
    ],
)
def test_a_model_type_that_no_family_has(tmp_path: Path, stated: object, said: str) -> None:
    state, config = tiny_llama("llama3")
    source = save_hf(tmp_path / "in", {"no": state["lm_head.weight"]}, config)
    (source / "config.json").write_text(json.dumps({**config, "model_type": stated}))
    with pytest.raises(MappingError, match="the model type is not known") as caught:
        ckptctl.plan_conversion(source, tmp_path / "out", to="meta")
    assert (caught.value.why or "").endswith(said)
