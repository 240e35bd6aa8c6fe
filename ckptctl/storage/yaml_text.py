"""YAML of other programs: mappings, lists and plain values; when read, nothing is made of a tag.

PyYAML comes with huggingface_hub. Its safe loader is narrowed further: no dates, no numbers to the
base of 60, no merging of mappings, and an object that a tag asks for becomes a note of its name.
The events of the parser are counted before any value is made; libyaml parses where it is there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from ckptctl.errors import UnsupportedError
from ckptctl.storage.schema import read_as
from ckptctl.units import counted

LARGEST = 1 << 20
"""So many bytes of text are read; a configuration has a few thousand lines."""
NODES = 50_000
"""So many values are taken, those that aliases repeat counted each time."""
DEEPEST = 64
"""So many levels; the scanner takes seconds over some hundreds of ``[`` and ``{``."""
LONGEST_PLAIN = 4096
"""Characters of a value without quotes; numbers are looked for in it."""
TAG = "!"
"""The key under which a value that is not made is named."""
TOO_DEEP = "the values are nested too deeply"
_PLAIN = ("null", "bool", "int", "float")


def parsed(text: str, where: str) -> Mapping[str, object]:
    """Return the mapping that *text* states; its keys are text.

    Raises:
        UnsupportedError: It is no YAML, no mapping, or more than any configuration states.
    """
    import yaml

    try:
        if len(text) > LARGEST:
            raise ValueError(f"the file has {counted(len(text), 'character')}")
        loader = _loader()
        _require_few_events(text, loader)
        content = yaml.load(text, Loader=loader)
        _require_small(content)
        return read_as(dict[str, object], content)
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        deep = isinstance(error, RecursionError)
        why = TOO_DEEP if deep else " ".join(str(error).split())[:200]
        what = "this YAML is not a configuration"
        raise UnsupportedError(what, where=where, why=why) from error


def dumped(values: Mapping[str, object]) -> bytes:
    """Return YAML that states *values*, which JSON can state, too: without tags and aliases."""
    import yaml

    plain = json.loads(json.dumps(values, allow_nan=False))
    return yaml.safe_dump(plain, encoding="utf-8", allow_unicode=True)  # type: ignore[no-any-return]


def _require_few_events(text: str, loader: Any) -> None:
    """Refuse more values or levels than a configuration has, before any of them is made."""
    import yaml

    values = depth = 0
    for event in yaml.parse(text, Loader=loader):
        values += isinstance(event, yaml.NodeEvent)
        if values > 2 * NODES:  # keys are counted here, too
            raise ValueError(f"it contains more than {NODES:,} values")
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise ValueError(TOO_DEEP)
        plain = isinstance(event, yaml.ScalarEvent) and event.implicit[0]
        if plain and len(event.value) > LONGEST_PLAIN:
            raise ValueError(f"an unquoted value has {counted(len(event.value), 'character')}")


def _require_small(content: object) -> None:
    """Refuse what aliases make large, or endless."""
    seen, waiting = 0, [content]
    while waiting:
        value = waiting.pop()
        seen += 1
        if seen > NODES:
            raise ValueError(f"it contains more than {NODES:,} values")
        if isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value


@cache
def _loader() -> Any:
    """Return the class of a loader that knows the types of JSON."""
    import yaml

    native = getattr(yaml, "CSafeLoader", None)
    safe = native or yaml.SafeLoader
    resolvers = {
        first: [(tag, pattern) for tag, pattern in known if _type(tag) in _PLAIN]
        for first, known in safe.yaml_implicit_resolvers.items()
    }
    kinds = (*_PLAIN, "str", "seq", "map")
    made = {tag: make for tag, make in safe.yaml_constructors.items() if _type(tag) in kinds}
    numbers = {tag: _number(make) for tag, make in made.items() if _type(tag) in ("int", "float")}
    narrowed: dict[str, Any] = {
        "yaml_implicit_resolvers": resolvers,
        "yaml_constructors": {**made, **numbers, None: _named},
        "yaml_multi_constructors": {},
    }
    if native is None:
        narrowed["fetch_flow_collection_start"] = _opened
    return type("Loader", (safe,), narrowed)


def _opened(loader: Any, token: Any) -> None:
    import yaml

    if loader.flow_level >= DEEPEST:
        raise ValueError(TOO_DEEP)
    yaml.SafeLoader.fetch_flow_collection_start(loader, token)


def _number(make: Callable[[Any, Any], object]) -> Callable[[Any, Any], object]:
    """Return a function that makes a number as *make* does; to the base of 60 it is text."""

    def made(loader: Any, node: Any) -> object:
        text = loader.construct_scalar(node)
        return text if ":" in text else make(loader, node)

    return made


def _type(tag: str | None) -> str:
    return (tag or "").rpartition(":")[2]


def _named(loader: Any, node: Any) -> object:
    """Return what stands for a value with a tag that is not followed; a tuple is a list."""
    if _type(node.tag) == "python/tuple" and node.id == "sequence":
        return loader.construct_sequence(node, deep=True)
    return {TAG: node.tag}
