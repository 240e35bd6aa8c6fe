import pytest

from ckptctl import api
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
        ("weights", "both"),
        ("tied", "keep"),
        ("lora_alpha", 0),
        ("sizes", {"n_heads": 0}),
    ],
)
def test_options_are_checked(name, value):
    with pytest.raises(UsageError) as caught:
        api.conversion_options("hf", **{name: value})
    unnamed = ("max_shard_size", "memory")
    assert name in unnamed or name in (caught.value.where or "")


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
def test_words_that_are_known_are_taken(name, value):
    assert getattr(api.conversion_options("hf", **{name: value}), name) == value


def test_options_are_translated():
    found = api.conversion_options(
        "hf", dtype="torch.float16", include="*.weight", max_shard_size=7, memory="1MiB", like="x"
    )
    assert (found.to, found.dtype, found.include) == ("hf", "float16", ("*.weight",))
    assert (found.max_shard_size, found.memory) == (7, 1 << 20)
    assert (found.mp, found.only, found.checksum) == (1, "model", True)


def test_every_option_is_offered():
    from dataclasses import fields

    from ckptctl.ops.conversion.convert import ConversionOptions

    names = {field.name for field in fields(ConversionOptions)} - {"to"}
    assert names == set(api.Options.__annotations__)
