"""Reference that compares a checkpoint with the class of transformers that its config.json names.

The class is built in a process of its own, which is limited and killed after a time, because a
checkpoint supplies the configuration. See :mod:`ckptctl.references.transformers_process`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ckptctl.conversion.recognition.references import ReferenceResult, Shapes
from ckptctl.planner.config_facts import Json

PROCESS_FILE = Path(__file__).with_name("transformers_process.py")
MAX_SECONDS = 600
"""Time after which the process is killed, most of which importing may take on a busy machine."""
MAX_RESULT_BYTES = 64 << 20
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore",
    "TRANSFORMERS_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "critical",
    "USE_HUB_KERNELS": "NO",
}
"""Variables with which transformers uses neither network nor GPU, and prints nothing."""


def compare_with_transformers(config: Json, shapes: Shapes) -> ReferenceResult:
    """Compare tensors with the class of transformers that *config* names.

    A class of the checkpoint's own code is never imported.
    """
    if not _may_be_known(config):
        return ReferenceResult()
    answer = _run_process(config, shapes)
    if failure := answer.get("failure"):
        return ReferenceResult(failure=str(failure))
    source = f"transformers {answer['version']} `{answer['class']}`"
    unmapped = answer["unmapped"]
    if unmapped * 2 > len(shapes):
        return ReferenceResult(
            failure=f"{unmapped:,} of {len(shapes):,} names do not belong to {source}"
        )
    return ReferenceResult(
        source,
        missing_names=tuple(answer["missing"]),
        more=answer["more"],
        unexpected_names=tuple(answer["unexpected"]),
        shapes={
            name: f"the shape is {_format_shape(shape)}, but {source} has {_format_shape(expected)}"
            for name, shape, expected in answer["shapes"]
        },
    )


def _format_shape(shape: list[int]) -> str:
    return f"({', '.join(map(str, shape))})"


def _may_be_known(config: Json) -> bool:
    """Check if transformers' tables contain the model type and class, without importing it."""
    spec = find_spec("transformers")
    names = config.get("architectures")
    words = [config.get("model_type"), *(names if isinstance(names, list) else ())]
    if spec is None or spec.origin is None or len(words) != 2:
        return False
    tables = Path(spec.origin).parent / "models" / "auto"
    try:
        text = "".join(file.read_text("utf-8") for file in tables.glob("*auto*.py"))
    except OSError:
        return True  # not installed as files
    return not text or all(isinstance(word, str) and f'"{word}"' in text for word in words)


def _run_process(config: Json, shapes: Shapes) -> dict[str, Any]:
    """Run the comparison in a process, and return its result or the reason why there is none."""
    request = json.dumps({"config": config, "tensors": shapes})
    # Without -P, a file in the folder of the script or of the user would be imported.
    command = [sys.executable, "-P", str(PROCESS_FILE)]
    try:
        done = subprocess.run(
            command,
            input=request.encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **ENVIRONMENT},
            timeout=MAX_SECONDS,
            check=False,
        )
        if done.returncode == -signal.SIGXCPU:
            return {"failure": "building the model took too long"}
        if done.returncode or len(done.stdout) > MAX_RESULT_BYTES:
            return {"failure": f"building the model failed with exit code {done.returncode}"}
        answer = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return {"failure": f"building the model took more than {MAX_SECONDS} seconds"}
    except (OSError, ValueError) as error:
        return {"failure": f"building the model failed: {error}"}
    return answer if isinstance(answer, dict) else {"failure": "building the model failed"}
