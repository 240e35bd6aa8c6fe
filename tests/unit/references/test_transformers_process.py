"""The limits of the process that builds a class of transformers, without transformers."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
import torch

from ckptctl.references.transformers_process import (
    MAX_CONFIG_DEPTH,
    MAX_CONFIG_VALUES,
    UnknownModelError,
    check_config_bounds,
    limit_parts,
    make_audit_hook,
    strip_config,
)


def nest(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"text_config": value}
    return value


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"num_hidden_layers": 10**12}, "states 1,000,000,000,000 for `num_hidden_layers`"),
        ({"vision_config": {"depth": 5000}}, "states 5,000 for `depth`"),
        ({"depths": [2, 2, 10**9]}, "for `depths`"),
        ({"max_position_embeddings": 1 << 80}, "`max_position_embeddings` in config.json is too"),
        ({"layer_types": ["x"] * MAX_CONFIG_VALUES}, "too large to build"),
        (nest(MAX_CONFIG_DEPTH + 1), "too large to build"),
        ({"backbone": "/models/backbone"}, "`backbone` in config.json takes a part"),
        ({"vision_config": {"use_timm_backbone": True}}, "`use_timm_backbone`"),
        ({"vision_config": {"model_type": "timm_wrapper"}}, "the package timm"),
    ],
    ids=lambda value: value[:24] if isinstance(value, str) else "",
)
def test_config_out_of_bounds_is_refused(config: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnknownModelError, match=reason):
        check_config_bounds(config, 100)


def test_config_of_usual_size_is_in_bounds() -> None:
    config = {
        "num_hidden_layers": 126,
        "num_experts": 16_384,
        "vocab_size": 256_000,
        "rope_theta": 1e30,
        "use_timm_backbone": False,
        "id2label": {str(number): f"LABEL_{number}" for number in range(1000)},
    }
    check_config_bounds(config, 60)
    check_config_bounds({"num_hidden_layers": 2000}, 2000)


def test_keys_that_select_code_are_stripped_in_all_sections() -> None:
    config = {
        "auto_map": {"AutoModel": "evil.Model"},
        "_attn_implementation": "org/kernel",
        "hidden_size": 8,
        "time_step_limit": [0.0, {"__float__": "Infinity"}],
        "text_config": {"attn_implementation": "org/kernel", "dtype": "x", "rms_norm_eps": 1e-6},
        "parts": [{"quantization_config": {}}],
    }
    assert strip_config(config) == {
        "hidden_size": 8,
        "time_step_limit": [0.0, float("inf")],
        "text_config": {"rms_norm_eps": 1e-6},
        "parts": [{}],
    }


def test_model_with_too_many_parts_is_not_built() -> None:
    with limit_parts(8), torch.device("meta"):
        torch.nn.Linear(10**6, 10**6)
        with pytest.raises(UnknownModelError, match="more than 8 parameters"):
            torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(10**9))
    torch.nn.Sequential(*(torch.nn.ReLU() for _ in range(20)))


@pytest.mark.parametrize(
    ("event", "arguments"),
    [
        ("open", (f"{os.sep}root{os.sep}.ssh{os.sep}id_rsa", "r", 0)),
        ("open", ("config.json", "r", 0)),
        ("open", (f"{sys.prefix}{os.sep}new.py", "w", os.O_WRONLY)),
        ("open", (f"{sys.prefix}{os.sep}new.py", None, os.O_RDWR)),
        ("open", (f"{sys.prefix}/../../../../../../../elsewhere/x", "r", 0)),
        ("socket.connect", (None, ("127.0.0.1", 80))),
        ("socket.getaddrinfo", ("huggingface.co", 443)),
        ("subprocess.Popen", ("sh", [], None, None)),
        ("os.system", ("true",)),
        ("os.remove", ("x", -1)),
    ],
)
def test_audit_hook_forbids_files_and_network(
    event: str, arguments: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PermissionError, match="must not"):
        make_audit_hook()(event, arguments)


def test_audit_hook_allows_imports() -> None:
    forbid_event = make_audit_hook()
    forbid_event("open", (torch.__file__, "r", 0))
    forbid_event("open", ("/proc/cpuinfo", "rb", 0))
    forbid_event("open", (3, "w", 0))
    forbid_event("import", ("torch", None, None, None, None))
