"""The files of a Megatron-Core checkpoint that hold no tensors.

``common.pt`` is what all ranks have in common: the arguments of the run, as an
``argparse.Namespace``, and what a loader needs to know to ask for the right names. It is a
``torch.save`` zip, which Megatron-Core reads with torch's own limits on what may be in it
(``megatron/core/dist_checkpointing/strategies/common.py``). ``metadata.json`` says how the rest was
written (``dist_checkpointing/core.py``), and the tracker file above the folder which save is the
newest (``megatron/training/checkpointing.py``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from ckptctl.formats.base import OutputTensor
from ckptctl.formats.mcore.files import TORCH_DIST
from ckptctl.storage.pickles.inert import Inert
from ckptctl.storage.pickles.writer import dumps
from ckptctl.storage.zips.writer import ZipLayout, lay_out

BACKENDS = {
    "sharded_backend": TORCH_DIST,
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
CONTENT, APART = "content_metadata", "non_homogeneous_layers"
VERSION = 3.0
"""The order of queries, keys and values in one tensor: by groups since 2.0."""


def common_content(
    arguments: Mapping[str, object] | None,
    *,
    stacked: bool,
    around: Mapping[str, object] | None = None,
) -> dict[str, object]:
    """Return what is in ``common.pt``.

    Args:
        arguments: Those of Megatron-LM, by name; None: nobody knows them.
        stacked: Whether layers are stacked.
        around: What else of a run there is; its arguments are those that the run was given.
    """
    around = around or {}
    content: dict[str, object] = {
        "checkpoint_version": VERSION,
        "iteration": 0,
        **around,
        CONTENT: content_metadata(stacked=stacked, saved=around),
    }
    if arguments is not None:
        content = {"args": _namespace(arguments), **content}
    return content


def common_file(content: Mapping[str, object], tensors: Sequence[OutputTensor] = ()) -> ZipLayout:
    """Return how ``common.pt`` lies that holds *content*, in which *tensors* are."""
    storages = [(str(position), tensor.nbytes) for position, tensor in enumerate(tensors)]
    return lay_out(dumps(content), storages, folder="common")


def content_metadata(
    *, stacked: bool, saved: Mapping[str, object] | None = None
) -> dict[str, object]:
    """Return what Megatron-Core hands to ``sharded_state_dict`` of a model that is to be loaded.

    *saved* has what was handed to it when the run was saved.
    """
    told = (saved or {}).get(CONTENT)
    held = told.items() if isinstance(told, dict) else ()
    kept = {name: value for name, value in held if name != APART}
    apart = {} if stacked else {APART: True}
    return {**kept, "singleton_local_shards": False, "chained_optim_avoid_prefix": True, **apart}


def mark_file() -> bytes:
    """Return ``metadata.json``, without which Megatron-Core takes a folder for something else."""
    return json.dumps(BACKENDS).encode()


def _namespace(values: Mapping[str, object]) -> Inert:
    return Inert("argparse", "Namespace", (), dict(values), newobj=True)
