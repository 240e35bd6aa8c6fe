"""Checkpoints for tests, made and read back with other people's code only.

Nothing here imports ckptctl: what these builders write is what torch, safetensors and Meta's own
code would write, and the readers are theirs. ``tests/data/make.py`` and all test areas use them.
"""

from tests.checkpoints.dcp import save_dcp, save_dcp_ranks
from tests.checkpoints.dtypes import dtype_matrix, nan_payloads
from tests.checkpoints.llama import LlamaSpec, tiny_llama
from tests.checkpoints.meta import meta_params, save_meta, to_interleaved, to_meta_names
from tests.checkpoints.names import rename
from tests.checkpoints.readers import differences, load_any_reference
from tests.checkpoints.training import save_training_dcp, training_state
from tests.checkpoints.writers import save_bin, save_hf, save_torch

__all__ = [
    "LlamaSpec",
    "differences",
    "dtype_matrix",
    "load_any_reference",
    "meta_params",
    "nan_payloads",
    "rename",
    "save_bin",
    "save_dcp",
    "save_dcp_ranks",
    "save_hf",
    "save_meta",
    "save_torch",
    "save_training_dcp",
    "tiny_llama",
    "to_interleaved",
    "to_meta_names",
    "training_state",
]
