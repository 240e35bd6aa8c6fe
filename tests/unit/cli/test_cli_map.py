import json

import pytest

import ckptctl
from ckptctl.planner.mapping.preview import SymbolicSize
from tests.checkpoints import save_hf, save_meta, tiny_llama

Q = "model.layers.7.self_attn.q_proj.weight"
REORDERED = "reordered"
QKV = "model.layers.7.self_attn.qkv_proj.weight"


def rows(result):
    assert result.exit_code == 0, result.stderr
    return [line.split("\t") for line in result.stdout.splitlines()[1:]]


def test_permuted_key_shows_head_permutation(run):
    assert rows(run("map", Q, "-m", "llama3", "--to-layout", "meta")) == [
        ["layers.7.attention.wq.weight", "[:, :]", "(h r p) d", Q, "[:, :]", "(h p r) d", REORDERED]
    ]


def test_fused_tensor_maps_to_slices(run):
    found = rows(run("map", QKV, "-m", "phi3", "--to-layout", "torchtune"))
    assert [row[4] for row in found] == [
        "[0:h*e, :]",
        "[h*e:h*e + k*e, :]",
        "[h*e + k*e:h*e + k*e + k*e, :]",
    ]


def test_set_option_turns_slices_into_numbers(run):
    sizes = ("--set", "num_attention_heads=32", "--set", "k=8", "--set", "hidden_size=4096")
    found = rows(run("map", QKV, "-m", "phi3", "--to-layout", "torchtune", *sizes))
    assert [row[4] for row in found] == ["[0:4096, :]", "[4096:5120, :]", "[5120:6144, :]"]


def test_config_option_supplies_sizes(run, tiny_llama3_hf):
    target = ("-m", "llama3", "--to-layout", "meta", "--config", tiny_llama3_hf)
    shape = json.loads(run("map", Q, *target, "--json").stdout)["targets"][0]
    assert shape["shape"] == ["h*e", "d"] and shape["numbers"] == [64, 64]
    refused = run("map", Q, *target, "--set", "n_heads=3")
    assert refused.exit_code == 2 and "--set n_heads=3` contradicts" in refused.stderr


def test_config_option_supplies_model_type(run, tiny_llama3_hf, tmp_path):
    target = ("--to-layout", "meta", "--config")
    found = run("map", Q, *target, tiny_llama3_hf, "--json")
    assert json.loads(found.stdout)["model_type"] == "llama3"
    assert found.stdout == run("map", Q, "-m", "llama3", *target, tiny_llama3_hf, "--json").stdout
    refused = run("map", Q, "--to-layout", "meta")
    assert refused.exit_code == 2 and "`--config DIR`" in refused.stderr
    (tmp_path / "config.json").write_text('{"model_type": "nobody"}')
    refused = run("map", Q, *target, tmp_path)
    assert refused.exit_code == 2 and "set it with `--model-type`" in refused.stderr


@pytest.mark.parametrize("files", ["both", "params.json"])
def test_repeated_kv_heads_count_once(run, tmp_path, files):
    state, config = tiny_llama("llama3", heads=4, kv_heads=2)
    meta = save_meta(tmp_path / "meta", state, config, 4)
    assert json.loads((meta / "params.json").read_text())["n_kv_heads"] == 4
    if files == "both":
        (meta / "config.json").write_text(json.dumps(config))
    target = ("-m", "llama3", "--to-layout", "hf", "--config", meta, "--json")
    found = run("map", "layers.0.attention.wk.weight", *target)
    assert found.exit_code == 0, found.stderr
    assert json.loads(found.stdout)["sizes"]["k"] == 2


def test_fused_target_lists_all_sources(run):
    key = "layers.0.attn.k_proj.weight"
    found = rows(run("map", key, "-m", "phi3", "--to-layout", "hf"))
    assert {row[0] for row in found} == {"model.layers.0.self_attn.qkv_proj.weight"}
    assert [row[3].split(".")[3] for row in found] == ["q_proj", "k_proj", "v_proj"]
    assert found[1][1] == "[h*e:h*e + k*e, :]"


def test_single_expert_maps_into_stacked_tensor(run):
    key = "layers.3.feed_forward.experts.5.w1.weight"
    found = rows(run("map", key, "-m", "mixtral", "--to-layout", "hf-v5", "--set", "f=10"))
    assert found[0][1] == "[5:6, 0:10, :]" and found[0][3] == key
    assert found[1][3] == key.replace("5", "{x}")


def test_stacked_tensor_maps_to_all_experts(run):
    key = "model.layers.3.mlp.experts.gate_up_proj"
    result = run("map", key, "-m", "mixtral", "--to-layout", "mistral", "-q")
    assert result.stdout.splitlines() == [
        "layers.3.feed_forward.experts.{x}.w1.weight",
        "layers.3.feed_forward.experts.{x}.w3.weight",
    ]


def test_template_key_maps_to_template(run):
    found = rows(run("map", Q.replace("7", "{i}"), "-m", "llama3", "--to-layout", "meta"))
    assert found[0][0] == "layers.{i}.attention.wq.weight"


def test_dropped_and_tied_keys_are_marked(run):
    found = rows(run("map", "rope.freqs", "-m", "llama3", "--to-layout", "hf"))
    assert found[0][-1].startswith("dropped: rotary frequencies")
    tied = ("-m", "llama3_2", "--from-layout", "hf", "--to-layout", "meta")
    assert "tied" in rows(run("map", "lm_head.weight", *tied))[0][-1]
    both = rows(run("map", "model.embed_tokens.weight", *tied))
    assert [row[0] for row in both] == ["tok_embeddings.weight", "output.weight"]


def test_mtp_layer_keys_map_with_layer_count(run):
    key = "model.layers.{}.input_layernorm.weight"
    target = ("-m", "deepseek_v3", "--from-layout", "hf", "--to-layout", "torchtitan@0.3")
    known = ("--set", "num_hidden_layers=61")
    for number, prefix in ((60, "layers.60"), (61, "mtp_layers.0"), (62, "mtp_layers.1")):
        found = rows(run("map", key.format(number), *target, *known))
        assert found[0][0] == f"{prefix}.attention_norm.weight"
        assert found[0][3] == key.format(number)
    presumed = run("map", key.format(61), *target)
    assert rows(presumed)[0][0].startswith("layers.61.") and "treated as one of" in presumed.stderr
    back = ckptctl.map(
        "mtp_layers.1.enorm.weight", model_type="deepseek_v3", to_layout="hf", sizes={"i": 61}
    )
    assert back.route.arrivals[0].key == "model.layers.62.enorm.weight"
    refused = run("map", "mtp_layers.1.enorm.weight", "-m", "deepseek_v3", "--to-layout", "hf")
    assert refused.exit_code == 5 and "--set num_hidden_layers=N" in refused.stderr


@pytest.mark.parametrize(
    ("key", "options", "code", "said"),
    [
        (Q.replace("q_proj", "qproj"), ["--to-layout", "meta"], 5, "q_proj.weight`"),
        (Q, ["--from-layout", "meta", "--to-layout", "hf"], 5, "the key exists in layout `hf`"),
        (Q, ["--to-layout", "mata"], 2, "did you mean `meta`?"),
        (Q, ["--from-layout", "hff", "--to-layout", "meta"], 2, "did you mean `hf`?"),
        ("lm_head.weight", ["--to-layout", "meta"], 2, "several layouts"),
        (Q.replace("weight", "bias"), ["--to-layout", "meta"], 5, "has no place"),
        (Q, ["--to-layout", "meta", "--set", "n=3"], 2, "no size named `n`"),
        (Q, ["--to-layout", "meta", "--set", "h"], 2, "NAME=VALUE"),
        (Q, ["--to-layout", "meta", "--set", "h=0"], 2, "NAME=VALUE"),
        (Q, ["--to-layout", "meta", "--set", "h=2", "--set", "h=3"], 2, "given twice"),
        (Q, ["--to-layout", "meta", "--config", "/nothing"], 3, "no such file or directory"),
    ],
)
def test_invalid_map_arguments_are_errors(run, key, options, code, said):
    result = run("map", key, "-m", "llama3", *options)
    assert (result.exit_code, result.stdout) == (code, "")
    assert said in result.stderr


def test_key_without_layer_prints_no_note(run):
    target = ("-m", "deepseek_v3", "--from-layout", "hf", "--to-layout", "torchtitan@0.3")
    assert not run("map", "lm_head.weight", *target).stderr


def test_map_on_terminal_shows_shapes_and_slices(terminal):
    shown = terminal(
        "map", QKV, "-m", "phi3", "--to-layout", "torchtune", "--set", "d=8", COLUMNS="140"
    )
    assert "layers.7.attn.k_proj.weight  [k*e, 8]" in shown
    assert f"[h*e:h*e + k*e, :] of {QKV}" in shown


def test_symbolic_sizes_add_and_multiply():
    assert str(SymbolicSize("h*e") + SymbolicSize("0", 0)) == "h*e"
    assert str(SymbolicSize("h", 2) + SymbolicSize("k")) == "h + k"
    assert str(SymbolicSize("h", 2) + SymbolicSize("k", 3)) == "5"
    assert str(SymbolicSize("x + 1") * SymbolicSize("f", 4)) == "(x + 1)*f"
    assert str(SymbolicSize("x") * SymbolicSize("1", 1)) == "x"
    assert str(SymbolicSize("2", 2) * SymbolicSize("f", 4)) == "8"


def test_config_option_accepts_file(run, tmp_path):
    base = save_hf(tmp_path / "base", *tiny_llama("llama3"))
    key = Q.replace("7", "1")
    words = ("map", key, "-m", "llama3", "--to-layout", "meta", "--json", "--config")
    whole = json.loads(run(*words, base).stdout)
    assert whole["sizes"]["i"] == 2
    assert json.loads(run(*words, base / "config.json").stdout) == whole
    result = run(*words[:-2], "--config", next(base.glob("*.safetensors")))
    assert result.exit_code == 3 and "neither config.json nor params.json" in result.stderr


@pytest.mark.parametrize(("number", "said"), [(1, False), (2, True), (99, True)])
def test_layer_beyond_model_is_noted(run, number, said):
    key = Q.replace("7", str(number))
    words = ("map", key, "-m", "llama3", "--to-layout", "meta")
    result = run(*words, "--set", "num_hidden_layers=2")
    assert result.exit_code == 0 and ("has no such tensor" in result.stderr) == said
    assert not run(*words).stderr
