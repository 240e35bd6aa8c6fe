"""What becomes of a save in the background."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Self


class SaveFuture(Future[Path | None]):
    """The outcome of :func:`ckptctl.async_save`, a ``concurrent.futures.Future``.

    ``result()`` returns the absolute path when the checkpoint has it, and None when the save was
    skipped. It raises what made the save fail, on every rank. A save cannot be cancelled.

    Attributes:
        path: Where the checkpoint will appear.
        skipped: Whether the ranks left this save out because the last one was still going on.
        staged: Set when the state has been copied and may be changed.
        callback_errors: What callbacks raised.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.skipped = False
        self.staged = threading.Event()
        self.callback_errors: list[BaseException] = []
        self.set_running_or_notify_cancel()

    def skip(self) -> Self:
        """Leave the save out, and return this."""
        self.skipped = True
        self.set_result(None)
        return self
