"""Sizes that a user states: ``--set``."""

import dataclasses

import pytest

from ckptctl.conversion.recognition.model import ModelDescription
from ckptctl.errors import MappingError, UsageError
from ckptctl.facts.agreement import compare_statements
from ckptctl.facts.config_files import adapt_config
from ckptctl.families import family
from ckptctl.planner.config_facts import read_sizes, require_axis
from ckptctl.planner.mapping.tensors import LayoutChange

LLAMA = family("llama3")
CONFIG = {"num_attention_heads": 32, "hidden_size": 4096}


@pytest.mark.parametrize("name", ["h", "num_attention_heads", "n_heads"])
def test_every_name_of_an_axis(name):
    assert require_axis(LLAMA, name) == "h"
    assert read_sizes(LLAMA, overrides={name: 8}) == {"h": 8, "k": 8}


def test_the_last_part_of_a_nested_name():
    mixtral = family("mixtral")
    assert mixtral.sizes["x"][1] == "moe.num_experts"
    assert require_axis(mixtral, "num_experts") == require_axis(mixtral, "moe.num_experts") == "x"


NAMED = dataclasses.replace(LLAMA, sizes={"x": ("inner.new|old", ""), "v": ("vocab|words", "")})


@pytest.mark.parametrize("name", ["new", "old"])
def test_a_size_that_has_had_several_names(name):
    assert read_sizes(NAMED, {"inner": {name: 4}}) == {"x": 4}
    assert require_axis(NAMED, name) == require_axis(NAMED, f"inner.{name}") == "x"
    with pytest.raises(MappingError, match=name):
        read_sizes(NAMED, {"inner": {name: "four"}})


def test_the_first_name_wins_and_is_shown():
    assert read_sizes(NAMED, {"inner": {"new": 4, "old": 5}}) == {"x": 4}
    assert read_sizes(NAMED, {"inner": {"new": None, "old": 5}}) == {"x": 5}
    assert NAMED.describe_size("x") == "`inner.new`"


def test_the_name_that_is_there_is_written():
    change = LayoutChange(NAMED, "hf", "hf", (), {}, vocab=8)
    assert adapt_config({"words": 4}, change) == {"words": 8}
    assert adapt_config({}, change) == {"vocab": 8}


def test_it_fills_what_the_configuration_leaves_open():
    found = read_sizes(LLAMA, CONFIG, overrides={"num_key_value_heads": 8})
    assert (found["h"], found["k"], found["e"]) == (32, 8, 128)


def test_the_same_twice_is_fine():
    assert read_sizes(LLAMA, CONFIG, overrides={"h": 32, "n_heads": 32})["h"] == 32


@pytest.mark.parametrize(
    ("given", "said"),
    [({"h": 16}, "m/config.json"), ({"k": 8, "n_kv_heads": 4}, "`--set n_kv_heads=4`")],
)
def test_contradictions_are_refused(given, said):
    with pytest.raises(UsageError) as caught:
        compare_statements(LLAMA, [ModelDescription("config.json", "m/config.json", CONFIG)], given)
    assert said in caught.value.what


@pytest.mark.parametrize("name", ["n_head", "p", "", "heads.h"])
def test_unknown_names_are_refused_with_the_known_ones(name):
    with pytest.raises(UsageError) as caught:
        require_axis(LLAMA, name)
    assert "`num_attention_heads`" in caught.value.why
    if name == "n_head":
        assert caught.value.hint == "did you mean `n_heads`?"


def test_what_is_implied_has_to_be_possible():
    with pytest.raises(MappingError, match="not divisible"):
        read_sizes(LLAMA, {"hidden_size": 10}, overrides={"h": 3})


def test_a_size_is_named_as_the_files_name_it():
    assert LLAMA.describe_size("v") == "`vocab_size`"
    assert LLAMA.describe_size("i") == "`num_hidden_layers` (in params.json: `n_layers`)"
