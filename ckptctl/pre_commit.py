"""Verify the checkpoints that contain the files of a commit, as a hook of pre-commit.

``.pre-commit-hooks.yaml`` of this repository calls it. pre-commit passes the options of the
configuration, written with ``=``, and then the names of the changed files, without a separator
(https://pre-commit.com/#creating-new-hooks). ``python -P`` keeps Python from importing modules of
the repository.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ckptctl.errors import FormatError, UnsupportedError, UsageError
from ckptctl.formats.delta import MANIFEST

NO_CHECKPOINT = (FormatError.exit_code, UnsupportedError.exit_code)
"""Exit codes of ``ckptctl verify`` for a folder that is no checkpoint."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Verify the checkpoint or delta of each file once, and return the highest exit code.

    The checkpoint of a file is its folder, or the file itself if the folder is no checkpoint.
    """
    words = sys.argv[1:] if arguments is None else arguments
    options = [word for word in words if word.startswith("-")]
    if names_like_options := [word for word in options if Path(word).exists()]:
        error = UsageError(
            "the name of a file begins with `-`, like an option",
            where=names_like_options[0],
            why="pre-commit passes options and names of files alike",
            hint="rename the file",
        )
        sys.stdout.write(f"{error.line}\n")
        return error.exit_code
    exit_codes = {0}
    files_by_folder: dict[Path, list[str]] = {}
    for name in words:
        if name not in options:
            files_by_folder.setdefault(Path(name).parent, []).append(name)
    for folder, names in files_by_folder.items():
        if (folder / MANIFEST).is_file():
            code, text = _run_ckptctl("delta", "verify", "--", str(folder))
        else:
            code, text = _verify(str(folder), options)
        if code in NO_CHECKPOINT:
            results = [_verify(name, options) for name in names]
            code, text = max(code for code, _ in results), "".join(text for _, text in results)
        sys.stdout.write(text)
        exit_codes.add(code)
    return max(exit_codes)


def _verify(path: str, options: Sequence[str]) -> tuple[int, str]:
    """Return the exit code and the output of ``ckptctl verify``."""
    return _run_ckptctl("verify", "--format=table", *options, "--", path)


def _run_ckptctl(*arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-P", "-m", "ckptctl", *arguments]
    result = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    return result.returncode, result.stdout


if __name__ == "__main__":
    sys.exit(main())
