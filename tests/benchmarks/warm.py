"""A process that calls one function after another, so that its start is not what is measured."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, Self

from tests.benchmarks.measure import PYTHON, REPOSITORY, ProcessFailed, Sample

Arguments = Sequence[object]
Keywords = Mapping[str, object]
NONE: Keywords = {}


class Warm:
    """Its side of the one who asks: started when it is first asked, it ends with that one.

    Args:
        python: What runs it.
    """

    def __init__(self, python: str = PYTHON) -> None:
        self._argv = [python, "-m", "tests.benchmarks.warm"]
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process:
            self._process.communicate()

    def call(self, function: str, arguments: Arguments, keywords: Keywords = NONE) -> Any:
        """Call ``module:function`` and return what it returns, if JSON can say it.

        Raises:
            ProcessFailed: It raised, or the process died.
        """
        return self._asked(function, arguments, keywords)["result"]

    def timed(self, function: str, arguments: Arguments, keywords: Keywords = NONE) -> Sample:
        """Return what a call costs; the peak of memory is that of all calls so far."""
        said = self._asked(function, arguments, keywords)
        return Sample(said["wall"], said["cpu"], said["rss"])

    def _asked(self, function: str, arguments: Arguments, keywords: Keywords) -> dict[str, Any]:
        if self._process is None:
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(
                self._argv, cwd=REPOSITORY, stdin=pipe, stdout=pipe, text=True
            )
        asked, answers = self._process.stdin, self._process.stdout
        assert asked and answers
        print(json.dumps([function, arguments, keywords], default=str), file=asked, flush=True)
        said = json.loads(answers.readline() or '{"failure": "it died"}')
        if "failure" in said:
            raise ProcessFailed(f"{function}{arguments}: {said['failure']}")
        return dict(said)


def answer(function: str, arguments: list[Any], keywords: dict[str, Any]) -> dict[str, Any]:
    """Call it, and say what it returned and cost."""
    module, name = function.split(":")
    found = getattr(import_module(module), name)
    before, start = _cpu(), time.perf_counter()
    try:
        result = found(*arguments, **keywords)
    except Exception as failure:
        return {"failure": f"{type(failure).__name__}: {failure}"}
    wall, cpu = time.perf_counter() - start, _cpu() - before
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    try:
        json.dumps(result)
    except TypeError:
        result = None
    return {"result": result, "wall": wall, "cpu": cpu, "rss": rss}


def _cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    """Answer line by line; what is printed meanwhile goes to stderr."""
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        for line in sys.stdin:
            print(json.dumps(answer(*json.loads(line))), file=out, flush=True)


if __name__ == "__main__":
    main()
