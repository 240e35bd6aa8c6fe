"""YAML of other programs: mappings, lists and plain values; when read, nothing is made of a tag.

PyYAML comes with huggingface_hub. Its safe loader is narrowed further: no dates, no numbers to the
base of 60, no merging of mappings, and an object that a tag asks for becomes a note of its name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

from ckptctl.errors import UnsupportedError

LARGEST = 4 << 20
"""So many bytes of text are read; a configuration has a few thousand lines."""
NODES = 200_000
"""So many values are taken, those that aliases repeat counted each time."""
DEEPEST = 64
"""So many levels of ``[`` and ``{``; the scanner takes seconds over some hundreds."""
TAG = "!"
"""The key under which a value that is not made is named."""
TOO_DEEP = "its values are nested too deep"
_PLAIN = ("null", "bool", "int", "float")


def parsed(text: str, where: str) -> Mapping[str, object]:
    """Return the mapping that *text* states; its keys are text.

    Raises:
        UnsupportedError: It is no YAML, no mapping, or more than any configuration states.
    """
    import yaml

    if len(text) > LARGEST:
        raise _refused(where, f"it has {len(text):,} characters")
    try:
        content = yaml.load(text, Loader=_loader())
        _require_small(content)
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise _refused(where, " ".join(str(error).split())[:200]) from error
    except RecursionError as error:
        raise _refused(where, TOO_DEEP) from error
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise _refused(where, "it is no mapping")
    return content


def dumped(values: Mapping[str, object]) -> bytes:
    """Return YAML that states *values*, which JSON can state, too: without tags and aliases."""
    import yaml

    plain = json.loads(json.dumps(values, allow_nan=False))
    return yaml.safe_dump(plain, encoding="utf-8", allow_unicode=True)  # type: ignore[no-any-return]


def _refused(where: str, why: str) -> UnsupportedError:
    return UnsupportedError("this YAML is no configuration", where=where, why=why)


def _require_small(content: object) -> None:
    """Refuse what aliases make large, or endless."""
    seen, waiting = 0, [content]
    while waiting:
        value = waiting.pop()
        seen += 1
        if seen > NODES:
            raise ValueError(f"it states more than {NODES:,} values")
        if isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value


@cache
def _loader() -> Any:
    """Return the class of a loader that knows the types of JSON."""
    import yaml

    safe = yaml.SafeLoader
    resolvers = {
        first: [(tag, pattern) for tag, pattern in known if _type(tag) in _PLAIN]
        for first, known in safe.yaml_implicit_resolvers.items()
    }
    kinds = (*_PLAIN, "str", "seq", "map")
    made = {tag: make for tag, make in safe.yaml_constructors.items() if _type(tag) in kinds}
    narrowed = {
        "yaml_implicit_resolvers": resolvers,
        "yaml_constructors": {**made, None: _named},
        "yaml_multi_constructors": {},
        "fetch_flow_collection_start": _opened,
    }
    return type("Loader", (safe,), narrowed)


def _opened(loader: Any, token: Any) -> None:
    import yaml

    if loader.flow_level >= DEEPEST:
        raise ValueError(TOO_DEEP)
    yaml.SafeLoader.fetch_flow_collection_start(loader, token)


def _type(tag: str | None) -> str:
    return (tag or "").rpartition(":")[2]


def _named(loader: Any, node: Any) -> object:
    """Return what stands for a value with a tag that is not followed; a tuple is a list."""
    if _type(node.tag) == "python/tuple" and node.id == "sequence":
        return loader.construct_sequence(node, deep=True)
    return {TAG: node.tag}
