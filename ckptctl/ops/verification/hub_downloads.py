"""What an interrupted download from the Hugging Face Hub leaves behind.

Source: huggingface_hub 2.4.0, ``_local_folder.py`` and ``file_download.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ckptctl.storage.contained import real_path
from ckptctl.storage.files import hub_repository

DOWNLOADS = ".cache/huggingface/download"


def unfinished(root: Path) -> Iterator[Path]:
    """Yield the parts of files whose download to *root* was interrupted."""
    yield from sorted((root / DOWNLOADS).rglob("*.incomplete"))
    repository = hub_repository(real_path(root))
    if repository is not None:
        yield from sorted((repository / "blobs").glob("*.incomplete"))
