"""What rank 0 does for a run after a checkpoint is published: metrics, hooks, removals."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ckptctl.errors import CkptError
from ckptctl.ops.retention.prune import plan_prune, run_prune
from ckptctl.ops.runs.pointers import SIDECAR, metrics
from ckptctl.planner.retention import Policy
from ckptctl.storage import trash
from ckptctl.storage.contained import real_path
from ckptctl.storage.sync import add_file

Hook = Callable[[Path], object]
SERIES = "step-"
SCHEMA = "ckptctl.run/1"

_log = logging.getLogger("ckptctl")


class Keeper:
    """Looks after the checkpoints ``step-N`` of a run; nothing in it fails a save.

    Args:
        root: The run.
        policy: What is kept; one that says nothing keeps all.
        hooks: Called with the path of each checkpoint when it is published.
        sync: Whether what is written has to be on disk.
    """

    def __init__(self, root: Path, policy: Policy, hooks: Sequence[Hook], *, sync: bool) -> None:
        self.root = root
        self.policy = policy
        self._hooks = hooks
        self._sync = sync
        self._removal: threading.Thread | None = None

    def published(self, path: Path, rated: Mapping[str, float]) -> None:
        """Note the metrics of a new checkpoint, call the hooks, begin to remove what is too old.

        Args:
            path: The checkpoint.
            rated: Its metrics.
        """
        self.rate(path, rated)
        self.call_hooks(path)
        if not self.policy.empty and self.policy.last != 0:
            self._remove_later()

    def rate(self, path: Path, rated: Mapping[str, float]) -> None:
        """Add metrics to those of a checkpoint."""
        if not rated:
            return
        whole = {"schema": SCHEMA, "metrics": {**metrics(path), **rated}}
        part = path / f".{SIDECAR}.tmp"
        try:
            trash.remove(part)
            add_file(part, [json.dumps(whole, indent=2).encode()], sync=self._sync)
            part.replace(path / SIDECAR)
        except (CkptError, OSError) as error:
            _log.error("the metrics of %s were not written: %s", path, error)

    def call_hooks(self, path: Path) -> None:
        """Call every hook with *path*; what one raises is logged."""
        for hook in self._hooks:
            try:
                hook(path)
            except Exception:
                _log.exception("a hook failed for %s", path)

    def replaced(self) -> None:
        """Remove what the policy does not keep, now that something else stands for all of it."""
        self.wait()
        self._remove(replaced=True)

    def wait(self) -> None:
        """Wait until what is being removed is gone."""
        if self._removal is not None:
            self._removal.join()

    def _remove_later(self) -> None:
        """Begin to remove: in a thread of its own, as executors end before the last save does."""
        earlier = self._removal

        def work() -> None:
            if earlier is not None:
                earlier.join()
            self._remove()

        thread = threading.Thread(target=work, name="ckptctl-prune", daemon=False)
        try:
            thread.start()
        except RuntimeError:  # the system has no thread left
            work()
        else:
            self._removal = thread

    def _remove(self, *, replaced: bool = False) -> None:
        try:
            plan = plan_prune(real_path(self.root), self.policy, replaced=replaced, series=SERIES)
            result = run_prune(plan)
        except (CkptError, OSError) as error:
            _log.warning("nothing was removed from %s: %s", self.root, _said(error))
            return
        for name in result.done:
            _log.info("removed %s", self.root / name)
        for name, failure in result.failed.items():
            _log.warning("%s was not removed: %s", self.root / name, _said(failure))


def _said(error: Exception) -> str:
    if not isinstance(error, CkptError):
        return str(error)
    return ": ".join(filter(None, (error.what, error.where, error.why)))
