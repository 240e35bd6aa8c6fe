import pytest

import ckptctl
from ckptctl.conversion.conversion_options import ConversionOptions
from ckptctl.errors import UsageError


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dtype", "int8"),
        ("dtype", "bf61"),
        ("only", "some"),
        ("max_shard_size", "5XB"),
        ("max_shard_size", 0),
        ("memory", "much"),
        ("mp", 0),
        ("jobs", -1),
        ("jobs", 1025),
        ("only", None),
        ("mp", None),
        ("include", None),
        ("weights", "both"),
        ("tied", "keep"),
        ("lora_alpha", 0),
        ("sizes", {"n_heads": 0}),
    ],
)
def test_invalid_option_values_are_usage_errors(name, value):
    with pytest.raises(UsageError) as caught:
        ConversionOptions(to="hf", **{name: value})
    assert name in (caught.value.where or "")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("only", "all"),
        ("weights", "master"),
        ("weights", "module"),
        ("tied", "drop"),
        ("tied", "copy"),
    ],
)
def test_known_option_values_are_accepted(name, value):
    assert getattr(ConversionOptions(to="hf", **{name: value}), name) == value


def test_option_values_are_normalized():
    found = ConversionOptions(
        to="hf",
        dtype="torch.float16",
        include="*.weight",
        max_shard_size=7,
        memory="1MiB",
    )
    assert (found.to, found.dtype, found.include) == ("hf", "float16", ("*.weight",))
    assert (found.max_shard_size, found.memory) == (7, 1 << 20)
    assert (found.mp, found.only, found.checksum) == (1, "model", True)


def test_function_signature_matches_options_dataclass():
    import inspect

    found = inspect.signature(ckptctl.plan_conversion)
    options = inspect.signature(ConversionOptions)
    assert list(found.parameters) == ["src", "dst", *options.parameters]
    assert found.parameters["jobs"].annotation == int | None
    for name in options.parameters:
        assert f"\n    {name}: " in inspect.getdoc(ckptctl.plan_conversion)


def test_unknown_or_missing_arguments_are_errors():
    with pytest.raises(UsageError, match="unknown option `jbos`") as caught:
        ckptctl.convert("a", "b", to="hf", jbos=3)
    assert caught.value.hint == "did you mean `jobs`?"
    with pytest.raises(TypeError, match=r"convert\(\): missing .* .to."):
        ckptctl.convert("a", "b")
    with pytest.raises(TypeError, match=r"CheckpointManager.__init__\(\): missing .* .root."):
        ckptctl.CheckpointManager()


@pytest.mark.parametrize("verb", ["diff", "extract", "inspect", "report", "verify", "convert"])
def test_unknown_model_type_is_refused_by_every_verb(verb, tmp_path):
    places = [tmp_path] * (2 if verb in ("diff", "convert") else 1)
    more = {"extract": {"tensor": "*"}, "convert": {"to": "dcp"}}.get(verb, {})
    with pytest.raises(UsageError, match="unknown model type `lama3`") as caught:
        getattr(ckptctl, verb)(*places, **more, model_type="lama3")
    assert str(caught.value.hint).startswith("did you mean `llama3`?")
