"""That every file of a tokenizer or processor that transformers knows by name travels."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from ckptctl.formats.sidecar_files import find_file_kind

pytestmark = pytest.mark.oracle

SPEC = find_spec("transformers")
NAMES = (
    *("CONFIG_NAME", "FEATURE_EXTRACTOR_NAME", "IMAGE_PROCESSOR_NAME", "VIDEO_PROCESSOR_NAME"),
    *("AUDIO_TOKENIZER_NAME", "PROCESSOR_NAME", "GENERATION_CONFIG_NAME", "MODEL_CARD_NAME"),
    *("CHAT_TEMPLATE_FILE", "LEGACY_PROCESSOR_CHAT_TEMPLATE_FILE", "ADDED_TOKENS_FILE"),
    *("SPECIAL_TOKENS_MAP_FILE", "TOKENIZER_CONFIG_FILE", "FULL_TOKENIZER_FILE"),
)


def names(root: Path) -> Iterator[object]:
    """Yield the names that transformers' modules give to files, read and not imported."""
    for path in root.rglob("*.py"):
        text = path.read_text()
        if "VOCAB_FILES_NAMES" not in text and path.parent != root / "utils":
            continue
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name):
                continue
            name, value = node.targets[0].id, node.value
            if name == "VOCAB_FILES_NAMES" and isinstance(value, ast.Dict):
                yield from (one.value for one in value.values if isinstance(one, ast.Constant))
            elif name in NAMES and isinstance(value, ast.Constant):
                yield value.value


@pytest.mark.skipif(SPEC is None, reason="transformers is not installed")
def test_sidecar_files_named_by_transformers_are_recognized() -> None:
    assert SPEC and SPEC.origin
    found = {name for name in names(Path(SPEC.origin).parent) if isinstance(name, str)}
    assert len(found) > 25
    assert not {name for name in found if find_file_kind(name) is None}
