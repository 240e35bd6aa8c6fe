"""Megatron-Bridge's own configurations, in a process that is used for nothing else.

``python -m tests.oracle.mcore_bridge_configs CASES RESULTS`` reads and writes JSON.
"""

from __future__ import annotations

import functools
import json
import sys
import warnings
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.oracle.mcore_bridge import stand_in_for_engine


def main(cases: Path, results: Path) -> None:
    """For each case, load a section ``model``, and make the same of config.json."""
    warnings.simplefilter("ignore")
    stand_in_for_engine()
    read = json.loads(cases.read_text())
    results.write_text(json.dumps({name: _compare(**case) for name, case in read.items()}))


def _compare(model: dict[str, Any], config: dict[str, Any], bridge: str) -> dict[str, Any]:
    """Return the fields of *model* in Bridge's instance of it, and in what *bridge* makes.

    A model without a class consists of fields to compare.
    """
    instantiate = import_module("megatron.bridge.utils.instantiate_utils").instantiate
    try:
        has_class = "_target_" in model
        loaded = instantiate(model, mode="strict") if has_class else SimpleNamespace(**model)
    except Exception as error:  # the test states which
        return {"error": str(error)}
    names = [name for name in model if not name.startswith("_")]
    made: dict[str, Any] = {"loaded": {name: _plain(getattr(loaded, name)) for name in names}}
    made["class"] = type(loaded).__name__
    if bridge:
        own = _made_of_config(config, bridge)
        made["own"] = {name: _plain(getattr(own, name, "no such field")) for name in names}
        made["own_class"] = type(own).__name__
    return made


def _made_of_config(config: Mapping[str, Any], bridge: str) -> Any:
    from transformers import CONFIG_MAPPING

    module, _, name = bridge.partition(":")
    made = getattr(import_module(f"megatron.bridge.models.{module}"), name)()
    described = CONFIG_MAPPING[config["model_type"]](
        **{key: value for key, value in config.items() if key != "model_type"}
    )
    made.hf_config = described
    model = SimpleNamespace(config=described, generation_config=None, model_name_or_path="")
    return made.provider_bridge(model)


def _plain(value: Any) -> Any:
    """Return *value* as JSON states it, and an object by its name."""
    from transformers import PretrainedConfig

    if isinstance(value, functools.partial):
        return _plain(value.func)
    if isinstance(value, PretrainedConfig):
        values = {name: _plain(one) for name, one in value.to_dict().items() if "dtype" not in name}
        return {"class": type(value).__name__, **values}
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return f"{value.__module__}.{value.__qualname__}" if callable(value) else str(value)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
