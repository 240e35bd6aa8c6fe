"""What a conversion is asked to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ckptctl.formats.base import GB, Weights
from ckptctl.storage.execution.options import ExecutionOptions


@dataclass(frozen=True, slots=True)
class ConversionOptions:
    """What a conversion is asked to do; see ``ckptctl convert --help``.

    Attributes:
        to: Format to write.
        from_format: Format of the source; None: detect.
        weights: ``master`` or ``module``, where the source holds both; None: what it prefers.
        tag: Which of several saves in the source; None: the one that its pointer names.
        rules: A file that says how ranks divide tensors, where theirs do not.
        model_type: Family; None: detect.
        converter: Python file that defines one more family.
        sizes: Axis sizes that no configuration states, by any of their names.
        from_layout: Layout of the source; None: detect.
        to_layout: Layout to write; None: what the target format implies, else the source's.
        dtype: torch's name of the dtype that floating tensors are cast to; None: keep.
        dequantize: torch's name of the dtype that quantised tensors are turned into; None: keep.
        include: Globs of names in the model; none: all.
        exclude: Globs of names that are left out.
        only: The model, or all that the checkpoint holds.
        root: The model's prefix in the source; None: find it.
        max_shard_size: Bytes of tensors per output file.
        mp: Number of model-parallel files, in ``meta`` and ``deepseek``.
        assets: Directory with configuration and tokenizer.
        trust_assets: Take what *assets* say where other files contradict them.
        carry: Globs of files beside the weights that travel, of whatever kind.
        like: Checkpoint whose distribution of keys over files is copied.
        overwrite: Replace an existing checkpoint.
        resume: Go on from the journal of an interrupted run.
        verify: Read the published output again and compare its checksums.
        checksum: Compute checksums on the way.
        jobs: Threads; None: its part of the cores, at most four.
        memory: Bytes of buffers; None: 64 MiB.
        untie: Keep both of two tied tensors.
        tied: ``drop`` all but one of the tensors that share memory, or ``copy`` each in full; None:
            as the target format does.
        allow_overflow: Publish elements that became infinite, NaN or saturated.
        allow_missing: Write what is whole of a source that is not, and say what is missing.
        verify_replicas: Compare every copy of the same elements with the one that is used.
        vocab_size: Rows of the vocabulary: padded with zeros or cut; None: keep them.
        lora_alpha: The strength of an adapter, where nothing beside it says so.
    """

    to: str
    from_format: str | None = None
    weights: Weights | None = None
    tag: str | None = None
    rules: Path | None = None
    model_type: str | None = None
    converter: Path | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    from_layout: str | None = None
    to_layout: str | None = None
    dtype: str | None = None
    dequantize: str | None = None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    only: Literal["model", "all"] = "model"
    root: str | None = None
    max_shard_size: int = 5 * GB
    mp: int = 1
    assets: Path | None = None
    trust_assets: bool = False
    carry: tuple[str, ...] = ()
    like: Path | None = None
    overwrite: bool = False
    resume: bool = False
    verify: bool = False
    checksum: bool = True
    jobs: int | None = None
    memory: int | None = None
    untie: bool = False
    tied: Literal["drop", "copy"] | None = None
    allow_overflow: bool = False
    allow_missing: bool = False
    verify_replicas: bool = False
    vocab_size: int | None = None
    lora_alpha: float | None = None

    def execution(self) -> ExecutionOptions:
        """Return how the plan is to be carried out."""
        default = ExecutionOptions()
        return ExecutionOptions(
            jobs=self.jobs or default.jobs,
            memory=self.memory or default.memory,
            checksum=self.checksum,
            resume=self.resume,
        )
