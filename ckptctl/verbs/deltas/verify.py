"""Verify deltas: their files, that they follow each other, and optionally their base."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ckptctl import formats
from ckptctl.storage.threads import Advance
from ckptctl.tree import TreePath
from ckptctl.verbs.deltas.canonical import CanonicalCheckpoint
from ckptctl.verbs.deltas.chain import Chain, open_delta
from ckptctl.verbs.deltas.check import check_chain, open_base, require_same_model
from ckptctl.verbs.deltas.delta_options import DeltaVerifyOptions
from ckptctl.verbs.deltas.delta_result import DeltaVerification


class DeltaCheck:
    """Deltas to verify, which are opened but not read.

    Attributes:
        nbytes: Number of bytes to read, about.
    """

    def __init__(self, deltas: Sequence[str | TreePath], options: DeltaVerifyOptions) -> None:
        self._options = options
        self.chain = Chain([open_delta(path) for path in deltas])
        self.base: CanonicalCheckpoint | None = None
        self.nbytes = sum(delta.manifest.nbytes for delta in self.chain.deltas)
        if options.base is not None:
            path = formats.to_existing_path(options.base)
            self.base = open_base(path, options.to_conversion_options(path), self.chain)
            require_same_model(self.chain, self.base, options.jobs)
            self.nbytes = self.base.catalog.nbytes

    def run(self, progress: Advance) -> DeltaVerification:
        """Read all data and compare digests. *progress* receives the number of bytes read.

        Raises:
            DamagedError: A delta is damaged.
            RefusedError: The base is not the one that the deltas were made from.
        """
        start = time.monotonic()
        if self.base is None:
            for delta in self.chain.deltas:
                delta.check_files()
                delta.require_unchanged()
                progress(delta.manifest.nbytes)
        else:
            check_chain(self.chain, self.base, progress, self._options.jobs)
        deltas = self.chain.deltas
        return DeltaVerification(
            deltas=tuple(str(delta.root) for delta in deltas),
            base=str(self.base.draft.source.path) if self.base else None,
            tensors=len(self.chain.tensors),
            changed=sum(
                not item.record.has_elements_of(self.chain.base.get(name))
                for name, item in self.chain.tensors.items()
            ),
            base_sha256=deltas[0].manifest.base_sha256,
            result_sha256=self.chain.result_sha256,
            nbytes=sum(delta.manifest.nbytes for delta in deltas),
            left_out=deltas[-1].manifest.left_out_reasons,
            seconds=time.monotonic() - start,
        )
