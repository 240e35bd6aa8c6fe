"""What frameworks save, and how it is recognized; imports nothing of theirs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Job:
    """What one trainer saves.

    Attributes:
        package: It is skipped without this one.
        call: Module and function of ``jobs``.
        formats: For each case how it is recognized.
        inside: Folder in the checkpoint that is meant.
        options: For the conversion.
        more: A further package that it needs.
        library: A module that takes seconds to import, for :func:`tests.gloo.run_on_ranks`.
    """

    package: str
    call: str
    formats: Mapping[str, str]
    inside: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    more: str = "torch"
    library: str = ""


LIGHTNING = Job(
    "lightning",
    "lightning_saves:save_all",
    {"fabric": "dcp", "trainer": "dcp", "ddp": "torch", "ddp_tied": "torch"},
    library="lightning",
)
ACCELERATE = Job(
    "accelerate",
    "accelerate_saves:save_all",
    {"dcp": "dcp", "files": "rank-files", "replicated": "hf"},
)
MEGATRON = Job(  # layers in stacks, as they were saved
    "megatron",
    "megatron_saves:save_all",
    {"torch_dist": "dcp"},
    options={"from_format": "dcp"},
    library="tests.oracle.mcore_build",
)
TITAN = Job(
    "torchtitan", "torchtitan_saves:save_all", {"disabled": "dcp", "async": "dcp"}, "step-2"
)
SNAPSHOT = Job(
    "torchsnapshot",
    "torchsnapshot_saves:save_all",
    {"sharded": "torchsnapshot", "replicated": "torchsnapshot"},
)
CHECKPOINTING = Job(
    "torch_checkpointing",
    "torch_checkpointing_saves:save_all",
    {
        f"{kind}/{how}": "torch-checkpointing"
        for kind in ("fsdp2", "fsdp2_bf16", "tp", "fsdp1_mesh")
        for how in ("metadata", "none")
    },
)
HYBRID = Job(
    CHECKPOINTING.package,
    CHECKPOINTING.call,
    {
        f"{kind}/{how}": "torch-checkpointing"
        for kind in ("hsdp", "fsdp2_tp")
        for how in ("metadata", "none")
    },
)
EVERY_JOB = {
    "lightning": LIGHTNING,
    "lightning_deepspeed": Job(
        "lightning",
        "lightning_deepspeed:save_all",
        {f"z{stage}": "deepspeed" for stage in (1, 2, 3)},
        more="deepspeed",
        library="lightning",
    ),
    "accelerate": ACCELERATE,
    "transformers": Job(
        "transformers",
        "transformers_saves:save_ddp",
        {"ddp": "hf"},
        "checkpoint-2",
        library="transformers.trainer",
    ),
    "transformers_deepspeed": Job(
        "transformers",
        "transformers_saves:save_deepspeed",
        {"z2": "deepspeed", "z3": "deepspeed"},
        "checkpoint-2",
        {"from_format": "deepspeed"},
        "deepspeed",
        "transformers.trainer",
    ),
    "megatron": MEGATRON,
    "torchtitan": TITAN,
    "torchsnapshot": SNAPSHOT,
    "torch_checkpointing": CHECKPOINTING,
}
