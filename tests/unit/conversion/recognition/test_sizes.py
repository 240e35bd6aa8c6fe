"""Sizes that a user states: ``--set``."""

import dataclasses

import pytest

from ckptctl.conversion.recognition.model import ModelDescription
from ckptctl.errors import MappingError, UsageError
from ckptctl.facts.agreement import compare_statements
from ckptctl.facts.config_files import adapt_config
from ckptctl.families import family
from ckptctl.planner.config_facts import read_sizes, resolve_axis
from ckptctl.planner.mapping.tensors import LayoutChange

LLAMA = family("llama3")
CONFIG = {"num_attention_heads": 32, "hidden_size": 4096}


@pytest.mark.parametrize("name", ["h", "num_attention_heads", "n_heads"])
def test_axis_is_found_by_any_name(name):
    assert resolve_axis(LLAMA, name) == "h"
    assert read_sizes(LLAMA, overrides={name: 8}) == {"h": 8, "k": 8}


def test_nested_name_is_found_by_last_part():
    mixtral = family("mixtral")
    assert mixtral.sizes["x"][1] == "moe.num_experts"
    assert resolve_axis(mixtral, "num_experts") == resolve_axis(mixtral, "moe.num_experts") == "x"


NAMED = dataclasses.replace(LLAMA, sizes={"x": ("inner.new|old", ""), "v": ("vocab|words", "")})


@pytest.mark.parametrize("name", ["new", "old"])
def test_renamed_size_is_read_under_both_names(name):
    assert read_sizes(NAMED, {"inner": {name: 4}}) == {"x": 4}
    assert resolve_axis(NAMED, name) == resolve_axis(NAMED, f"inner.{name}") == "x"
    with pytest.raises(MappingError, match=name):
        read_sizes(NAMED, {"inner": {name: "four"}})


def test_first_name_of_renamed_size_wins():
    assert read_sizes(NAMED, {"inner": {"new": 4, "old": 5}}) == {"x": 4}
    assert read_sizes(NAMED, {"inner": {"new": None, "old": 5}}) == {"x": 5}
    assert NAMED.describe_size("x") == "`inner.new`"


def test_existing_config_name_is_written():
    change = LayoutChange(NAMED, "hf", "hf", (), {}, vocab=8)
    assert adapt_config({"words": 4}, change) == {"words": 8}
    assert adapt_config({}, change) == {"vocab": 8}


def test_given_sizes_fill_gaps_in_config():
    found = read_sizes(LLAMA, CONFIG, overrides={"num_key_value_heads": 8})
    assert (found["h"], found["k"], found["e"]) == (32, 8, 128)


def test_same_size_given_twice_is_accepted():
    assert read_sizes(LLAMA, CONFIG, overrides={"h": 32, "n_heads": 32})["h"] == 32


@pytest.mark.parametrize(
    ("given", "said"),
    [({"h": 16}, "m/config.json"), ({"k": 8, "n_kv_heads": 4}, "`--set n_kv_heads=4`")],
)
def test_contradictory_sizes_are_refused(given, said):
    with pytest.raises(UsageError) as caught:
        compare_statements(LLAMA, [ModelDescription("config.json", "m/config.json", CONFIG)], given)
    assert said in caught.value.what


@pytest.mark.parametrize("name", ["n_head", "p", "", "heads.h"])
def test_unknown_size_names_are_refused_with_known_ones(name):
    with pytest.raises(UsageError) as caught:
        resolve_axis(LLAMA, name)
    assert "`num_attention_heads`" in caught.value.why
    if name == "n_head":
        assert caught.value.hint == "did you mean `n_heads`?"


def test_impossible_derived_size_is_an_error():
    with pytest.raises(MappingError, match="not divisible"):
        read_sizes(LLAMA, {"hidden_size": 10}, overrides={"h": 3})


def test_size_is_shown_as_named_in_files():
    assert LLAMA.describe_size("v") == "`vocab_size`"
    assert LLAMA.describe_size("i") == "`num_hidden_layers` (in params.json: `n_layers`)"
