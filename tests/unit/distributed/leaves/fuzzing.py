"""Leaves that are changed at random, read, and used: ``python -m …fuzzing SECONDS SEED FOLDER``.

It runs in a process of its own: what corrupts memory ends that by a signal, and what hangs by
SIGALRM. The case that it is at lies in the folder meanwhile.
"""

from __future__ import annotations

import copy
import io
import json
import math
import pickle
import pickletools
import random
import resource
import signal
import sys
import time
import traceback
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ckptctl.distributed.leaves.safe_reader import ALL_BUILDERS, read_leaf
from ckptctl.errors import CkptError
from ckptctl.storage.pickles.inert import Global, Inert
from ckptctl.storage.pickles.pickle_writer import dump_pickle
from tests.unit.distributed.leaves.kinds import KINDS, saved, zip_of
from tests.unit.distributed.leaves.test_safe_reader import FORGED

PATIENCE = 20
MEMORY = 16 << 30
SMALL = 100_000
NUMBERS = [
    *(0, 1, 2, 3, 4, 7, 8, 63, 255, 1 << 31, (1 << 31) - 1, 1 << 32, 1 << 40, 1 << 61),
    *((1 << 62) + 1, (1 << 63) - 1, 1 << 63, 1 << 64, 10**400, -1, -2, -8, -(1 << 31)),
    *(-(1 << 63), -(1 << 64)),
]
TEXTS = [
    *("", "O", "U2", "V8", "f4,O", "M8", "S0", "U0", "|", "<", ">", "key", "pos", "NaN", "\0"),
    *("i8", "f4", "b1", "u1", "C", "F", "names", "__class__", "__reduce__", "-1", "1e999"),
]


class Seed(NamedTuple):
    """What changes begin with: a pickle and the storages of its tensors."""

    pickle: bytes
    storages: dict[str, bytes]


def seeds() -> list[Seed]:
    """Return every kind in every protocol."""
    found = []
    for value in KINDS.values():
        for protocol in (2, 4, 5):
            with zipfile.ZipFile(io.BytesIO(saved(value, protocol))) as stored:
                parts = {name.partition("/")[2]: stored.read(name) for name in stored.namelist()}
            storages = {
                name.removeprefix("data/"): content
                for name, content in parts.items()
                if name.startswith("data/")
            }
            found.append(Seed(parts["data.pkl"], storages))
    return found


def operations(content: bytes) -> list[bytes]:
    """Return the opcodes of a pickle, each with its argument."""
    places = [place for *_, place in pickletools.genops(content)]
    ends = [*places[1:], len(content)]
    return [content[start:end] for start, end in zip(places, ends, strict=True)]


def pushed(value: object) -> bytes:
    """Return an opcode that pushes a number or a text."""
    return dump_pickle(value)[2:-1].split(b"q")[0]


class Changes:
    """Draws changes; equal seeds draw equal ones."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.seeds = seeds()
        self.pool = [operations(one.pickle) for one in self.seeds]

    def case(self) -> bytes:
        """Return the content of a leaf."""
        number = self.random.randrange(len(self.seeds))
        seed = self.seeds[number]
        kind = self.random.random()
        if kind < 0.55:
            content = self.opcodes(list(self.pool[number]))
        elif kind < 0.85:
            content, seed = self.records(), Seed(b"", {})
        else:
            content = self.octets(seed.pickle)
        storages = {key: self.storage(one) for key, one in seed.storages.items()}
        whole = zip_of(content, storages)
        return self.octets(whole) if self.random.random() < 0.03 else whole

    def opcodes(self, ops: list[bytes]) -> bytes:
        """Change some opcodes."""
        draw = self.random
        for _ in range(draw.choice((1, 1, 1, 2, 2, 3, 5, 9))):
            at = draw.randrange(len(ops))
            what = draw.random()
            if what < 0.35:  # numbers are where sizes, strides and flags are
                numbers = [i for i, op in enumerate(ops) if op[:1] in b"KMJ\x8a"]
                if numbers:
                    ops[draw.choice(numbers)] = self.number()
            elif what < 0.5:
                other = draw.choice(self.pool)
                start = draw.randrange(len(other))
                ops[at:at] = other[start : start + draw.randrange(1, 12)]
            elif what < 0.65:
                ops[at] = draw.choice(draw.choice(self.pool))
            elif what < 0.75:
                del ops[at : at + draw.randrange(1, 4)]
            elif what < 0.85:
                start = draw.randrange(len(ops))
                ops[at:at] = ops[start : start + draw.randrange(1, 20)]
            elif what < 0.93:
                ops[at] = pushed(draw.choice(TEXTS))
            else:
                other_at = draw.randrange(len(ops))
                ops[at], ops[other_at] = ops[other_at], ops[at]
            if not ops:
                break
        return b"".join(ops)

    def number(self) -> bytes:
        return pushed(self.random.choice(NUMBERS))

    def octets(self, content: bytes) -> bytes:
        """Cut a string of bytes, or change some."""
        if self.random.random() < 0.4:
            return content[: self.random.randrange(len(content) + 1)]
        changed = bytearray(content)
        for _ in range(self.random.randrange(1, 5)):
            changed[self.random.randrange(len(changed))] = self.random.randrange(256)
        return bytes(changed)

    def storage(self, content: bytes) -> bytes:
        return self.random.randbytes(len(content)) if self.random.random() < 0.5 else content

    def records(self) -> bytes:
        """Change a forged record, or make one of a known class with any arguments."""
        draw = self.random
        if draw.random() < 0.6:
            root = copy.deepcopy(draw.choice(list(FORGED.values())))
            for _ in range(draw.choice((1, 2, 4))):
                root = self.changed(root, draw.randrange(12))
        else:
            known = draw.choice(list(ALL_BUILDERS))
            root = Inert(
                known.module, known.name, tuple(self.value(3) for _ in range(draw.randrange(5)))
            )
            root.state = self.value(3) if draw.random() < 0.4 else None
            root.appended = [self.value(1)] if draw.random() < 0.1 else None
        try:
            return dump_pickle([root])
        except (CkptError, TypeError, ValueError):
            return dump_pickle([None])

    def changed(self, record: Any, depth: int) -> Any:
        """Return a record with one thing in it changed, about so deep."""
        draw = self.random
        if isinstance(record, Inert):
            if depth and record.args and draw.random() < 0.5:
                record.args = self.changed(record.args, depth - 1)
            elif depth and record.state is not None:
                record.state = self.changed(record.state, depth - 1)
            else:
                return self.value(2)
            return record
        if depth and isinstance(record, tuple | list) and record:
            items = list(record)
            at = draw.randrange(len(items))
            items[at] = self.changed(items[at], depth - 1)
            if draw.random() < 0.1:
                items.insert(at, self.value(1))
            return type(record)(items)
        return self.value(2)

    def value(self, depth: int) -> Any:
        """Return any value."""
        draw = self.random
        kind = draw.randrange(9 if depth else 6)
        if kind < 2:
            return draw.choice(NUMBERS)
        if kind == 2:
            return draw.choice(TEXTS)
        if kind == 3:
            return draw.randbytes(draw.choice((0, 1, 4, 6, 8, 10, 16, 64)))
        if kind == 4:
            return draw.choice((None, True, False, 1.5, float("nan")))
        if kind == 5:
            return draw.choice(list(FORGED.values()))
        if kind == 6:
            return tuple(self.value(depth - 1) for _ in range(draw.randrange(4)))
        if kind == 7:
            return [self.value(depth - 1) for _ in range(draw.randrange(3))]
        known = draw.choice((*ALL_BUILDERS, Global("numpy", "ndarray")))
        return known if draw.random() < 0.3 else Inert(known.module, known.name, (self.value(1),))


def parts(value: object) -> Iterator[Any]:
    """Yield what a value holds, and itself."""
    pending, seen = [value], 0
    while pending and seen < 1000:
        one = pending.pop()
        seen += 1
        yield one
        if isinstance(one, dict):
            pending += [*one, *one.values()]
        elif isinstance(one, list | tuple | set | frozenset):
            pending += one
        elif hasattr(one, "__dict__") and not isinstance(one, type):
            pending += vars(one).values()


def use(value: object) -> None:
    """Do with a value what a trainer may do, as far as it is not too much."""
    found = list(parts(value))
    if sum(count_lists(one) for one in found if _is_array(one)) > SMALL:
        return
    uses: list[Callable[[Any], object]] = [
        copy.deepcopy, repr, str, lambda one: one == one, pickle.dumps, hash, len, bool,
        lambda one: one[0], lambda one: one[-1], lambda one: read_leaf(saved(one), "again"),
    ]  # fmt: skip
    of_arrays: list[Callable[[Any], object]] = [
        lambda one: one.tolist(), lambda one: one.sum(), lambda one: one.flatten(),
        lambda one: one + one, lambda one: one.reshape(-1)[one.reshape(-1) == one.reshape(-1)],
        lambda one: one.nonzero(), lambda one: one.max(), lambda one: one[one],
    ]  # fmt: skip
    of_tensors: list[Callable[[Any], object]] = [
        lambda one: one.contiguous().sum(), lambda one: one.float().add_(1), torch.Tensor.clone,
        lambda one: one.detach().numpy().sum(), lambda one: one.detach().fill_(1),
    ]  # fmt: skip
    of_numpy: list[Callable[[Any], object]] = [
        lambda one: one.astype("U40"), lambda one: np.sort(one, axis=None), lambda one: one.copy(),
    ]  # fmt: skip
    for one in [value, *found[:50]]:
        own = list(uses)
        if _is_array(one):
            own += of_arrays + (of_tensors if isinstance(one, torch.Tensor) else of_numpy)
        if isinstance(one, tuple) and one and str(one[0]) == "MT19937":
            own.append(_draw)
        if isinstance(one, dict) and "bit_generator" in one:
            own.append(_draw_from)
        for each in own:
            try:
                each(one)
            except (MemoryError, RecursionError, Exception):  # of Python: nothing is corrupt
                continue


def count_lists(array: Any) -> int:
    """Return about how many objects ``array.tolist()`` makes: lists of empty rows count, too."""
    return math.prod(max(size, 1) for size in array.shape)


def _is_array(value: object) -> bool:
    return isinstance(value, np.ndarray | torch.Tensor)


def _draw(state: Any) -> None:
    generator = np.random.RandomState(1)
    generator.set_state(state)
    generator.random_sample(2000)


def _draw_from(state: Any) -> None:
    generator = getattr(np.random, state["bit_generator"])(1)
    generator.state = state
    generator.random_raw(2000)


def main(seconds: float, seed: int, folder: Path) -> None:
    """Read changed leaves for so long, and print how many of what came of them."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    changes = Changes(seed)
    counts = {"read": 0, "refused": 0}
    wrong: list[str] = []
    end = time.monotonic() + seconds
    with (folder / "case").open("wb", buffering=0) as last:
        while time.monotonic() < end and len(wrong) < 5:
            content = changes.case()
            last.seek(0)
            last.truncate()
            last.write(content)
            signal.alarm(PATIENCE)
            try:
                value = read_leaf(content, "fuzz")
            except CkptError:
                counts["refused"] += 1
                continue
            except Exception:
                wrong.append(traceback.format_exc())
                (folder / f"wrong-{len(wrong)}").write_bytes(content)
                continue
            counts["read"] += 1
            use(value)
    signal.alarm(0)
    print(json.dumps({"counts": counts, "wrong": wrong}))


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
