"""Mistral's format, ``consolidated*.safetensors`` (or ``.pth``, ``.pt``) with ``params.json``.

Sources: mistral-inference's ``transformer.py`` (``from_folder``) for one file, the repositories of
Mistral Large for shards with an index, transformers' ``convert_mixtral_weights_to_hf.py`` for the
``consolidated.NN.pt`` of Mixtral's first release. If a model has several files, each tensor
is stored in full in one of them. Meta's files of the same names contain the shards of one rank.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from ckptctl.catalog import Catalog, TensorEntry
from ckptctl.errors import CkptError, FormatError, quote_names
from ckptctl.formats import hf
from ckptctl.formats.base import DEFAULT_READ_OPTIONS, Listing, ReadOptions
from ckptctl.formats.hf import hf_files
from ckptctl.formats.hf import shards as hf_shards
from ckptctl.formats.shared.findings import missing_files_error
from ckptctl.formats.sidecar_files import read_config_files
from ckptctl.storage.files import SourceFiles, source_files
from ckptctl.storage.read_ahead import prefetch_zips
from ckptctl.tree import TreePath

PARAMS = "params.json"
_MISTRAL_KEYS = ("hidden_dim", "head_dim", "moe", "vision_encoder", "num_local_experts")
_META_KEYS = ("multiple_of", "ffn_dim_multiplier", "moe_args", "vision_args")
_FIRST_RELEASE_KEYS = {
    "hidden_size": "dim",
    "intermediate_size": "hidden_dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "rms_norm_eps": "norm_eps",
}
_EXPERT_KEYS = {"num_local_experts": "num_experts", "num_experts_per_tok": "num_experts_per_tok"}
STEM = "consolidated"
INDEX = f"{STEM}{hf_files.INDEX_SUFFIX}"
_SAFETENSORS = re.compile(rf"{STEM}(?:-\d+-of-\d+)?\.safetensors")
_TORCH = re.compile(rf"{STEM}\.(\d+)\.(pth|pt)")


def has_mistral_params(folder: TreePath) -> bool:
    """Return whether *folder* has a ``params.json`` that uses Mistral's keys."""
    try:
        params = read_config_files(folder).get(PARAMS) if folder.is_dir() else None
    except CkptError:
        return False
    if params is None or not params.keys().isdisjoint(_META_KEYS):
        return False
    return not params.keys().isdisjoint(_MISTRAL_KEYS)


def _modernize_params(params: Mapping[str, object]) -> Mapping[str, object]:
    """Return *params* with the keys of Mixtral's first release renamed to the current keys.

    The ``params.json`` of that release uses the keys of transformers' ``config.json``. Source:
    transformers' ``convert_mixtral_weights_to_hf.py``.
    """
    if "hidden_size" not in params or "dim" in params:
        return params
    other_params = {k: v for k, v in params.items() if k not in _EXPERT_KEYS}
    renamed_params = {
        _FIRST_RELEASE_KEYS.get(key, key): value for key, value in other_params.items()
    }
    experts = {_EXPERT_KEYS[key]: params[key] for key in _EXPERT_KEYS if key in params}
    return renamed_params | ({"moe": experts} if experts else {})


class MistralFormat(hf.HfFormat):
    """Safetensors or torch files with Mistral's tensor names, and ``params.json``."""

    name = "mistral"
    other_names = ()
    title = "Mistral: consolidated*.safetensors (or .pth, read only) with params.json"
    recognized = (
        "`consolidated*.safetensors` or its index; `consolidated.NN.pth` with Mistral's "
        "`params.json` (`hidden_dim`, `head_dim`, `moe` or `vision_encoder`, and no "
        "`multiple_of`); `consolidated.NN.pt`; a folder that also contains `model*.safetensors` "
        "is `hf`"
    )
    marks = re.compile(STEM)
    yields_to = frozenset({"hf"})  # Hub repositories may contain both kinds of files
    wholeness = (
        "safetensors: the same as for `hf`; `consolidated.NN.pth` and `.pt`: numbers start at "
        "00 and have no gap (the count is not recorded, so only a conversion detects a missing "
        "last file)"
    )
    tested = "mistral-inference, transformers (logits)"
    proof = (
        "writing: mistral-inference loads the output and computes the same logits "
        "(tests/oracle/test_mistral_native.py); reading: transformers computes the same logits "
        "with the converted model (tests/oracle/test_mistral_native.py)"
    )
    layout = "mistral"
    other_layouts = False
    has_params_json = True
    stem = STEM

    def sniff(self, listing: Listing) -> str | None:
        """See :meth:`Format.sniff`."""
        path = listing.path
        if not listing.is_folder:
            is_safetensors = path.name == INDEX or _SAFETENSORS.fullmatch(path.name)
            is_weight_file = is_safetensors or (
                path.suffix == ".pth" and _TORCH.fullmatch(path.name)
            )
            return (
                path.name
                if is_safetensors or (is_weight_file and has_mistral_params(path.parent))
                else None
            )
        weight_files = _find_weight_files(listing)
        torch_only = bool(weight_files) and not weight_files[0].endswith(
            (".safetensors", ".json", ".pt")
        )
        if not weight_files or (torch_only and not has_mistral_params(path)):
            return None
        return quote_names(weight_files)

    def read(self, path: TreePath, options: ReadOptions = DEFAULT_READ_OPTIONS) -> Catalog:
        """See :meth:`Format.read`."""
        folder = path if path.is_dir() else path.parent
        names = [path.name] if path.is_file() else _find_weight_files(Listing(path))
        if not names:
            raise FormatError(
                "no weights in Mistral's format were found",
                where=str(path),
                why=f"expected {STEM}.safetensors, {INDEX} or {STEM}.00.pth, and {PARAMS}",
            )
        with source_files(folder) as files:
            catalog = self._read_weights(files, path, names)
        documents = dict(catalog.documents)
        if PARAMS in documents:
            documents[PARAMS] = _modernize_params(documents[PARAMS])
        return replace(catalog, documents=documents)

    def _read_weights(self, files: SourceFiles, path: TreePath, names: list[str]) -> Catalog:
        if names == [INDEX]:
            return self._read_index(files, path, INDEX)
        if names[0].endswith(".safetensors"):
            hf_files.require_complete_set(path, names, f"download the missing shards, and {INDEX}")
            return self._read_safetensors(files, path, names)
        if path.is_dir():
            ranks = {int(match[1]): match for name in names if (match := _TORCH.fullmatch(name))}
            kind = names[0].rpartition(".")[2]
            required, format_name = range(max(ranks) + 1), f"{STEM}.{{:02d}}.{kind}".format
            if error := missing_files_error(path, ranks, required, format_name, "shards"):
                raise error
        tensors: dict[str, TensorEntry] = {}
        notes: dict[str, None] = {}
        for name in prefetch_zips(files, names):
            shard = hf_shards.read_torch_shard(files, name)
            hf_shards.add_shard_tensors(tensors, shard.tensors, name)
            notes |= dict.fromkeys(shard.notes)
        return self._build_catalog(files, path, tensors, {}, names, notes, None)


def _find_weight_files(listing: Listing) -> list[str]:
    """Return the name of the index, or the names of the weight files if no index exists.

    Safetensors files take precedence over torch files.
    """
    names = listing.files
    if INDEX in names:
        return [INDEX]
    kinds = (
        [name for name in names if _SAFETENSORS.fullmatch(name)],
        [name for name in names if _TORCH.fullmatch(name) and name.endswith(".pth")],
        [name for name in names if _TORCH.fullmatch(name) and name.endswith(".pt")],
    )
    return next(filter(None, kinds), [])


FORMAT = MistralFormat()
