"""What those who wait for statistics are told."""

from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import save_file

from ckptctl.errors import DamagedError
from ckptctl.storage.threads import report_part
from ckptctl.verbs.inspection.inspect import inspect_checkpoint
from ckptctl.verbs.inspection.inspect_options import InspectOptions
from ckptctl.verbs.verification.verify import verify_checkpoint
from ckptctl.verbs.verification.verify_options import VerifyOptions

MIB = 1 << 20


class Told:
    """Notes what is told of the bytes."""

    def __init__(self):
        self.total, self.steps = 0, []

    @contextmanager
    def __call__(self, total):
        self.total = total
        yield self.steps.append


@pytest.mark.parametrize("passes", [1, 2])
def test_large_tensor_progress_is_reported_in_steps(tmp_path, passes):
    path = tmp_path / "x.safetensors"
    save_file({"w": torch.arange(3 * MIB, dtype=torch.float32), "c": torch.zeros(MIB)}, path)
    told = Told()
    if passes == 1:
        verify_checkpoint(path, VerifyOptions(level="headers", nan=True), told)
    else:
        inspect_checkpoint(path, InspectOptions(stats=True), told)
    assert told.total == sum(told.steps) == passes * 16 * MIB
    assert max(told.steps) <= 4 * MIB


def test_unreported_progress_is_added_at_end():
    told = []
    with pytest.raises(DamagedError), report_part(told.append, 10) as seen:
        seen(3)
        raise DamagedError("x")
    with report_part(told.append, 2) as seen:
        seen(5)
    assert told == [3, 7, 2]
    with report_part(None, 2) as seen:
        seen(1)
