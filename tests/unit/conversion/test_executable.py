"""The manifest's text is that of ``json.dumps(indent=1)``, to the byte."""

from __future__ import annotations

import json

import pytest

from ckptctl.catalog import Box
from ckptctl.conversion.executable import build_manifest
from ckptctl.formats.base import OutputTensor, TensorPlace
from ckptctl.planner.plan import Record

SHARED = OutputTensor("tied", "bfloat16", (2, 3), ("tied",), alias_of='ä"\n.weight')
TENSORS = {
    "none": [],
    "one": [OutputTensor("scalar", "float32", (), ("scalar",))],
    "several": [OutputTensor('ä"\n.weight', "bfloat16", (2, 3), ("a",)), SHARED],
}


@pytest.mark.parametrize("name", TENSORS)
def test_manifest_text_matches_json_dumps(name: str) -> None:
    tensors = TENSORS[name]
    boxes = {t.name: (TensorPlace(Box.whole(t.shape), n),) for n, t in enumerate(tensors)}
    boxes.pop("tied", None)
    records = [Record(t.name, "a.safetensors", 8 * n, t.nbytes) for n, t in enumerate(tensors)]
    file = build_manifest({"source": {"name": "ö", "tensors": {}}}, tensors, boxes, records)
    [(offset, content)] = file.frame(lambda record: 0xABC + record)
    found = json.loads(content)
    assert list(found["tensors"]) == [tensor.name for tensor in tensors]
    assert content == json.dumps(found, indent=1, ensure_ascii=False).encode() + b"\n"
    assert (offset, len(content)) == (0, file.size)
