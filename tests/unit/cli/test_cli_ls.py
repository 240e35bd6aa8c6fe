"""What ``ls`` and ``latest`` say where there is no run."""

import pytest


@pytest.mark.parametrize("command", ["ls", "latest"])
@pytest.mark.parametrize("name", ["model", "two words"])
def test_ls_and_latest_of_non_run_hint_at_inspect(run, tiny_llama3_hf, tmp_path, command, name):
    (tmp_path / name).mkdir()
    for path in (tiny_llama3_hf, tmp_path / name):
        result = run(command, path)
        assert result.exit_code == 3
        quoted = f"'{path}'" if " " in str(path) else path
        assert f"hint: list its contents with `ckptctl inspect {quoted}`\n" in result.stderr


def test_megatron_release_and_stale_tracker_are_reported(run, tmp_path, tiny_llama3_hf):
    """It begins with weights of no step, and its tracker file may name a step that is gone."""
    folder = tmp_path / "run"
    assert run("convert", tiny_llama3_hf, folder, "--to", "mcore").exit_code == 0
    for command in ("ls", "latest"):
        assert "only its initial weights in `release`" in run(command, folder).stderr
    (folder / "iter_0000010").mkdir()
    for file in (folder / "release").iterdir():
        (folder / "iter_0000010" / file.name).hardlink_to(file)
    (folder / "latest_checkpointed_iteration.txt").write_text("77\n")
    for command in ("ls", "latest"):
        result = run(command, folder)
        assert (
            "note: `latest_checkpointed_iteration.txt` names checkpoint '77', which does not"
            in result.stderr
        )
        assert "release" not in result.stderr
    (folder / "latest_checkpointed_iteration.txt").write_text("release")
    assert "release" not in run("ls", folder).stderr
