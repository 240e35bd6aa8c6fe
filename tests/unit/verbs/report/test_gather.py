"""What a report holds, what it leaves out, and the page that is made of it."""

from __future__ import annotations

import hashlib
import json
import pickle
import re
import shutil
from base64 import b64encode
from html.parser import HTMLParser
from importlib.resources import files
from itertools import pairwise

import pytest
import torch
from safetensors.torch import save_file

import ckptctl
from ckptctl.catalog import Box, Extent, TensorEntry
from ckptctl.errors import (
    FormatError,
    MappingError,
    RefusedError,
    SourceNotFoundError,
    UsageError,
)
from ckptctl.verbs.report import page as report_page
from ckptctl.verbs.report.gather import ChunkMapper
from ckptctl.verbs.report.page import build_page, embed_json
from tests.checkpoints import save_dcp

HOSTILE = "</script><img src=x onerror=alert(1)><!--"


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "model.safetensors"
    state = {"a.w": torch.arange(6.0).view(2, 3), "a.b": torch.ones(3), HOSTILE: torch.zeros(0)}
    save_file(state, path)
    return path


@pytest.fixture
def torn(data, tmp_path):
    """A checkpoint of four ranks, of which one file is gone and one is cut short."""
    path = tmp_path / "torn"
    shutil.copytree(data / "dcp" / "dcp_2d" / "ckpt", path)
    (path / "__1_0.distcp").unlink()
    cut = path / "__2_0.distcp"
    cut.write_bytes(cut.read_bytes()[:200])
    return path


def test_report_of_complete_checkpoint_maps_ranks(data):
    found = ckptctl.report(data / "dcp" / "dcp_2d" / "ckpt").to_json()
    assert found["readable"] and found["verdict"] == "complete" and not found["findings"]
    assert [file["rank"] for file in found["files"]] == [0, 1, 2, 3]
    (weight,) = (one for one in found["tensors"] if one["name"] == "model.l1.weight")
    # 17 rows over 2 x 2 ranks: what torch's own DTensor gave each of them.
    spans = {(one["file"], one["offsets"][0], one["sizes"][0]) for one in weight["map"]}
    assert spans == {(0, 0, 5), (2, 5, 4), (1, 9, 4), (3, 13, 4)}
    assert not weight["holes"] and not weight["missing"]
    assert set(found["left_out"].values()) == {0}


def test_report_lists_holes_with_their_files(torn):
    report = ckptctl.report(torn)
    found = report.to_json()
    assert report.readable and found["verdict"] == "damaged" and found["findings"]
    files = found["files"]
    unusable = {file["path"]: file["rank"] for file in files if file["bytes"] is None}
    assert unusable == {"__1_0.distcp": 1, "__2_0.distcp": 2}
    (weight,) = (one for one in found["tensors"] if one["name"] == "model.l1.weight")
    holes = {(files[h["file"]]["rank"], h["offsets"][0], h["sizes"][0]) for h in weight["holes"]}
    assert holes == {(1, 9, 4), (2, 5, 4)} and weight["missing"] == 2
    assert {one["file"] for one in weight["map"]}.isdisjoint({h["file"] for h in weight["holes"]})


def test_report_counts_present_and_missing_bytes(torn, data, tmp_path):
    """Rows 5 to 13 of 17 went with the files of ranks 1 and 2."""
    found = ckptctl.report(torn).to_json()
    (weight,) = (one for one in found["tensors"] if one["name"] == "model.l1.weight")
    assert (weight["missing_bytes"], weight["bytes"]) == (8 * 13 * 4, 17 * 13 * 4)
    gone = sum(one.get("missing_bytes", 0) for one in found["tensors"])
    assert (
        found["present_bytes"] == found["bytes"] - gone and found["total_bytes"] == found["bytes"]
    )
    few = ckptctl.report(torn, max_tensors=1).to_json()
    assert few["present_bytes"] == found["present_bytes"], "of all, listed or not"
    states = {file["path"]: file["state"] for file in found["files"]}
    assert (states["__0_0.distcp"], states["__1_0.distcp"]) == ("present", "missing")
    assert states["__2_0.distcp"] == found["verdict"] == "damaged"
    shutil.copyfile(data / "dcp/dcp_2d/ckpt/__2_0.distcp", torn / "__2_0.distcp")
    found = ckptctl.report(torn).to_json()
    states = {file["path"]: file["state"] for file in found["files"]}
    assert (states["__1_0.distcp"], states["__2_0.distcp"]) == ("missing", "present")
    assert found["verdict"] == "damaged", "also where nothing but a file is missing"


def test_report_counts_tensors_known_only_by_name(data, tmp_path):
    source = tmp_path / "llama"
    shutil.copytree(data / "tiny-llama3-hf", source, copy_function=shutil.copyfile)
    whole = ckptctl.report(source).to_json()
    (source / "model-00003-of-00003.safetensors").unlink()
    found = ckptctl.report(source).to_json()
    assert found["tensor_count"] + found["missing_tensors"] == whole["tensor_count"]
    assert found["total_bytes"] == whole["bytes"] > found["present_bytes"] == found["bytes"]
    assert (found["file_count"], found["missing_files"]) == (2, 1)
    assert (found["verdict"], whole["verdict"]) == ("damaged", "complete")
    assert found["problem"] == "`model-00003-of-00003.safetensors` is missing (and 6 more)"
    assert whole["problem"] is None
    index = source / "model.safetensors.index.json"
    for size in (1, None, "many", True):
        index.write_text(
            json.dumps({**json.loads(index.read_text()), "metadata": {"total_size": size}})
        )
        assert ckptctl.report(source).presence.total_bytes is None, "nothing tells"


def test_report_groups_tensors_into_parts(data):
    found = ckptctl.report(data / "dcp/dcp_2d/ckpt").tensors
    assert {one.part for one in found} == {"model", "optimizer", "rest"}
    assert [one.info.name for one in found if one.part == "rest"] == ["rng"]


def test_statistics_cover_only_present_elements(torn, data):
    whole = ckptctl.report(data / "dcp" / "dcp_2d" / "ckpt", stats=True).to_json()
    part = ckptctl.report(torn, stats=True).to_json()
    counts = [
        {one["name"]: one["stats"]["count"] for one in found["tensors"] if "stats" in one}
        for found in (whole, part)
    ]
    assert counts[0]["model.l1.weight"] == 17 * 13
    assert counts[1]["model.l1.weight"] == 9 * 13
    (weight,) = (one for one in whole["tensors"] if one["name"] == "model.l1.weight")
    assert len(weight["stats"]["histogram"]) == 40 and sum(weight["stats"]["histogram"]) == 221


def test_unreadable_index_still_produces_report(torn, tmp_path):
    (torn / ".metadata").write_bytes(b"not a pickle")
    found = ckptctl.report(torn, tmp_path / "page.html")
    assert not found.readable and found.verification.findings
    assert data_of(tmp_path / "page.html")["findings"]


def test_index_error_does_not_mark_file_damaged(tmp_path):
    path = save_dcp(tmp_path / "c", {"w": torch.ones(4, 4)})
    index = pickle.loads((path / ".metadata").read_bytes())
    index.state_dict_metadata["w"].size = torch.Size([3, 4])
    (path / ".metadata").write_bytes(pickle.dumps(index))
    report = ckptctl.report(path)
    (finding,) = report.verification.findings
    assert (finding.severity, finding.basis, finding.file) == ("error", "index", "__0_0.distcp")
    assert [(file.path, file.state) for file in report.files] == [("__0_0.distcp", "present")]


def test_report_compares_two_checkpoints(source, tmp_path):
    other = tmp_path / "other.safetensors"
    save_file({"a.w": torch.full((2, 3), 2.0), "a.b": torch.ones(3), "c": torch.ones(1)}, other)
    found = ckptctl.report(source, other=other).to_json()
    assert found["difference"]["a"]["only"] == [HOSTILE] and found["difference"]["b"]["only"] == [
        "c"
    ]
    summary = found["other_summary"]
    assert (summary["path"], summary["tensor_count"], summary["verdict"]) == (
        str(other),
        3,
        "complete",
    )
    (weight,) = found["difference"]["tensors"]
    assert (weight["name"], weight["values"]["max_abs"]) == ("a.w", 3.0)
    structure = ckptctl.report(source, other=other, structure=True).to_json()["difference"]
    assert structure["structure"] and not structure["tensors"]


def test_tolerances_and_ignore_dtype_apply_to_difference(source, tmp_path):
    other = tmp_path / "other.safetensors"
    near = torch.arange(6.0).view(2, 3) + 0.01
    save_file({"a.w": near, "a.b": torch.ones(3).half(), HOSTILE: torch.zeros(0)}, other)
    found = ckptctl.report(source, other=other).difference
    assert [one.name for one in found.tensors] == ["a.w", "a.b"]
    found = ckptctl.report(source, other=other, atol=0.1).difference
    assert [one.kinds for one in found.tensors] == [("dtype",)] and found.within == 1
    assert ckptctl.report(source, other=other, atol=0.1, ignore_dtype=True).difference.same
    with pytest.raises(UsageError, match="non-negative"):
        ckptctl.report(source, other=other, rtol=-1)


def test_tags_and_weights_select_reported_save(data, tmp_path):
    zero = tmp_path / "zero"
    shutil.copytree(data / "deepspeed" / "z1_bf16" / "ckpt", zero)
    shutil.copytree(zero / "global_step2", zero / "global_step4")
    master, module = (
        {one.info.dtype for one in ckptctl.report(zero, weights=kind).tensors}
        for kind in ("master", "module")
    )
    assert "bfloat16" not in master and "bfloat16" in module
    with pytest.raises(UsageError, match="unknown value `some`") as caught:
        ckptctl.report(zero, weights="some")
    assert caught.value.why == "known: master, module"
    files = list(ckptctl.report(zero, tag="global_step4").verification.files)
    assert files and all(file.startswith("global_step4/") for file in files)
    same = ckptctl.report(zero, other=zero, tag_other="global_step4").difference
    assert same.same and same.compared
    for option in ("tag", "tag_other"):
        with pytest.raises(UsageError, match="nowhere"):
            ckptctl.report(zero, other=zero, **{option: "nowhere"})
    between = {"weights": "master", "weights_other": "module", "structure": True}
    found = ckptctl.report(zero, other=zero, **between).difference
    assert {one.kinds for one in found.tensors} == {("dtype",)}


def test_rules_apply_only_to_sides_that_need_them(data, tmp_path):
    ranks = data / "megatron" / "tp2_pp2_vp2" / "ckpt"
    ckptctl.convert(ranks, tmp_path / "whole", to="dcp", rules="megatron-core")
    for one, other in ((ranks, tmp_path / "whole"), (tmp_path / "whole", ranks)):
        found = ckptctl.report(one, other=other, rules="megatron-core", structure=True)
        assert found.difference and found.difference.compared and not found.difference.tensors
    for other in (None, tmp_path / "whole"):
        with pytest.raises(UsageError, match="rules"):
            ckptctl.report(tmp_path / "whole", other=other, rules="megatron-core")


@pytest.mark.parametrize(
    "options",
    [
        {"structure": True},
        {"atol": 0},
        {"ignore_dtype": True},
        {"format_other": "hf"},
        {"weights_other": "module"},
        {"tag_other": "x"},
    ],
)
def test_comparison_options_require_second_checkpoint(source, tmp_path, options):
    with pytest.raises(UsageError, match="requires a second checkpoint"):
        ckptctl.report(source, tmp_path / "page.html", **options)
    assert not (tmp_path / "page.html").exists()


def test_damaged_second_checkpoint_is_reported_without_difference(source, torn, tmp_path_factory):
    found = ckptctl.report(source, other=torn).to_json()
    assert found["difference"] is None and found["difference_error"]["exit_code"] == 4
    assert found["other_summary"]["verdict"] == "damaged"
    assert found["other_summary"]["problem"].startswith(
        "a data file is truncated: __2_0.distcp (and"
    )
    with pytest.raises(FormatError):
        ckptctl.report(source, other=tmp_path_factory.mktemp("empty"))
    with pytest.raises(SourceNotFoundError):
        ckptctl.report(source, other=source.parent / "nothing")


def test_unlisted_tensors_are_counted(torn):
    whole, part = (ckptctl.report(torn, max_tensors=n).to_json() for n in (1000, 5))
    assert len(part["tensors"]) == 5
    assert part["left_out"]["tensors"] == len(whole["tensors"]) - 5
    listed = sum(one["bytes"] for one in part["tensors"])
    assert part["left_out"]["bytes"] + listed == whole["bytes"] == part["bytes"]
    assert all(one["missing"] for one in part["tensors"]), "what is wrong comes first"


def test_include_option_selects_listed_tensors(source):
    found = ckptctl.report(source, include="a.*").to_json()
    assert [one["name"] for one in found["tensors"]] == ["a.b", "a.w"]
    assert found["left_out"]["tensors"] == 1 and found["tensor_count"] == 3
    with pytest.raises(MappingError):
        ckptctl.report(source, include="b.*")


def test_listed_differences_are_bounded(source, tmp_path):
    other = tmp_path / "other.safetensors"
    save_file({f"x{i}": torch.ones(1) for i in range(9)}, other)
    found = ckptctl.report(source, other=other, max_tensors=2).to_json()
    assert len(found["difference"]["b"]["only"]) == 2
    assert found["left_out"]["differences"] == 7 + 1


def test_listed_chunks_and_holes_are_bounded():
    rows = [Extent(Box((2 * i, 0), (1, 4)), "f", 0, 16) for i in range(10)]
    entry = TensorEntry("t", "float32", (20, 4), tuple(rows), ("t",))
    maps = ChunkMapper(max_chunks=25, max_per_tensor=8)
    first, second = maps.map_tensor(entry, ()), maps.map_tensor(entry, ())
    assert (len(first.holes), len(first.chunks), first.missing) == (8, 8, 10)
    assert (len(second.holes), len(second.chunks), second.missing) == (8, 1, 10)
    assert (maps.chunks, maps.holes) == (2 + 9, 2 + 2)


def test_hostile_tensor_name_stays_inside_page_data(source, tmp_path):
    ckptctl.report(source, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert "onerror" in text and "<img" not in text
    found = Elements()
    found.feed(text)
    assert "img" not in found.tags and found.tags.count("script") == 2
    assert HOSTILE in [one["name"] for one in data_of(tmp_path / "page.html")["tensors"]]


@pytest.mark.parametrize(
    "name", [HOSTILE, "<!--<script>", "\u2028\u202e\x00", "\ud800", "&lt;", "$x"]
)
def test_any_text_is_embedded_safely(name):
    text = embed_json({"name": name})
    assert json.loads(text)["name"] == name
    assert text.isascii() and not set("<>&") & set(text)
    assert json.loads(DATA.search(build_page({"path": name}))[1])["path"] == name


def test_large_integers_are_embedded_as_strings():
    document = {"few": 2**53 - 1, "many": [2**53 + 1, {"fewer": -(2**60) - 1}], "real": 1e300}
    assert json.loads(embed_json(document)) == {
        "few": 2**53 - 1,
        "many": [str(2**53 + 1), {"fewer": str(-(2**60) - 1)}],
        "real": 1e300,
    }


def test_content_security_policy_allows_only_own_script_and_style(source, tmp_path):
    ckptctl.report(source, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules.pop("default-src") == rules.pop("base-uri") == rules.pop("form-action") == "'none'"
    for kind, tag in (("style", "style"), ("script", "script")):
        content = re.search(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)[1]
        digest = b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert rules.pop(f"{kind}-src") == f"'sha256-{digest}'"
    assert not rules
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|url\(|@import|innerHTML|eval\(", text)


def test_page_includes_every_script():
    folder = files(report_page.__name__)
    there = {item.name for item in folder.iterdir() if item.name.endswith(".js")}
    assert there == set(report_page.SCRIPTS)
    for one, other in pairwise(report_page.SCRIPTS):
        assert (folder / one).read_text() != (folder / other).read_text()


def test_overwrite_replaces_only_reports(source, tmp_path):
    target = tmp_path / "out" / "page.html"
    ckptctl.report(source, target)
    before = target.read_bytes()
    with pytest.raises(RefusedError):
        ckptctl.report(source, target)
    ckptctl.report(source, target, overwrite=True)
    assert target.read_bytes() == before, "the page is a function of what it is about"
    target.write_text("<!doctype html><p>mine")
    with pytest.raises(RefusedError):
        ckptctl.report(source, target, overwrite=True)
    assert target.read_text() == "<!doctype html><p>mine"
    assert [item.name for item in target.parent.iterdir()] == ["page.html"]


def test_report_inside_checkpoint_is_refused(torn, source):
    for sources in ((torn, None), (source, torn)):
        with pytest.raises(RefusedError, match="inside the source") as refused:
            ckptctl.report(sources[0], torn / "page.html", other=sources[1])
        assert "`-o FILE`" in str(refused.value.hint)
    assert not (torn / "page.html").exists()


DATA = re.compile(r'<script id="data" type="application/json">(.*?)</script>', re.DOTALL)


def data_of(path):
    return json.loads(DATA.search(path.read_text())[1])


class Elements(HTMLParser):
    """Lists the elements of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)


def test_report_difference_matches_quantization_rounding(tiny_llama3_hf, tmp_path):
    ckptctl.convert(tiny_llama3_hf, tmp_path / "q", to="hf", quantize="nvfp4")
    with pytest.raises(UsageError, match="dequantize` requires a second checkpoint"):
        ckptctl.report(tmp_path / "q", dequantize="fp32")
    found = ckptctl.report(
        tmp_path / "q", other=tiny_llama3_hf, dequantize="fp32", ignore_dtype=True
    ).difference
    result = ckptctl.convert(tiny_llama3_hf, tmp_path / "again", to="hf", quantize="nvfp4")
    expected = {name: one.max_abs for name, one in result.rounding.items()}
    assert {one.name: one.values.max_abs for one in found.tensors} == pytest.approx(expected, 1e-3)
