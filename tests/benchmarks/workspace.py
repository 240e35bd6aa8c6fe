"""The folder a benchmark works in: sources made when needed, gone when not."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks.measure import PYTHON
from tests.benchmarks.warm import Warm


@dataclass
class Workspace:
    """Holds one kind of source at a time, in every size.

    Attributes:
        root: Scratch folder.
        sizes: As :func:`tests.benchmarks.build.spec_for` takes them.
        python: With the libraries that some sources are written by.
    """

    root: Path
    sizes: tuple[str, ...]
    python: str = PYTHON
    _kind: str | None = None

    def __post_init__(self) -> None:
        self._builder = Warm(self.python)

    @property
    def target(self) -> Path:
        """Return where outputs go."""
        return self.root / "out"

    def assets(self, size: str) -> Path:
        """Return a directory with the ``config.json`` of that size."""
        folder = self.root / size / "assets"
        if not folder.exists():
            self._build("assets", size)
        return folder

    def source(self, kind: str, size: str) -> Path:
        """Return the checkpoint of that kind and size; the file itself for ``torch``."""
        if kind != self._kind:
            for other in self.sizes:
                discard(self.root / other / (self._kind or "none"))
            self._kind = kind
            for one in self.sizes:
                self._build(kind, one)
        folder = self.root / size / kind
        return folder / "model.pt" if kind == "torch" else folder

    def _build(self, kind: str, size: str) -> None:
        folder = str(self.root / size / kind)
        self._builder.call("tests.benchmarks.build:build", (kind, folder, size))
        os.sync()


def nbytes(path: Path) -> int:
    """Return the bytes of a file or of all files below a directory."""
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def discard(path: Path) -> None:
    """Remove a file or a directory, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
