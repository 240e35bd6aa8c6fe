"""Restricted YAML reader and writer for configuration files, without support for tags.

PyYAML is installed with huggingface_hub. Its safe loader is restricted further: no dates, no
base-60 numbers, no merge keys, and a value with an unknown tag becomes a dict that contains only
the tag. Parser events are counted before any value is constructed. libyaml is used if available.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from ckptctl.errors import UnsupportedError
from ckptctl.storage.schema import read_as
from ckptctl.units import pluralize

MAX_TEXT_LENGTH = 1 << 20
"""Maximum number of characters to parse. A configuration has a few thousand lines."""
MAX_VALUES = 50_000
"""Maximum number of values. A value that aliases repeat is counted each time."""
MAX_DEPTH = 64
"""Maximum nesting depth. The scanner takes seconds for a few hundred nested ``[`` and ``{``."""
MAX_PLAIN_LENGTH = 4096
"""Maximum number of characters of an unquoted value, which is matched to number patterns."""
TAG_KEY = "!"
"""Key of the dict that replaces a value with an unknown tag."""
TOO_DEEP = "the values are nested too deeply"
_PLAIN = ("null", "bool", "int", "float")


def parse_yaml(text: str, where: str) -> Mapping[str, object]:
    """Parse YAML text that contains a mapping with string keys.

    Raises:
        UnsupportedError: The text is not valid YAML, not a mapping, or too large.
    """
    import yaml

    try:
        if len(text) > MAX_TEXT_LENGTH:
            raise ValueError(f"the file has {pluralize(len(text), 'character')}")
        loader = _build_loader()
        _require_few_events(text, loader)
        content = yaml.load(text, Loader=loader)
        _require_small(content)
        return read_as(dict[str, object], content)
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        is_too_deep = isinstance(error, RecursionError)
        why = TOO_DEEP if is_too_deep else " ".join(str(error).split())[:200]
        message = "this YAML is not a configuration"
        raise UnsupportedError(message, where=where, why=why) from error


def dump_yaml(values: Mapping[str, object]) -> bytes:
    """Serialize JSON-compatible *values* to YAML without tags and aliases."""
    import yaml

    content = json.loads(json.dumps(values, allow_nan=False))
    return yaml.safe_dump(content, encoding="utf-8", allow_unicode=True)  # type: ignore[no-any-return]


def _require_few_events(text: str, loader: Any) -> None:
    """Raise if *text* has too many values or nesting levels, before any value is constructed."""
    import yaml

    values = depth = 0
    for event in yaml.parse(text, Loader=loader):
        values += isinstance(event, yaml.NodeEvent)
        if values > 2 * MAX_VALUES:  # keys are counted too
            raise ValueError(f"it contains more than {MAX_VALUES:,} values")
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise ValueError(TOO_DEEP)
        is_plain = isinstance(event, yaml.ScalarEvent) and event.implicit[0]
        if is_plain and len(event.value) > MAX_PLAIN_LENGTH:
            raise ValueError(f"an unquoted value has {pluralize(len(event.value), 'character')}")


def _require_small(content: object) -> None:
    """Raise if *content* has too many values, counting the values that aliases repeat.

    An alias may also refer to its own container.
    """
    seen, waiting = 0, [content]
    while waiting:
        value = waiting.pop()
        seen += 1
        if seen > MAX_VALUES:
            raise ValueError(f"it contains more than {MAX_VALUES:,} values")
        if isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value


@cache
def _build_loader() -> Any:
    """Create a YAML loader class that only constructs the types that JSON has."""
    import yaml

    c_loader = getattr(yaml, "CSafeLoader", None)
    safe = c_loader or yaml.SafeLoader
    resolvers = {
        character: [
            (tag, pattern) for tag, pattern in tag_patterns if _parse_tag_type(tag) in _PLAIN
        ]
        for character, tag_patterns in safe.yaml_implicit_resolvers.items()
    }
    type_names = (*_PLAIN, "str", "seq", "map")
    constructors = {
        tag: construct
        for tag, construct in safe.yaml_constructors.items()
        if _parse_tag_type(tag) in type_names
    }
    numbers = {
        tag: _wrap_number(construct)
        for tag, construct in constructors.items()
        if _parse_tag_type(tag) in ("int", "float")
    }
    narrowed: dict[str, Any] = {
        "yaml_implicit_resolvers": resolvers,
        "yaml_constructors": {**constructors, **numbers, None: _construct_tagged},
        "yaml_multi_constructors": {},
    }
    if c_loader is None:
        narrowed["fetch_flow_collection_start"] = _start_flow_collection
    return type("Loader", (safe,), narrowed)


def _start_flow_collection(loader: Any, token: Any) -> None:
    import yaml

    if loader.flow_level >= MAX_DEPTH:
        raise ValueError(TOO_DEEP)
    yaml.SafeLoader.fetch_flow_collection_start(loader, token)


def _wrap_number(construct: Callable[[Any, Any], object]) -> Callable[[Any, Any], object]:
    """Wrap a constructor of numbers so that it returns base-60 numbers as text."""

    def construct_number(loader: Any, node: Any) -> object:
        text = loader.construct_scalar(node)
        return text if ":" in text else construct(loader, node)

    return construct_number


def _parse_tag_type(tag: str | None) -> str:
    return (tag or "").rpartition(":")[2]


def _construct_tagged(loader: Any, node: Any) -> object:
    """Construct a list for a Python tuple, or a dict that contains the unknown tag of a value."""
    if _parse_tag_type(node.tag) == "python/tuple" and node.id == "sequence":
        return loader.construct_sequence(node, deep=True)
    return {TAG_KEY: node.tag}
