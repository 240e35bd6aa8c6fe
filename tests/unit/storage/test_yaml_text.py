"""YAML of other programs: what it states is read, what it asks for is not made."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import yaml

from ckptctl.errors import UnsupportedError
from ckptctl.storage import yaml_text
from ckptctl.storage.yaml_text import MAX_VALUES, dump_yaml, parse_yaml
from tests import hostile
from tests.sweeps import one_in

BRIDGE = """\
_target_: megatron.bridge.training.config.ConfigContainer
model:
  _target_: megatron.bridge.models.gpt_provider.GPTModelProvider
  activation_func:
    _call_: false
    _target_: torch.nn.functional.silu
  layernorm_epsilon: 1.0e-05
  moe_layer_freq:
  - 0
  - 1
  params_dtype: &id001
    _call_: false
    _target_: torch.bfloat16
  pipeline_dtype: *id001
  hf_model_id: 'Qwen/Qwen3-8B'
tokenizer: null
"""


@pytest.fixture(autouse=True, params=["libyaml", "python"])
def loader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Read with libyaml, and as where PyYAML was built without it."""
    if request.param == "python":
        monkeypatch.delattr(yaml, "CSafeLoader", raising=False)
    elif not hasattr(yaml, "CSafeLoader"):
        pytest.skip("PyYAML has no libyaml")
    yaml_text._build_loader.cache_clear()
    yield
    yaml_text._build_loader.cache_clear()


def test_bridge_run_config_is_parsed() -> None:
    model = parse_yaml(BRIDGE, "run_config.yaml")["model"]
    assert isinstance(model, dict)
    assert model["layernorm_epsilon"] == 1e-5
    assert model["moe_layer_freq"] == [0, 1]
    assert model["pipeline_dtype"] == {"_call_": False, "_target_": "torch.bfloat16"}


def test_python_tags_create_no_objects() -> None:
    text = (
        "a: !!python/object/apply:os.system [echo]\nb: !!python/name:os.system ''\nc: !x {d: 1}\n"
    )
    assert parse_yaml(text, "x.yaml") == {
        "a": {"!": "tag:yaml.org,2002:python/object/apply:os.system"},
        "b": {"!": "tag:yaml.org,2002:python/name:os.system"},
        "c": {"!": "!x"},
    }


def test_python_tuple_is_read_as_list() -> None:
    assert parse_yaml("window_size: !!python/tuple [128, 0]\n", "x.yaml") == {
        "window_size": [128, 0]
    }


def test_date_like_scalar_is_text() -> None:
    assert parse_yaml("a: 2024-13-45\nb: 1_000\n", "x.yaml") == {"a": "2024-13-45", "b": 1000}


def test_base_60_numbers_are_text() -> None:
    text = "a: 1:30\nb: 190:20:30.15\nc: 90\n"
    assert parse_yaml(text, "x.yaml") == {"a": "1:30", "b": "190:20:30.15", "c": 90}


@pytest.mark.parametrize("case", one_in(5, hostile.evil_yaml(1)))
def test_oversized_yaml_is_refused_before_composing(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bounds are looked at in the events, not in what was made of them."""
    monkeypatch.setattr(yaml, "load", lambda *_, **__: pytest.fail("it was composed"))
    text = hostile.evil_yaml(20_000)[case]
    monkeypatch.setattr(yaml_text, "MAX_VALUES", 5_000)
    with pytest.raises(UnsupportedError, match="this YAML is not a configuration"):
        parse_yaml(text, "run_config.yaml")


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12)
)


@pytest.mark.parametrize(
    "text",
    [
        BOMB,
        "a: &a [*a]\n",
        "[" * 5000,
        "a: " + "[" * 65 + "]" * 65,
        "- 1\n- 2\n",
        "just text",
        "",
        "a: [1",
        "1: 2\n",
        "{? [1]: 2}",
        "a: " + "9" * 5000,
        "x: " + "y" * (5 << 20),
        "a: \x00",
        "? {a: 1}\n: 2\n",
        "<<: 1\na: !!int x",
    ],
)
def test_invalid_config_yaml_is_unsupported(text: str) -> None:
    with pytest.raises(UnsupportedError, match="this YAML is not a configuration"):
        parse_yaml(text, "run_config.yaml")


def test_node_limit_is_below_alias_bomb_size() -> None:
    assert MAX_VALUES < 10**11


def test_dumped_yaml_round_trips() -> None:
    """YAML 1.1 takes ``1e-06`` for text: a number with an exponent has to have a point."""
    shared = {"x": 1}
    values = {"a": 1e-6, "b": 1e17, "d": (0, 1), "e": None, "f": {}, "g": 'x"\n', "h": "true"}
    text = dump_yaml(values | {"i": shared, "j": shared}).decode()
    assert "a: 1.0e-06" in text and "&" not in text
    assert parse_yaml(text, "here") == values | {"d": [0, 1], "i": shared, "j": shared}
