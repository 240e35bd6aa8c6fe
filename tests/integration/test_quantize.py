"""``--quantize`` from end to end: from any layout and format, with all that a conversion has."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptctl
from ckptctl import families
from ckptctl.conversion.conversion_options import ConversionOptions
from ckptctl.conversion.convert import plan_conversion, run_conversion
from ckptctl.errors import CkptError, MappingError, RefusedError, UsageError
from ckptctl.planner.plan import Plan
from ckptctl.storage.computed import OpenFiles
from ckptctl.storage.execution.worker import Worker
from ckptctl.storage.files import SourceFiles, source_files
from ckptctl.units import format_bytes
from tests.checkpoints import save_hf, tiny_llama
from tests.checkpoints.adapters import random_adapter, save_peft
from tests.checkpoints.golden import Golden, State, digest, family_of, names
from tests.checkpoints.quantized import DIGESTS, SCHEMES, WIDE, llama, numbers
from tests.checkpoints.readers import raw_bytes
from tests.integration.test_torchrun import launch
from tests.sweeps import one_in

CHANNEL = "fp8-channel"


def read(folder: Path) -> State:
    return {
        key: one for path in folder.glob("*.safetensors") for key, one in load_file(path).items()
    }


def stated(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def quantized(source: Path, out: Path, scheme: str = CHANNEL, **options: Any) -> State:
    ckptctl.convert(source, out, to="hf", quantize=scheme, **options)
    return read(out)


@pytest.fixture
def source(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    called = getattr(request.node, "callspec", None)
    ragged = called is None or called.params.get("scheme") not in WIDE
    save_hf(tmp_path / "source", *llama(ragged, dtype=torch.bfloat16), shards=2)
    return tmp_path / "source"


def save_golden(name: str, folder: Path) -> Path:
    golden = Golden.read(name)
    folder.mkdir()
    save_file(numbers(golden), folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(golden.config))
    return folder


def there_and_back(tmp_path: Path, name: str, layout: str) -> Path:
    """Write a model in another layout and in ``hf``; return where it was before."""
    start = save_golden(name, tmp_path / "start")
    options: dict[str, Any] = {"model_type": family_of(name)}
    ckptctl.convert(start, tmp_path / "other", to="dcp", to_layout=layout, **options)
    options |= {"to": "hf", "to_layout": "hf", "assets": start}
    ckptctl.convert(tmp_path / "other", tmp_path / "back", **options)
    return start


def agree(
    tmp_path: Path, name: str, start: Path, known: dict[tuple[bytes, ...], State] | None = None
) -> None:
    """Quantizing what another layout holds is quantizing what that becomes.

    Args:
        tmp_path: Where :func:`there_and_back` has written.
        name: Name of the model.
        start: Where the model was before.
        known: What equal files became for other layouts, which need not be quantized again.
    """
    options: dict[str, Any] = {"model_type": family_of(name)}
    options["quantize_not"] = _stacked(tmp_path / "back")
    known = {} if known is None else known
    files = ("model.safetensors", "config.json")
    back = tuple((tmp_path / "back" / file).read_bytes() for file in files)
    if back not in known:
        known[back] = quantized(tmp_path / "back", tmp_path / "wanted", **options)
    wanted = known[back]
    found = quantized(
        tmp_path / "other", tmp_path / "found", to_layout="hf", assets=start, **options
    )
    assert digest(found) == digest(wanted)
    assert any(key.endswith("weight_scale") for key in found)


def _stacked(folder: Path) -> list[str]:
    """Return the names of experts that are stacked in one tensor."""
    # Inkling also stacks its shared experts, which are never quantized.
    found = {key: one for key, one in read(folder).items() if ".shared_experts.shared_w" not in key}
    words = ("experts", "block_sparse_moe", ".moe.")
    matrices = (key for key, one in found.items() if one.dim() == 3)
    return [key for key in matrices if any(word in key for word in words)]


QUICK = [
    ("llama2", "meta"),
    ("llama2", "mcore"),
    ("phi3", "torchtune"),
    ("mixtral", "hf-v5"),
    ("qwen3_moe", "torchtitan@0.3"),
    ("qwen3_next", "hf-v5"),
]


@pytest.mark.parametrize(("name", "layout"), one_in(3, QUICK))
def test_quantize_from_other_layouts_matches_hf_source(
    tmp_path: Path, name: str, layout: str
) -> None:
    agree(tmp_path, name, there_and_back(tmp_path, name, layout))


def test_fused_parts_are_cast_before_quantizing(tmp_path: Path) -> None:
    start = save_golden("phi3", tmp_path / "start")
    options: dict[str, Any] = {"model_type": "phi3", "assets": start, "to": "hf"}
    ckptctl.convert(start, tmp_path / "other", to_layout="torchtune", **options)
    mixed = read(tmp_path / "other")
    mixed = {key: one.double() if "k_proj" in key else one.float() for key, one in mixed.items()}
    save_file(mixed, tmp_path / "other" / "model.safetensors", {"format": "pt"})
    options |= {"to_layout": "hf", "dtype": "bfloat16"}
    ckptctl.convert(tmp_path / "other", tmp_path / "out", quantize=CHANNEL, **options)
    ckptctl.convert(tmp_path / "other", tmp_path / "plain", **options)
    wanted = quantized(tmp_path / "plain", tmp_path / "wanted")
    assert digest(read(tmp_path / "out")) == digest(wanted)


def pieces_agree(plan: Plan, key: str, wanted: torch.Tensor, files: SourceFiles) -> None:
    """Read parts of a virtual file that begin and end anywhere, and all of it."""
    content, item = raw_bytes(wanted), wanted.element_size()
    computed = OpenFiles(plan.computed, lambda _: files).open_source(files, key)
    dice = random.Random(key)
    cuts = [sorted(dice.randrange(len(content) // item + 1) * item for _ in "ab") for _ in range(8)]
    for start, stop in [(0, len(content)), *((a, b) for a, b in cuts if a < b)]:
        buffer = memoryview(bytearray(stop - start))
        computed.read_pieces([(start, stop - start, 0)], buffer)
        assert buffer == content[start:stop], (key, start, stop)


@pytest.mark.parametrize("scheme", one_in(3, SCHEMES))
def test_pieces_of_quantized_tensors_match_full_output(
    tmp_path: Path, source: Path, scheme: str
) -> None:
    whole = quantized(source, tmp_path / "whole", scheme)
    options = ConversionOptions(to="hf", quantize=scheme)
    plan = plan_conversion(source, tmp_path / "out", options).plan
    with source_files(plan.source_root) as files:
        for name, wanted in whole.items():
            if "layers.0" in name and f"//{name}@quantized" in plan.computed:
                pieces_agree(plan, f"//{name}@quantized", wanted, files)


@pytest.mark.parametrize(("name", "layout"), one_in(3, QUICK))
def test_pieces_of_rearranged_tensors_match_full_output(
    tmp_path: Path, name: str, layout: str
) -> None:
    start = there_and_back(tmp_path, name, layout)
    plain, read_of = read(tmp_path / "back"), 0
    options: dict[str, Any] = {"model_type": family_of(name), "to": "hf"}
    options |= {"to_layout": "hf", "assets": start}
    asked = ConversionOptions(quantize=CHANNEL, **options)
    plan = plan_conversion(tmp_path / "other", tmp_path / "out", asked).plan
    with source_files(plan.source_root) as files:
        for key, made in plan.computed.items():
            if made.kind == "rearranged":
                read_of += 1
                wanted = plain[key.removeprefix("//").removesuffix("@plain")]
                pieces_agree(plan, key, wanted, files)
    assert read_of


def test_model_without_quantizable_weights_is_refused(tmp_path: Path) -> None:
    """GPT-2's weights are ``[in, out]``, unlike those of all quantization schemes."""
    for name in filter(is_unquantizable, names()):
        source, out = save_golden(name, tmp_path / name), tmp_path / "out"
        with pytest.raises(UsageError) as error:
            quantized(source, out, model_type=family_of(name))
        assert error.value.why == "the model has no linear layers that programs quantize"
        assert not out.exists()


def is_unquantizable(name: str) -> bool:
    return family_of(name) == "gpt2"


@pytest.mark.slow
@pytest.mark.parametrize("name", [one for one in names() if not is_unquantizable(one)])
def test_quantize_from_every_layout_matches_hf_source(tmp_path: Path, name: str) -> None:
    family = families.family(family_of(name))
    known: dict[tuple[bytes, ...], State] = {}
    for number, layout in enumerate(family.layouts):
        folder = tmp_path / str(number)
        folder.mkdir()
        try:
            start = there_and_back(folder, name, layout)
        except CkptError:
            continue  # not all variants have all layouts
        agree(folder, name, start, known)


# ------------------------------------------------------------------------- with all that there is


def test_cast_is_applied_before_quantizing(tmp_path: Path, source: Path) -> None:
    ckptctl.convert(source, tmp_path / "cast", to="hf", dtype="fp16")
    wanted = quantized(tmp_path / "cast", tmp_path / "wanted")
    assert digest(quantized(source, tmp_path / "found", dtype="fp16")) == digest(wanted)
    config = json.loads((tmp_path / "found" / "config.json").read_text())
    assert config["torch_dtype"] == "float16"


@pytest.mark.parametrize("scheme", ["fp8-channel", "nvfp4"])
def test_requantize_in_one_run_matches_two_runs(tmp_path: Path, source: Path, scheme: str) -> None:
    quantized(source, tmp_path / "blocks", "fp8-block")
    ckptctl.convert(tmp_path / "blocks", tmp_path / "plain", to="hf", dequantize="bf16")
    wanted = quantized(tmp_path / "plain", tmp_path / "wanted", scheme)
    found = quantized(tmp_path / "blocks", tmp_path / "found", scheme, dequantize="bf16")
    assert digest(found) == digest(wanted)
    with pytest.raises(UsageError, match="14 tensors are already quantized"):
        quantized(tmp_path / "blocks", tmp_path / "refused", scheme)


@pytest.mark.parametrize("scheme", one_in(3, ["fp8-block", "int4", "int8", "int8-channel"]))
def test_reported_rounding_matches_dequantized_weights(
    tmp_path: Path, source: Path, scheme: str
) -> None:
    plain, _ = llama(scheme not in WIDE, dtype=torch.bfloat16)
    options = ConversionOptions(to="hf", quantize=scheme)
    result = run_conversion(plan_conversion(source, tmp_path / "blocks", options))
    ckptctl.convert(tmp_path / "blocks", tmp_path / "back", to="hf", dequantize="fp32")
    back = read(tmp_path / "back")
    said = result.to_json()["rounding"]
    assert isinstance(said, dict) and said.keys() == {name for name in plain if "_proj" in name}
    zeros = said.pop("model.layers.1.mlp.gate_proj.weight")
    assert zeros == {"max_abs": 0.0, "relative_rms": 0.0}
    for name, found in said.items():
        off = back[name].double() - plain[name].double()
        assert found["max_abs"] == pytest.approx(float(off.abs().max()), rel=1e-5)
        rms = float(off.norm() / plain[name].double().norm())
        assert found["relative_rms"] == pytest.approx(rms, rel=1e-5) and 0.002 < rms < 0.2


@pytest.mark.parametrize(
    ("scheme", "ragged"),
    one_in(
        4,
        [
            (scheme, ragged)
            for scheme in SCHEMES
            for ragged in (False, True)[: 2 - (scheme in WIDE)]
        ],
    ),
)
def test_quantize_matches_reference_tools_bit_for_bit(
    tmp_path: Path, scheme: str, ragged: bool
) -> None:
    """What llm-compressor and transformers make of the same weights."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        save_hf(tmp_path / name, *llama(ragged, dtype))
        found = quantized(tmp_path / name, tmp_path / f"{name}-out", scheme)
        assert digest(found) == DIGESTS[f"{scheme} {name} {'ragged' if ragged else 'whole'}"]


@pytest.mark.parametrize("scheme", one_in(3, SCHEMES))
def test_quantize_output_is_independent_of_jobs_and_memory(
    tmp_path: Path, source: Path, scheme: str
) -> None:
    """Many threads with small buffers write what one writes, and what an earlier run left."""
    found = quantized(source, tmp_path / "found", scheme, jobs=4, memory="1MiB")
    wanted = quantized(source, tmp_path / "wanted", scheme, jobs=1, verify=True)
    assert digest(found) == digest(wanted)


def test_interrupted_quantize_resumes_to_same_result(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, calls = Worker.execute_unit, list[Any]()

    def stops(self: Worker, unit: Any) -> Any:
        calls.append(unit)
        if len(calls) == 40:
            raise KeyboardInterrupt
        return whole(self, unit)

    options: dict[str, Any] = {"to": "hf", "quantize": "nvfp4", "jobs": 1, "resume": True}
    execution = ConversionOptions.to_execution_options

    def often(asked: ConversionOptions) -> Any:
        return replace(execution(asked), journal_every=4096)

    monkeypatch.setattr(ConversionOptions, "to_execution_options", often)
    monkeypatch.setattr("ckptctl.storage.execution.lanes.BATCH_UNITS", 2)
    with monkeypatch.context() as patch:
        patch.setattr(Worker, "execute_unit", stops)
        with pytest.raises(KeyboardInterrupt):
            ckptctl.convert(source, tmp_path / "out", **options)
    result = ckptctl.convert(source, tmp_path / "out", **options)
    once = ckptctl.convert(source, tmp_path / "once", to="hf", quantize="nvfp4")
    assert digest(read(tmp_path / "out")) == digest(read(tmp_path / "once"))
    assert result.to_json()["rounding"] == once.to_json()["rounding"]


@pytest.mark.slow
def test_ranks_report_rounding_of_all_tensors(tmp_path: Path, source: Path) -> None:
    said = []
    for ranks in (1, 2):
        arguments = ["-m", "ckptctl", "convert", str(source), str(tmp_path / str(ranks))]
        done = launch([*arguments, "--to", "hf", "--quantize", "nvfp4", "--json"], ranks, tmp_path)
        said.append(json.loads(done.stdout)["rounding"])
    assert said[0] == said[1] and digest(read(tmp_path / "1")) == digest(read(tmp_path / "2"))


def test_merge_with_quantize_matches_quantizing_merged_model(tmp_path: Path) -> None:
    state, config = tiny_llama()
    base = tmp_path / "base"
    save_hf(base, state, config)
    save_peft(tmp_path / "adapter", random_adapter(state))
    ckptctl.merge(base, tmp_path / "adapter", tmp_path / "merged", to="hf")
    wanted = quantized(tmp_path / "merged", tmp_path / "wanted")
    ckptctl.merge(base, tmp_path / "adapter", tmp_path / "found", to="hf", quantize=CHANNEL)
    assert digest(read(tmp_path / "found")) == digest(wanted)


def test_quantize_plan_matches_output_and_config(tmp_path: Path, source: Path) -> None:
    options = ConversionOptions(to="hf", quantize="mxfp4", quantize_not=("*layers.0*",))
    plan = plan_conversion(source, tmp_path / "out", options)
    assert len(plan.quantized) == 7 and "model.layers.1.mlp.up_proj.weight" in plan.quantized
    run_conversion(plan)
    assert {(tmp_path / "out" / name).stat().st_size for name, _ in plan.files} == {
        size for _, size in plan.files
    }
    manifest = json.loads((tmp_path / "out" / "ckptctl.manifest.json").read_text())
    assert manifest["source"]["quantized"] == "mxfp4"
    ignored = stated(tmp_path / "out")["ignore"]
    assert {"lm_head", "model.embed_tokens", "model.layers.0.mlp.up_proj"} <= set(ignored)
    assert not any(name.startswith("model.layers.1") for name in ignored)


def test_quantize_also_quantizes_lm_head(tmp_path: Path, source: Path) -> None:
    found = quantized(source, tmp_path / "out", quantize_also=["lm_head.*"])
    assert found["lm_head.weight"].dtype == torch.float8_e4m3fn
    assert stated(tmp_path / "out")["ignore"] == ["model.embed_tokens"]


@pytest.mark.parametrize("scheme", ["fp8-block", "nvfp4"])
def test_tied_lm_head_is_not_quantized(tmp_path: Path, scheme: str) -> None:
    state, config = llama(ragged=False, dtype=torch.bfloat16)
    del state["lm_head.weight"]
    source = save_hf(tmp_path / "tied", state, {**config, "tie_word_embeddings": True})
    quantized(source, tmp_path / "out", scheme)
    said = stated(tmp_path / "out")
    assert {"lm_head", "model.embed_tokens"} == set(
        said["modules_to_not_convert" if scheme == "fp8-block" else "ignore"]
    )


def test_fused_projections_share_nvfp4_global_scale(tmp_path: Path, source: Path) -> None:
    found = quantized(source, tmp_path / "out", "nvfp4")
    state, _ = llama(ragged=True, dtype=torch.bfloat16)
    for group in (
        ["self_attn.q", "self_attn.k", "self_attn.v"],
        ["mlp.gate", "mlp.up"],
        ["mlp.down"],
    ):
        names = [f"model.layers.0.{name}_proj" for name in group]
        largest = max(state[f"{name}.weight"].abs().max() for name in names)
        scales = {float(found[f"{name}.weight_global_scale"]) for name in names}
        assert scales == {float((448.0 * 6.0 / largest).float())}


# ------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("scheme", one_in(4, SCHEMES))
def test_quantizing_nan_or_infinity_is_refused(tmp_path: Path, scheme: str, value: float) -> None:
    state, config = llama(scheme not in WIDE, dtype=torch.float32)
    state["model.layers.1.mlp.down_proj.weight"][130, 7] = value
    save_hf(tmp_path / "source", state, config)
    with pytest.raises(RefusedError, match="infinity, NaN") as caught:
        quantized(tmp_path / "source", tmp_path / "out", scheme)
    assert "model.layers.1.mlp.down_proj.weight" in str(caught.value.where)
    assert not (tmp_path / "out").exists()
    ckptctl.convert(
        tmp_path / "source",
        tmp_path / "out",
        to="hf",
        quantize=scheme,
        quantize_not="*.1.mlp.down*",
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"to": "dcp"}, "`quantize` only applies to `to='hf'`"),
        ({"quantize": None, "quantize_not": "*"}, "require `quantize`"),
        ({"quantize_not": "*.k_proj.*"}, "cannot quantize only"),
        ({"quantize_not": "*.nothing.*"}, "`quantize_not=.* matches no tensor"),
        ({"quantize_also": "model.norm.weight"}, "not the weight of a linear layer"),
        ({"quantize_not": "*"}, "no tensors to quantize"),
        ({"allow_missing": True}, "needs a complete source"),
    ],
)
def test_invalid_quantize_options_are_usage_errors(
    tmp_path: Path, source: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        ckptctl.convert(source, tmp_path / "out", **{"to": "hf", "quantize": CHANNEL, **options})


def test_quantizing_unknown_model_type_is_an_error(tmp_path: Path) -> None:
    save_hf(tmp_path / "source", {"a.weight": torch.ones(32, 32)}, {"model_type": "strange"})
    with pytest.raises(MappingError, match="unknown model type"):
        quantized(tmp_path / "source", tmp_path / "out")


def test_columns_not_divisible_by_group_size_are_refused(tmp_path: Path) -> None:
    state, config = llama(ragged=True, dtype=torch.bfloat16)
    for name in [name for name in state if "down_proj" in name]:
        state[name] = state[name][:, :344].contiguous()
    for name in [name for name in state if "gate_proj" in name or "up_proj" in name]:
        state[name] = state[name][:344].contiguous()
    save_hf(tmp_path / "source", state, {**config, "intermediate_size": 344})
    with pytest.raises(RefusedError, match="a multiple of 32") as caught:
        quantized(tmp_path / "source", tmp_path / "out", "mxfp8")
    assert "model.layers.0.mlp.down_proj.weight" in str(caught.value.where)
    quantized(tmp_path / "source", tmp_path / "out", "mxfp8", quantize_not="*.mlp.down_proj.*")
    with pytest.raises(RefusedError, match=r"int4 requires .* a multiple of 128"):
        quantized(tmp_path / "source", tmp_path / "out4", "int4")


def test_stacked_experts_are_refused_with_layout_hint(tmp_path: Path) -> None:
    source = save_golden("mixtral", tmp_path / "source")
    with pytest.raises(MappingError, match="stacked experts") as caught:
        quantized(source, tmp_path / "out", to_layout="hf-v5")
    assert "mlp.experts.gate_up_proj" in str(caught.value.where)
    assert "pass `to_layout='hf'` to write per-expert weights" in str(caught.value.hint)
    found = quantized(source, tmp_path / "one", to_layout="hf")
    assert found["model.layers.0.block_sparse_moe.experts.0.w1.weight"].element_size() == 1


@pytest.mark.parametrize("scheme", ["fp8-block", CHANNEL])
def test_transposed_stacks_are_split_into_experts(tmp_path: Path, scheme: str) -> None:
    source = save_golden("llama4_text", tmp_path / "source")
    found = quantized(source, tmp_path / "out", scheme)
    scale = "weight_scale_inv" if scheme == "fp8-block" else "weight_scale"
    layer = "model.layers.1.feed_forward.experts"
    assert {key for key in found if key.startswith(f"{layer}.0.")} == {
        f"{layer}.0.{name}_proj.{part}"
        for name in ("gate", "up", "down")
        for part in ("weight", scale)
    }
    assert not any(key.startswith(f"{layer}.{name}") for key in found for name in ("gate", "down"))


def test_interleaved_stacks_in_blocks_are_refused_with_layout_hint(tmp_path: Path) -> None:
    source = save_golden("gpt_oss", tmp_path / "source")
    with pytest.raises(MappingError, match="stacked experts") as caught:
        quantized(source, tmp_path / "out", "fp8-block")
    assert "to_layout='llm-compressor'" in str(caught.value.hint)
    assert "quantize='fp8-channel'" in str(caught.value.hint)


@pytest.mark.parametrize("scheme", ["fp8-block", CHANNEL])
def test_unquantized_stacked_experts_are_reported(tmp_path: Path, scheme: str) -> None:
    source, out = save_golden("mixtral", tmp_path / "source"), tmp_path / "out"
    result = ckptctl.convert(
        source, out, to="hf", to_layout="hf-v5", quantize=scheme, quantize_not="*.experts.*"
    )
    written = read(out)
    stay = {name: one.nbytes for name, one in written.items() if ".experts." in name}
    assert stay and all(written[name].dim() == 3 for name in stay)
    said = result.plan.unquantized
    assert stay.items() <= said.items() and "lm_head.weight" in said
    total = format_bytes(sum(said.values()))
    assert any(f"skipped {len(said)} tensors, {total}" in one for one in result.all_notes)
    ignored = stated(out)["modules_to_not_convert" if scheme == "fp8-block" else "ignore"]
    assert {name.rpartition(".")[0] for name in stay} <= set(ignored)


def test_quantize_without_config_json_is_an_error(tmp_path: Path, source: Path) -> None:
    (source / "config.json").unlink()
    with pytest.raises(MappingError, match=r"requires config\.json"):
        quantized(source, tmp_path / "out", model_type="llama2")
