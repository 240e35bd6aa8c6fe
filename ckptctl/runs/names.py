"""Parsing of checkpoint names, to find the step and the series.

Sources: torchtitan ``step-N``, torchtune ``epoch_N`` and ``step_N``, transformers
``checkpoint-N``, accelerate ``checkpoint_N``, Megatron ``iter_NNNNNNN``, DeepSpeed
``global_stepN``, verl and VeOmni ``global_step_N``, OLMo ``stepN`` and ``stepN-unsharded``,
Composer ``epE-baB``, torchtnt ``epoch_E_step_S``, Lightning ``epoch=E-step=S.ckpt`` with metrics
and a ``-vN`` suffix, and ``last.ckpt``, which contains its step.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

_COUNTED = re.compile(
    r"(step[-_]|checkpoint[-_]|iter_|global_step_?|epoch[-_])(\d{1,18})", re.ASCII
)
_OLMO = re.compile(r"(step)(\d{1,18})(-unsharded)?", re.ASCII)
_COMPOSER = re.compile(r"ep(\d{1,18})-ba(\d{1,18})", re.ASCII)
_LAST = re.compile(r"last(?:-v\d{1,9})?\.ckpt", re.ASCII)
_VALUE = r"-?(?:\d+(?:\.\d+)?(?:e[-+]?\d+)?|(?:nan|inf)(?!\w))"
_TORCHTNT = re.compile(
    r"epoch_(\d{1,18})((?:_(?:train_|eval_|predict_)?step_\d{1,18})+)"
    rf"(?:_([A-Za-z]\w{{0,255}})=({_VALUE}))?",
    re.ASCII,
)
_PAIR = re.compile(rf"((?:^|[-_])([A-Za-z][\w./]{{0,255}})=)({_VALUE})", re.ASCII)
_VERSION = re.compile(r"-v(\d{1,9})$", re.ASCII)
_STAGED = re.compile(r"tmp-(checkpoint-\d{1,18})|\.(.+)\.ckptctl-staging", re.ASCII)
_COUNTERS = ("step", "epoch")


@dataclass(frozen=True, slots=True)
class CheckpointName:
    """Parsed name of a checkpoint.

    Attributes:
        series: Part that the names of all checkpoints of a series share, such as ``step-``.
        order: Sort key. The first number is the step, or the epoch if the name has no step. The
            following numbers order checkpoints of the same step.
        metrics: Values of the metrics in the name, by metric.
    """

    series: str
    order: tuple[int, ...]
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """Step, or epoch if there is no step."""
        return self.order[0]


def parse_name(name: str) -> CheckpointName | None:
    """Parse the name of a checkpoint, or return None if *name* is not such a name."""
    if match := _COUNTED.fullmatch(name):
        return CheckpointName(match[1], (int(match[2]),))
    if match := _OLMO.fullmatch(name):
        return CheckpointName(match[1] + (match[3] or ""), (int(match[2]),))
    if match := _COMPOSER.fullmatch(name):
        return CheckpointName("epE-baB", (int(match[2]), int(match[1])))
    if match := _TORCHTNT.fullmatch(name):
        steps = tuple(int(digits) for digits in re.findall(r"\d+", match[2]))
        metrics = {match[3]: float(match[4])} if match[3] else {}
        return CheckpointName("epoch_E_step_S", (sum(steps), int(match[1])), metrics)
    return _parse_lightning_name(name)


def is_lightning_last(name: str) -> bool:
    """Return whether *name* is a name that Lightning's ``save_last=True`` uses (``last.ckpt``)."""
    return _LAST.fullmatch(name) is not None


def parse_staged_name(name: str) -> str | None:
    """Return the final name of a checkpoint whose temporary name is *name*.

    Return None if *name* is not the temporary name of a save.
    """
    match = _STAGED.fullmatch(name)
    return (match[1] or match[2]) if match else None


def _parse_lightning_name(name: str) -> CheckpointName | None:
    stem = name.removesuffix(".ckpt")
    version = _VERSION.search(stem)
    stem = stem[: version.start()] if version else stem
    pairs: dict[str, str] = {key: value for _, key, value in _PAIR.findall(stem)}
    counters = [_find_counter(pairs, word) for word in _COUNTERS]
    numbers = tuple(number for number in counters if number is not None)
    if not numbers:
        return None
    metrics = {k: float(v) for k, v in pairs.items() if not k.endswith(_COUNTERS)}
    series = _PAIR.sub(r"\1N", stem)
    suffix = ".ckpt" if name.endswith(".ckpt") else ""
    return CheckpointName(series + suffix, (*numbers, int(version[1]) if version else 0), metrics)


def _find_counter(pairs: Mapping[str, str], word: str) -> int | None:
    values = [text for key, text in pairs.items() if key == word or key.endswith(f"_{word}")]
    return int(values[0]) if values and values[0].isdigit() and len(values[0]) <= 18 else None
