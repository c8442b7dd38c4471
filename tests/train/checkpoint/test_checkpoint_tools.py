"""`lockstep checkpoint` and `lockstep adapter export`: what they say of a run's folder, and of shards collected from several volumes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from references import Reference
from typer.testing import CliRunner

from lockstep.cli.main import app
from lockstep_train import inspect
from train.checkpoint.test_checkpoint import FIVE_STEPS

SHARDS = [f"shard-r0000{rank}-of-00002.safetensors" for rank in (0, 1)]
COMMANDS = CliRunner()


@pytest.fixture
def finished(reference: Reference, tmp_path: Path) -> Path:
    """A copy of the folder of a run of two ranks and five steps, with the commits of the last three."""
    copy = Path(shutil.copytree(reference(2, **FIVE_STEPS), tmp_path / "run"))
    for step in (1, 2):
        shutil.rmtree(copy / f"checkpoints/step-{step}.a1")
    return copy


def spread(run: Path, parent: Path) -> list[Path]:
    """As two volumes would have it: each its own rank's shards, and everything else twice."""
    volumes = [parent / "volume-0", parent / "volume-1"]
    for rank, volume in enumerate(volumes):
        shutil.copytree(run, volume)
        for other in volume.glob(f"checkpoints/*/{SHARDS[1 - rank]}"):
            other.unlink()
    return volumes


def ask(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, object]]:
    code = inspect.main([str(argument) for argument in arguments])
    return code, json.loads(capsys.readouterr().out)


def test_the_list_says_what_is_best_newest_and_off_the_chain(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(finished / "checkpoints/step-5.a1", finished / "checkpoints/step-9.a0")
    code, answer = ask(capsys, "list", finished)
    commits = answer["commits"]
    assert code == 0
    assert isinstance(commits, list)
    told = {commit["name"]: (commit["kept"], commit["onChain"], commit["problems"]) for commit in commits}
    assert list(told) == ["step-5.a1", "step-4.a1", "step-3.a1", "step-9.a0"]
    best = min(
        (commit for commit in commits if commit["onChain"]), key=lambda commit: (commit["evalLoss"], commit["step"] - commit["evalStep"])
    )
    assert [commit["name"] for commit in commits if commit["best"]] == [best["name"]]
    assert told["step-9.a0"] == ([], False, [])
    assert all("newest" in told[name][0] for name in ("step-5.a1", "step-4.a1"))
    size = sum((finished / "checkpoints/step-5.a1" / shard).stat().st_size for shard in SHARDS)
    assert commits[0]["bytes"] == size


def test_a_list_for_people_names_a_missing_shard(finished: Path) -> None:
    (finished / "checkpoints/step-4.a1" / SHARDS[1]).unlink()
    listed = COMMANDS.invoke(app, ["checkpoint", str(finished)])
    assert listed.exit_code == 0, listed.output
    rows = {line.split("│")[1].strip(): line for line in listed.output.splitlines() if "│" in line and "step-" in line}
    assert "complete" in rows["step-5.a1"]
    assert f"{SHARDS[1]} is missing" in listed.output


def test_verify_reads_every_byte_and_names_what_is_damaged(finished: Path) -> None:
    assert COMMANDS.invoke(app, ["checkpoint", "--verify", "--all", str(finished)]).exit_code == 0
    shard = finished / "checkpoints/step-3.a1" / SHARDS[0]
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    assert COMMANDS.invoke(app, ["checkpoint", "--verify", str(finished)]).exit_code == 0, "the newest commit is whole"
    verified = COMMANDS.invoke(app, ["checkpoint", "--verify", "--all", str(finished)])
    assert verified.exit_code == 1
    assert f"step-3.a1: {shard} is damaged: its checksum is not the manifest's" in verified.output
    assert "step-5.a1: whole (" in verified.output


def test_the_list_describes_the_commit_that_is_named(finished: Path) -> None:
    told = COMMANDS.invoke(app, ["checkpoint", str(finished / "checkpoints/step-4.a1")])
    assert told.exit_code == 0, told.output
    for text in (
        "step-4.a1 of job reference: step 4, attempt 1",
        "LoRA: lora.rank 5",
        "2 ranks, Stage2, FP32",
        "Before          eval loss",
    ):
        assert text in told.output


def test_shards_collected_from_the_volumes_of_two_nodes_are_one_commit(finished: Path, tmp_path: Path) -> None:
    volumes = [str(volume) for volume in spread(finished, tmp_path)]
    assert COMMANDS.invoke(app, ["checkpoint", "--verify", "--all", *volumes]).exit_code == 0
    alone = COMMANDS.invoke(app, ["checkpoint", "--verify", volumes[0]])
    assert alone.exit_code == 1
    assert f"{SHARDS[1]} is missing" in alone.output
    exported = COMMANDS.invoke(app, ["adapter", "export", *volumes, "--output", str(tmp_path / "out")])
    assert exported.exit_code == 0
    assert (tmp_path / "out/adapter_model.safetensors").read_bytes() == (finished / "adapter/adapter_model.safetensors").read_bytes()


def test_an_export_takes_the_commit_before_a_damaged_one(finished: Path, tmp_path: Path) -> None:
    (finished / "checkpoints/step-5.a1" / SHARDS[0]).write_bytes(b"")
    exported = COMMANDS.invoke(app, ["adapter", "export", str(finished), "--output", str(tmp_path / "out")])
    assert exported.exit_code == 0, exported.stderr
    assert "Exported step 4 (attempt 1)" in exported.stdout


def test_a_folder_that_holds_no_run_is_told(tmp_path: Path) -> None:
    listed = COMMANDS.invoke(app, ["checkpoint", str(tmp_path / "nowhere")])
    assert listed.exit_code == 2
    assert "nowhere is not a folder; give a run's folder" in listed.stderr
