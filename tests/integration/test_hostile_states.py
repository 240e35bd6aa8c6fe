"""States and process groups that are not the usual ones: nothing wrong, no hang, no crash."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ckptctl.distributed.background.async_save import AsyncSaver
from ckptctl.distributed.loading.load import load
from ckptctl.distributed.saving.save import save
from ckptctl.errors import RefusedError, UsageError
from tests.checkpoints import save_hf, tiny_llama, to_meta_names
from tests.gloo import RankFailure, run_on_ranks
from tests.integration import hostile_ranks as ranks


@pytest.mark.parametrize(
    ("job", "world"),
    [
        (ranks.overlapping_groups, 3),
        (ranks.savers_of_subgroups, 3),
        (ranks.groups_of_some_ranks, 3),
        (ranks.group_of_one_rank, 2),
        (ranks.not_a_member, 2),
        (ranks.told_differently, 2),
        (ranks.named_like_a_rank, 2),
    ],
)
def test_unusual_process_groups_neither_hang_nor_corrupt(
    tmp_path: Path, job: Any, world: int
) -> None:
    run_on_ranks(job, (world,), tmp_path, timeout=60)


def test_rank_killed_in_broadcast_raises_on_others(tmp_path: Path) -> None:
    with pytest.raises(RankFailure):
        run_on_ranks(ranks.killed_in_a_broadcast, (3,), tmp_path, timeout=60)
    assert (tmp_path / "raised0").exists() and (tmp_path / "raised2").exists()


def test_tied_tensor_with_two_shardings_is_loaded(tmp_path: Path) -> None:
    weights, config = tiny_llama("llama3_2")
    save_hf(tmp_path / "hf", weights, config)
    full = to_meta_names(weights, config)
    full["output.weight"] = full["tok_embeddings.weight"].clone()
    own = {name: one for name, one in weights.items() if name != "lm_head.weight"}
    run_on_ranks(ranks.tied_and_sharded_apart, (2,), tmp_path, own, full)


def test_conjugate_and_negative_views_are_filled(tmp_path: Path) -> None:
    numbers, real = torch.randn(40, 70, dtype=torch.complex64), torch.randn(40, 70)
    save({"c": numbers.conj(), "n": real}, tmp_path / "a")
    state = {"c": torch.zeros(40, 70, dtype=torch.complex64).conj()}
    state["n"] = torch.zeros(40, 70, dtype=torch.complex64).conj().imag
    assert state["c"].is_conj() and state["n"].is_neg()
    load(state, tmp_path / "a")
    assert torch.equal(state["c"].resolve_conj(), numbers.conj().resolve_conj())
    assert torch.equal(state["n"].resolve_neg(), real)


class Wrapper(torch.Tensor):
    """A tensor without memory, as quantization libraries have them."""

    @staticmethod
    def __new__(cls) -> Wrapper:
        make: Any = torch.Tensor._make_wrapper_subclass
        made: Wrapper = make(cls, (3,), dtype=torch.float32)
        return made

    @classmethod
    def __torch_dispatch__(cls, *_: Any, **__: Any) -> Any:
        return cls()


@pytest.mark.filterwarnings("ignore")
def test_tensors_without_memory_are_refused(tmp_path: Path) -> None:
    with FakeTensorMode():
        fake = torch.randn(3)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    save({"a": torch.ones(3)}, tmp_path / "a")
    for tensor in (fake, Wrapper(), nested):
        with pytest.raises(RefusedError):
            save({"a": tensor}, tmp_path / "b")
        with pytest.raises(RefusedError):
            load({"a": tensor}, tmp_path / "a")
    with pytest.raises(RefusedError, match="expanded"):
        load({"a": torch.zeros(1).expand(3)}, tmp_path / "a")


def test_invalid_state_dicts_are_usage_errors(tmp_path: Path) -> None:
    model: Any = torch.nn.Linear(2, 2)
    with pytest.raises(UsageError, match="not a state dict"):
        save(model, tmp_path / "a")
    save({"model": model}, tmp_path / "a")
    listed: Any = [model]
    with pytest.raises(UsageError, match="not a state dict"):
        load(listed, tmp_path / "a")
    with pytest.raises(UsageError, match="have the same name"):
        save({"a.b": torch.ones(1), "a": {"b": torch.ones(2)}}, tmp_path / "b")


def test_save_to_url_creates_no_local_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    state, url = {"a": torch.ones(3)}, f"memory://{tmp_path.name}/a"
    for call in (save, AsyncSaver().save):
        with pytest.raises(RefusedError, match="URL"):
            call(state, url, collectives=False)
    save(state, url)
    AsyncSaver().save(state, f"{url}b").result()
    for one in (url, f"{url}b"):
        found = {"a": torch.zeros(3)}
        load(found, one)
        assert torch.equal(found["a"], state["a"])
    with pytest.raises(RefusedError, match="exists"):
        save(state, url)
    assert not list(tmp_path.iterdir())


def test_key_named_rank_0_roundtrips_as_separate_value(tmp_path: Path) -> None:
    save({"seed": 3, "rank_0": {"seed": 5}}, tmp_path / "a")
    state: dict[str, Any] = {"seed": 0, "rank_0": {"seed": 0}}
    load(state, tmp_path / "a")
    assert state == {"seed": 3, "rank_0": {"seed": 5}}


def test_saver_close_frees_staging_memory(tmp_path: Path) -> None:
    saver = AsyncSaver()
    saver.save({"a": torch.ones(16 << 20)}, tmp_path / "a", sync=False).result()
    before = _resident()
    saver.close()
    gc.collect()
    assert before - _resident() > 60 << 20


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
