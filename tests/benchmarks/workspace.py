"""The folder a benchmark works in: sources made when needed, gone when not."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from tests.benchmarks.measure import PYTHON, run


@dataclass
class Workspace:
    """Holds one kind of source at a time, in every size.

    Attributes:
        root: Scratch folder.
        sizes: As :func:`tests.benchmarks.build.spec_for` takes them.
    """

    root: Path
    sizes: tuple[str, ...]
    _kind: str | None = field(default=None)

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
        folder = self.root / size / kind
        if not folder.exists():
            self._build(kind, size)
        return folder / "model.pt" if kind == "torch" else folder

    def _build(self, kind: str, size: str) -> None:
        (self.root / size).mkdir(exist_ok=True)
        folder = self.root / size / kind
        run([PYTHON, "-m", "tests.benchmarks.build", kind, str(folder), size])
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
