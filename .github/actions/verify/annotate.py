"""Print what ``ckptctl verify --json`` answered as a log of GitHub Actions, with annotations.

Names come from files that nobody trusts: a line break in one would begin a workflow command.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

SHOWN = 10
"""As many annotations as GitHub keeps of a step."""


def main(answer: str, error_output: str) -> None:
    """Print each finding, or the error, as an annotation; an error that is no JSON as it is."""
    texts = [Path(name).read_text(errors="replace") for name in (answer, error_output)]
    text = next(filter(None, texts), "")
    try:
        document = json.loads(text)
    except ValueError:
        return annotate("error", text or "no output")
    if "error" in document:
        error = document["error"]
        parts = (error["message"], error["where"], error["why"], error["hint"])
        return annotate("error", "\n".join(filter(None, parts)))
    findings = document["findings"]
    verdict = f"{document['verdict']}, data {document['data']}"
    print(f"{one_line(document['path'])}: {verdict}, {len(findings)} findings")
    for finding in findings[:SHOWN]:
        parts = (finding["what"], finding["where"], finding["why"])
        level = "warning" if finding["severity"] == "warning" else "error"
        annotate(level, "\n".join(filter(None, parts)))
    if findings[SHOWN:]:
        print(f"and {len(findings) - SHOWN} more")
    return None


def annotate(level: str, text: str) -> None:
    """Print a workflow command."""
    print(f"::{level} title=ckptctl verify::{one_line(text)}")


def one_line(text: str) -> str:
    """Escape what ends a workflow command or stands for something in one."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


if __name__ == "__main__":
    main(*sys.argv[1:])
