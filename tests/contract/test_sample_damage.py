"""All samples bit for bit, and what becomes of each when one of its files is damaged.

``python -m tests.contract.test_sample_damage [--all]`` prints the table.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import ckptctl
from ckptctl import formats
from ckptctl.errors import DamagedError, FormatError, UnsupportedError
from tests.checkpoints.readers import differences, load_any_reference
from tests.contract.sample_changes import Damage, damages
from tests.contract.sample_damage import Damaged, Outcome
from tests.contract.samples import SAMPLES, expected
from tests.sweeps import one_in

KINDS = ("missing", "cut", "zeros", "garbage", "flip", "swapped", "copied", "surplus", "stale")
FINE = ("refused", "harmless", "no checksum")
ONE_OF_EACH = {sample.format: name for name, sample in reversed(SAMPLES.items())}
"""For each format the first sample; the slow test damages all of them."""
LONG = ("deepspeed-universal", "torchsnapshot", "torch-checkpointing", "bytecheckpoint")
"""Formats whose samples have many files: damaged in the slow tests alone."""
SHORT = [name for kind, name in ONE_OF_EACH.items() if kind not in LONG]


class Exempt(NamedTuple):
    """Damage whose outcome is not what it should be.

    Attributes:
        sample: Pattern of the sample's name.
        kind: Pattern of the kind of damage.
        file: Pattern of the file's name.
        outcome: What comes of it.
        reason: Why.
    """

    sample: str
    kind: str
    file: str
    outcome: str
    reason: str

    def fits(self, sample: str, damage: Damage) -> bool:
        """Return whether it is about *damage*."""
        found = ((self.sample, sample), (self.kind, damage.kind), (self.file, damage.file))
        return all(re.fullmatch(pattern, text) for pattern, text in found)


NO_MARK = "neither the file nor the index says of which save the file is"
UNKNOWABLE = (
    Exempt("torchtitan/.*|lightning_fsdp1/pl", "stale", r"__\d_0\.distcp", "wrong", NO_MARK),
    Exempt("bytecheckpoint/.*", "stale", r"model/__\d_0\.distcp", "wrong", NO_MARK),
    Exempt("lightning_fsdp1/pl", "stale", r"meta\.pt", "wrong", NO_MARK),
    Exempt("lightning_fsdp.*", "missing", r"meta\.pt", "wrong", "nothing names it"),
    Exempt(
        "megatron_torch_dist/crashed",
        "missing",
        r".*common\.pt",
        "wrong",
        "without its last two files it is a DCP directory like any other",
    ),
    Exempt(
        "dcp_hf_sharded/hf_sharded",
        "missing",
        "shard-00002-.*",
        "wrong",
        "neither the number of ranks nor the size of a tensor is recorded",
    ),
    Exempt(
        "verl_dtensor/verl2",
        "swapped|copied",
        "extra_state_.*",
        "wrong",
        "a random-number state does not say of which rank it is",
    ),
    Exempt(
        "lightning_deepspeed/stage2",
        "stale",
        ".*model_states.*",
        "wrong",
        "an optimizer that was started anew counts other steps than the model's file, too",
    ),
    Exempt(
        "torch_checkpointing/single",
        "missing",
        r"(config|raw|step|train_state)_0\..*",
        "wrong",
        "items without tensors are in no index",
    ),
    Exempt(
        "torch_checkpointing/.*", "cut", r"raw_\d\.bin", "wrong", "the size is recorded nowhere"
    ),
)
"""What no reader can notice."""


# --------------------------------------------------------------------------------- complete ones


@pytest.mark.parametrize("name", one_in(5, SAMPLES))
def test_every_sample_converts_exactly_or_is_refused(data: Path, tmp_path: Path, name: str) -> None:
    sample, target = SAMPLES[name], tmp_path / "out"
    source = sample.path(data)
    if sample.refused:
        with pytest.raises((DamagedError, FormatError, UnsupportedError)) as caught:
            ckptctl.convert(source, target, to="hf")
        assert sample.refused in f"{caught.value.what} {caught.value.why}"
        assert not target.exists()
        return
    assert formats.open_checkpoint(source).format == sample.format
    # Megatron-Core saved no complete model here: nothing says how `hf` would name its tensors.
    to = "dcp" if sample.format == "mcore" else "hf"
    ckptctl.convert(source, target, to=to, root=sample.root)
    found, wanted = load_any_reference(target), expected(data, name)
    found = {key: value for key, value in found.items() if to == "hf" or key in wanted}
    assert not differences(found, wanted)
    assert ckptctl.verify(source, level="full").verdict == "complete"


def test_sample_count_and_refused_samples_are_as_expected() -> None:
    assert len(SAMPLES) == 33
    assert sorted(name for name, sample in SAMPLES.items() if sample.refused) == [
        "fsdp1_rankfiles/local",
        "megatron_torch_dist/crashed",
    ]


# ------------------------------------------------------------------------------------ damaged ones


def outcomes(name: str, scratch: Path, thorough: bool) -> Iterator[tuple[Damage, Outcome]]:
    """Yield each way to damage a sample, and what came of it."""
    damaged = Damaged(name, scratch)
    for damage in damages(damaged.sample, damaged.files, damaged.tensors, thorough):
        yield damage, damaged.outcome(damage)


def check(name: str, scratch: Path, thorough: bool) -> None:
    """Expect an error that names something, or the right result."""
    known = [one for one in UNKNOWABLE if re.fullmatch(one.sample, name)]
    used, count = set(), 0
    for damage, outcome in outcomes(name, scratch, thorough):
        fitting = [one for one in known if one.fits(name, damage)]
        allowed = {*FINE, *(one.outcome for one in fitting)}
        assert outcome.word in allowed, (name, str(damage), outcome)
        used |= {one for one in fitting if one.outcome == outcome.word}
        count += outcome.word == "refused"
    assert count > 3
    assert used == set(known), "some exceptions are none any more: take them out of the list"


@pytest.mark.parametrize("name", one_in(7, SHORT))
def test_damaged_sample_never_converts_silently_wrong(tmp_path: Path, name: str) -> None:
    """The last file of each kind: cut, replaced, flipped, swapped, of another save, or gone."""
    check(name, tmp_path / "scratch", thorough=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLES)
def test_sample_with_any_damaged_file_never_converts_wrong(tmp_path: Path, name: str) -> None:
    """Every file, in many places."""
    check(name, tmp_path / "scratch", thorough=True)


# ---------------------------------------------------------------------------------------- table


def table(thorough: bool) -> Iterator[str]:
    """Yield the lines of the table: for each format and damage how often what found it."""
    cells: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for name, sample in SAMPLES.items():
        with tempfile.TemporaryDirectory() as folder:
            for damage, outcome in outcomes(name, Path(folder) / "scratch", thorough):
                cells[sample.format, damage.kind][_word(name, damage, outcome)] += 1
    yield "| form | " + " | ".join(KINDS) + " |"
    yield "| --- " * (len(KINDS) + 1) + "|"
    for form in sorted({form for form, _ in cells}):
        yield f"| `{form}` | " + " | ".join(_cell(cells[form, kind]) for kind in KINDS) + " |"


def _word(name: str, damage: Damage, outcome: Outcome) -> str:
    if outcome.word in FINE:
        return outcome.by or outcome.word
    if any(one.fits(name, damage) for one in UNKNOWABLE):
        return "unknowable"
    return outcome.word.upper()


def _cell(found: Counter[str]) -> str:
    return ", ".join(f"{count} {word}" for word, count in found.most_common()) or "–"


if __name__ == "__main__":
    for line in table(thorough="--all" in sys.argv[1:]):
        print(line)
