"""An index that need not be read: what its place tells of it proves what it says.

A listing of the Hub has a digest of every file. The headers of all shards are read anyway, and the
index that the usual writers make is a function of them: where one of those that they would have
written has that digest, it is the one that is there.

Sources: ``save_pretrained`` in ``transformers/modeling_utils.py``: sorted keys, a line end,
``total_parameters`` since 4.53; ``save_torch_state_dict`` in
``huggingface_hub/serialization/_torch.py``: the order of the state dict, no line end;
``lay_out`` of the format itself: the order of the headers, a line end.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import product

from ckptctl.catalog import TensorEntry
from ckptctl.errors import CkptError
from ckptctl.formats.hf.files import shards_beside
from ckptctl.formats.hf.shards import Shard, read_shard
from ckptctl.storage.digests import is_digest_of
from ckptctl.storage.files import SourceFiles
from ckptctl.storage.read_ahead import heads_ahead

ENDS = ("\n", "")
Index = dict[str, dict[str, object]]


def shards_of(files: SourceFiles, main: str) -> dict[str, Shard]:
    """Return the set of shards beside an index; nothing where that cannot prove the index.

    Args:
        files: The model's files.
        main: The index.
    """
    names = shards_beside(files.root, main) if files.digest(main) else []
    try:
        return {name: read_shard(files, name) for name in heads_ahead(files, names)}
    except CkptError:
        return {}  # whoever reads what the index names is told again


def proven(files: SourceFiles, main: str, shards: Mapping[str, Shard]) -> Index | None:
    """Return what the index *main* says; None: it has to be read.

    Args:
        files: The model's files.
        main: The index.
        shards: Of :func:`shards_of`.
    """
    digest, size = files.digest(main), files.size(main)
    if digest is None or not shards:
        return None
    for index, text in _candidates(shards):
        if len(text) == size and is_digest_of(digest, text):
            return index
    return None


def _candidates(shards: Mapping[str, Shard]) -> Iterator[tuple[Index, bytes]]:
    """Yield every index that a usual writer would have made of these shards, and its text."""
    weight_map: dict[str, object] = {key: name for name, one in shards.items() for key in one[0]}
    for order in (dict(sorted(weight_map.items())), weight_map):
        rest = json.dumps({"weight_map": order}, indent=2)[1:]
        for metadata, end in product(_metadata(shards), ENDS):
            first = json.dumps({"metadata": metadata}, indent=2)[: -len("\n}")]
            text = f"{first},{rest}{end}"
            yield {"metadata": metadata, "weight_map": order}, text.encode()


def _metadata(shards: Mapping[str, Shard]) -> tuple[dict[str, object], ...]:
    tensors: list[TensorEntry] = [entry for one in shards.values() for entry in one[0].values()]
    size: dict[str, object] = {"total_size": sum(entry.nbytes for entry in tensors)}
    return size, {"total_parameters": sum(entry.numel for entry in tensors), **size}, {}
