"""Determine the modules that PEFT's ``adapter_config.json`` selects.

PEFT adds factors only to these modules, and ignores the other factors of a file. A list of targets
matches names and their ends, a text is a regex of complete names. ``layers_to_transform`` only
restricts ends.

Source: ``check_target_module_exists`` in peft's ``tuners/tuners_utils.py``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ckptctl.adapters.peft import (
    TARGET_PARAMETERS,
    invalid_field_error,
    require_simple_patterns,
)
from ckptctl.formats.peft import CONFIG
from ckptctl.planner.config_facts import Json

ALL_LINEAR = "all-linear"
_FIRST_INDEX = re.compile(r".*?\.[^.]*\.(?P<layer>\d+)\.")


@dataclass(frozen=True, slots=True)
class _Names:
    """Names of modules, as complete names and their ends, or as a regex of complete names."""

    ends: frozenset[str] = frozenset()
    pattern: re.Pattern[str] | None = None

    def match(self, module: str) -> bool:
        """Return whether *module*, or an end of it after a dot, is one of the names."""
        if self.pattern is not None:
            return self.pattern.fullmatch(module) is not None
        parts = module.split(".")
        return any(".".join(parts[start:]) in self.ends for start in range(len(parts)))


@dataclass(frozen=True, slots=True)
class TargetSelection:
    """The modules that a PEFT config selects.

    Attributes:
        targets: ``target_modules``.
        excluded: ``exclude_modules``.
        saved: Patterns of modules that are trained in full, which have no factors.
        layers: ``layers_to_transform``, or None if factors are in all layers.
        layer_patterns: Patterns of the start of a module name up to its layer number.
    """

    targets: _Names
    excluded: _Names
    saved: tuple[re.Pattern[str], ...]
    layers: frozenset[int] | None
    layer_patterns: tuple[re.Pattern[str], ...]

    @classmethod
    def parse(cls, config: Json) -> TargetSelection | None:
        """Parse a PEFT config, or return None if the selection depends on the base model.

        Raises:
            UnsupportedError: A field has an invalid value.
            RefusedError: A regex could take too long to match.
        """
        targets = config.get("target_modules")
        is_default = targets is None and not config.get(TARGET_PARAMETERS)
        if is_default or config.get("ensure_weight_tying"):
            return None
        if isinstance(targets, str) and targets.lower() == ALL_LINEAR:
            return None
        layers = config.get("layers_to_transform")
        layer_list = [layers] if isinstance(layers, int) else layers or []
        if not isinstance(layer_list, list) or not all(isinstance(n, int) for n in layer_list):
            raise invalid_field_error("layers_to_transform", layers)
        return cls(
            _parse_names(config, "target_modules"),
            _parse_names(config, "exclude_modules"),
            tuple(
                _compile("modules_to_save", rf"(^|.*\.){name}($|\..*)", name)
                for name in _list_texts(config, "modules_to_save")
            ),
            frozenset(layer_list) or None,
            tuple(
                _compile("layers_pattern", rf"(?:^|.*?\.){name}\.(?P<layer>\d+)\.", name)
                for name in _list_texts(config, "layers_pattern")
            )
            or (_FIRST_INDEX,),
        )

    def has_module(self, module: str) -> bool:
        """Return whether PEFT adds factors to *module*, if the base model has it."""
        if self.excluded.match(module) or any(saved.match(module) for saved in self.saved):
            return False
        if not self.targets.match(module):
            return False
        is_end = self.targets.pattern is None and module not in self.targets.ends
        if self.layers is None or not is_end:
            return True
        matches = (pattern.match(module) for pattern in self.layer_patterns)
        match = next((match for match in matches if match), None)
        return match is not None and int(match["layer"]) in self.layers


def _parse_names(config: Json, field: str) -> _Names:
    value = config.get(field)
    if isinstance(value, str) and value:
        return _Names(pattern=_compile(field, value, value))
    return _Names(frozenset(_list_texts(config, field)))


def _list_texts(config: Json, field: str) -> list[str]:
    """List the texts of *field*, which may be a list or a single text."""
    value = config.get(field) or []
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise invalid_field_error(field, value, "it must be a list of texts")
    return texts


def _compile(field: str, pattern: str, text: str) -> re.Pattern[str]:
    """Compile *pattern*, which contains the configured *text*."""
    require_simple_patterns({text: None}, f"`{field}` in {CONFIG}")
    return re.compile(pattern)
