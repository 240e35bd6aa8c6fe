"""Verify the checkpoints that contain the files of a commit, as a hook of pre-commit.

``.pre-commit-hooks.yaml`` of this repository calls it. pre-commit passes the options of the
configuration, written with ``=``, and then the names of the changed files
(https://pre-commit.com/#creating-new-hooks).
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ckptctl.errors import FormatError, UnsupportedError

NO_CHECKPOINT = (FormatError.exit_code, UnsupportedError.exit_code)
"""Exit codes of ``ckptctl verify`` for a folder that is no checkpoint."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Verify the checkpoint of each file once, and return the highest exit code.

    The checkpoint of a file is its folder, or the file itself if the folder is no checkpoint.
    """
    words = sys.argv[1:] if arguments is None else arguments
    options = [word for word in words if word.startswith("-")]
    exit_codes = {0}
    files_by_folder: dict[Path, list[str]] = {}
    for name in words:
        if name not in options:
            files_by_folder.setdefault(Path(name).parent, []).append(name)
    for folder, names in files_by_folder.items():
        code, text = _verify(str(folder), options)
        if code in NO_CHECKPOINT:
            results = [_verify(name, options) for name in names]
            code, text = max(code for code, _ in results), "".join(text for _, text in results)
        sys.stdout.write(text)
        exit_codes.add(code)
    return max(exit_codes)


def _verify(path: str, options: Sequence[str]) -> tuple[int, str]:
    """Return the exit code and the output of ``ckptctl verify``."""
    command = [sys.executable, "-m", "ckptctl", "verify", "--format=table", *options, "--", path]
    result = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    return result.returncode, result.stdout


if __name__ == "__main__":
    sys.exit(main())
