"""Private names of torch, in one place; each is looked at with every new release.

Sources: ``torch/distributed/checkpoint/_nested_dict.py``, ``utils.py``,
``torch/distributed/tensor/placement_types.py``; torch 2.6 to 2.13.
"""

from __future__ import annotations

from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

__all__ = ["ShardedTensor", "StridedShard", "flatten_state_dict", "unflatten_state_dict"]
