"""Containers of tensors that are no dictionaries, held against what torch reads on both sides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ckptctl


def same(found: Any, expected: Any) -> bool:
    """Whether two nested objects have the same types and values."""
    if type(found) is not type(expected):
        return False
    if isinstance(expected, torch.Tensor):
        return torch.equal(found, expected)
    if isinstance(expected, dict):
        return list(found) == list(expected) and all(same(found[k], expected[k]) for k in expected)
    if isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(same, found, expected))
    return bool(found == expected)


STATE: dict[str, Any] = {
    "model": {"w": torch.ones(3), "shape": torch.Size([3, 4])},
    "pair": (torch.arange(2), torch.arange(3.0)),
    "mixed": (torch.zeros(1), 7, "text", None, (1, 2)),
    "nested": (torch.ones(1), (torch.ones(2), [torch.ones(3), (torch.ones(4),)])),
    "list": [torch.ones(1), {"a": (torch.ones(5), torch.ones(6))}],
    "twelve": tuple(torch.full((1,), float(n)) for n in range(12)),
    "states": ((torch.ones(1), torch.ones(2)), (torch.ones(3), torch.ones(4))),
    "lists": [[torch.ones(1)], [[torch.ones(2)]], [(torch.ones(3),)]],
    "within": ({"a": torch.ones(1), "b": 2}, {"c": [{"d": torch.ones(2)}]}),
    "plain": (1, "a"),
    "groups": ([{"lr": 1.0, "betas": (0.9, 0.99)}], [[{"lr": 2.0}]]),
}


def saved(tmp_path: Path) -> Path:
    source = tmp_path / "a.pt"
    torch.save(STATE, source)
    return source


def test_torch_output_keeps_tuples(tmp_path: Path) -> None:
    out = tmp_path / "b.pt"
    ckptctl.convert(saved(tmp_path), out, to="torch", only="all")
    found = torch.load(out, weights_only=True)
    assert same(found, torch.load(tmp_path / "a.pt", weights_only=True))


def test_dcp_output_turns_tuples_into_lists_with_note(tmp_path: Path) -> None:
    plan = ckptctl.plan_conversion(saved(tmp_path), tmp_path / "dcp", to="dcp", only="all")
    (note,) = [one for one in plan.notes if "tuples" in one]
    assert all(f"`{name}`" in note for name in ("pair", "mixed", "nested", "nested.1"))
    ckptctl.convert(tmp_path / "a.pt", tmp_path / "dcp", to="dcp", only="all")
    ckptctl.convert(tmp_path / "dcp", tmp_path / "b.pt", to="torch", only="all")
    found = torch.load(tmp_path / "b.pt", weights_only=True)
    assert same(found["pair"], list(STATE["pair"]))


@pytest.mark.parametrize("kind", ["max", "named"])
def test_named_tuples_are_refused(tmp_path: Path, kind: str) -> None:
    """Their classes are code: torch's own reader refuses them likewise."""
    values = torch.ones(2, 2)
    pair = values.max(0) if kind == "max" else torch.linalg.slogdet(values)
    torch.save({"pair": pair}, tmp_path / "a.pt")
    with pytest.raises(Exception, match="return_types"):
        torch.load(tmp_path / "a.pt", weights_only=True)
    with pytest.raises(ckptctl.CkptError, match="return_types"):
        ckptctl.convert(tmp_path / "a.pt", tmp_path / "b.pt", to="torch", only="all")
