"""What a job becomes on this machine, and what it is refused for before anything starts."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from typer.testing import CliRunner

from lockstep.api.cluster import TrainingCluster
from lockstep.api.errors import ConfigError
from lockstep.api.job import TrainingJob
from lockstep.plan.render.resolve import resolve
from lockstep.plan.render.resolved import Resolved
from lockstep.platforms.jobs import agents as agents_module
from lockstep.platforms.jobs.agents import Agents
from lockstep.platforms.jobs.machine import check_inputs
from lockstep.platforms.local import run as run_module
from lockstep.platforms.local.placement import local_defaults, local_run, node_devices
from lockstep_gang.contract.run import Run
from unit.virtual_time import VirtualClock, forever

TRAINING = {"model": {"name": "/workspace/models/tiny"}, "data": {"path": "/datasets/all.jsonl"}}


def resolved(root: Path, **spec: Any) -> Resolved:
    if "script" not in spec:
        spec.setdefault("training", TRAINING)
    job = TrainingJob.model_validate(
        {"apiVersion": "lockstep.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "x"}, "spec": spec}
    )
    profile = TrainingCluster.model_validate(
        {"apiVersion": "lockstep.dev/v1alpha1", "kind": "TrainingCluster", "metadata": {"name": "local"}, "spec": {}}
    )
    return resolve(job, profile, local_defaults(root, "uid-1"))


def made(root: Path, inherited: dict[str, str] | None = None, **spec: Any) -> Run:
    return local_run(resolved(root, nodes=2, gpusPerNode=0, **spec), root / "key", (4000, 5000), inherited or {})


def with_inputs(root: Path) -> Path:
    (root / "workspace/models/tiny").mkdir(parents=True)
    (root / "workspace/models/tiny/config.json").touch()
    (root / "datasets").mkdir()
    (root / "datasets/all.jsonl").touch()
    return root


@pytest.mark.parametrize(
    ("each", "inherited", "present", "devices"),
    [
        (1, {}, 2, ("0", "1")),
        (2, {}, 8, ("0,1", "2,3")),
        (2, {"CUDA_VISIBLE_DEVICES": "7,6,5,4"}, 8, ("7,6", "5,4")),
        (1, {"CUDA_VISIBLE_DEVICES": "GPU-a, GPU-b"}, 8, ("GPU-a", "GPU-b")),
        (0, {"CUDA_VISIBLE_DEVICES": "0"}, 8, ("", "")),
        (0, {}, 0, ("", "")),
    ],
)
def test_nodes_on_one_machine_divide_its_gpus(
    each: int, inherited: dict[str, str], present: int, devices: tuple[str, ...], tmp_path: Path
) -> None:
    assert node_devices(resolved(tmp_path, nodes=2, gpusPerNode=each), inherited, present) == devices


def test_the_job_s_own_choice_of_gpus_is_divided_and_not_given_to_every_node(tmp_path: Path) -> None:
    env = [{"name": "CUDA_VISIBLE_DEVICES", "value": "4,5"}]
    job = resolved(tmp_path, nodes=2, gpusPerNode=1, env=env)
    assert node_devices(job, {"CUDA_VISIBLE_DEVICES": "0"}, 8) == ("4", "5")
    assert "CUDA_VISIBLE_DEVICES" not in local_run(job, tmp_path / "key", (4000, 5000), {}).environment


@pytest.mark.parametrize(
    ("inherited", "words"), [({}, "this machine has 1"), ({"CUDA_VISIBLE_DEVICES": "3,-1"}, "CUDA_VISIBLE_DEVICES names 1")]
)
def test_fewer_gpus_than_the_nodes_ask_for_are_refused(inherited: dict[str, str], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"spec\.gpusPerNode is 1, so 2 nodes need 2 GPUs, and {words}: lower gpusPerNode or --nodes"):
        node_devices(resolved(tmp_path, nodes=2, gpusPerNode=1), inherited, 1)


SECRET = [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "token"}}}]


def test_a_variable_of_the_cluster_comes_from_this_shell(tmp_path: Path) -> None:
    assert "HF_TOKEN" not in made(tmp_path, {"HF_TOKEN": "x"}, env=SECRET).environment  # inherited, never written down


def test_a_variable_of_the_cluster_that_is_not_set_here_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"spec\.env takes HF_TOKEN from the cluster, .* set it in this shell instead"):
        made(tmp_path, env=SECRET)


def test_an_optional_variable_of_the_cluster_may_be_missing(tmp_path: Path) -> None:
    optional = [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "token", "optional": True}}}]
    assert "HF_TOKEN" not in made(tmp_path, env=optional).environment


def test_a_job_whose_inputs_are_there_may_start(tmp_path: Path) -> None:
    check_inputs(resolved(with_inputs(tmp_path)))


@pytest.mark.parametrize(
    ("missing", "sentence"),
    [
        (
            "datasets/all.jsonl",
            (
                "spec.training.data.path: there is no file or folder {} (/datasets/all.jsonl of the job): put it there, or name by"
                " --cluster the folder that contains workspace/ and datasets/"
            ),
        ),
        (
            "workspace/models/tiny/config.json",
            "spec.training.model.name: there is no file {} (/workspace/models/tiny/config.json of the job): put it",
        ),
    ],
)
def test_an_input_that_is_missing_is_one_sentence(tmp_path: Path, missing: str, sentence: str) -> None:
    (with_inputs(tmp_path) / missing).unlink()
    with pytest.raises(ConfigError) as caught:
        check_inputs(resolved(tmp_path))
    assert str(caught.value).startswith(sentence.format(tmp_path / missing))


def test_a_chat_template_is_looked_for_where_it_is_on_this_machine(tmp_path: Path) -> None:
    training = {**TRAINING, "data": {**TRAINING["data"], "chatTemplate": "/datasets/chat.jinja"}}
    with pytest.raises(ConfigError) as caught:
        check_inputs(resolved(with_inputs(tmp_path), training=training))
    assert str(caught.value).startswith(
        f"spec.training.data.chatTemplate: there is no file {tmp_path}/datasets/chat.jinja (/datasets/chat.jinja of the job)"
    )
    (tmp_path / "datasets/chat.jinja").touch()
    check_inputs(resolved(tmp_path, training=training))


def test_a_script_that_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"spec\.script\.path: there is no file .*/workspace/train\.py"):
        check_inputs(resolved(tmp_path, script={"path": "train.py"}))


def test_a_preview_is_of_a_training_s_data_on_this_machine(tmp_path: Path) -> None:
    from lockstep.cli.main import app

    spec: dict[str, Any] = {"nodes": 1, "gpusPerNode": 0, "script": {"path": "train.py"}}
    path = tmp_path / "job.yaml"
    path.write_text(json.dumps({"apiVersion": "lockstep.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "x"}, "spec": spec}))
    for options, said in (
        (
            ["-f", str(path), "--cluster", str(tmp_path)],
            "--preview shows what spec.training would learn of its data, but this job runs a script",
        ),
        (["-f", str(path), "--in-namespace"], "--preview is for a job on this machine"),
        (["train.py"], "--preview is for a job file: name one with -f"),
    ):
        ended = CliRunner().invoke(app, ["run", "--preview", "3", *options])
        assert isinstance(ended.exception, ConfigError)
        assert said in str(ended.exception)
    assert not (tmp_path / "workspace").exists()


@pytest.mark.parametrize(("ended", "code"), [(0, 0), (78, 2), (1, 1), (-9, 1)])
def test_a_preview_ends_as_the_trainer_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: int, code: int) -> None:
    from lockstep.cli.main import app

    asked: list[list[str]] = []

    def run(command: list[str], **options: Any) -> Any:
        asked.append(command)
        return SimpleNamespace(returncode=ended)

    monkeypatch.setattr("lockstep.platforms.local.run.subprocess.run", run)
    spec = {"nodes": 2, "gpusPerNode": 0, "training": TRAINING}
    path = with_inputs(tmp_path) / "job.yaml"
    path.write_text(json.dumps({"apiVersion": "lockstep.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "x"}, "spec": spec}))
    shown = CliRunner().invoke(app, ["run", "-f", str(path), "--preview", "3", "--cluster", str(tmp_path)])
    assert shown.exit_code == code, shown.output
    assert [command[-2:] for command in asked] == [["--preview", "3"]]


def test_a_commit_to_resume_from_must_be_there(tmp_path: Path) -> None:
    training = {**TRAINING, "checkpoint": {"resumeFrom": "/workspace/runs/y/checkpoints/step-5.a1"}}
    with pytest.raises(ConfigError, match=r"spec\.training\.checkpoint\.resumeFrom: there is no folder"):
        check_inputs(resolved(with_inputs(tmp_path), training=training))


AGENT = """#!/bin/sh
trap 'exit 75' TERM
folder=$(dirname "$0")
echo "$CUDA_VISIBLE_DEVICES" > "$folder/devices-$6"
code=$(head -n 1 "$folder/codes-$6")
sed -i 1d "$folder/codes-$6"
[ "$code" = killed ] && kill -9 $$
[ "$code" = told ] || exit "$code"
echo up > "$folder/up"
while :; do sleep 0.05; done
"""
"""An agent that ends as it is written down for its node: its codes, one a start; `told`: when it is told to."""


def play(folder: Path, patch: pytest.MonkeyPatch, *codes: str) -> None:
    """Let agents of nodes end with these codes, several of a node with spaces between."""
    agent = folder / "agent"
    agent.write_text(AGENT)
    agent.chmod(0o700)
    for node, own in enumerate(codes):
        (folder / f"codes-{node}").write_text("\n".join(own.split()) + "\n")
    patch.setattr(agents_module.sys, "executable", str(agent))
    patch.setattr(agents_module, "END_SECONDS", 0.3)


def test_each_agent_gets_the_devices_of_its_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    play(tmp_path, monkeypatch, "0", "0")
    assert asyncio.run(run_module.run_agents(tmp_path / "run.json", 2, tmp_path / "logs", ("0,1", "2,3"))) == 0
    assert [(tmp_path / f"devices-{node}").read_text().strip() for node in range(2)] == ["0,1", "2,3"]


@pytest.mark.parametrize(
    ("codes", "code", "said"),
    [
        (["killed 0", "told"], 0, "the agent of node 0 was ended by SIGKILL: it is started again"),
        (["killed killed", "told"], 1, "the agent of node 0 was ended by SIGKILL: it is started again"),
        (["70", "told"], 1, ""),
        (["told", "killed"], 1, "the agent of node 1 was ended by SIGKILL, its log is"),
        (["told", "75"], 1, "the agent of node 1 was stopped, but the job goes on without it: stopping the job"),
    ],
)
def test_an_agent_that_is_ended_from_outside(
    codes: list[str], code: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    play(tmp_path, monkeypatch, *codes)
    assert asyncio.run(run_module.run_agents(tmp_path / "run.json", 2, tmp_path / "logs")) == code
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("saves", "signaled", "told", "heard"),
    [(True, False, ["SIGTERM"], [False]), (True, True, [], [False]), (False, False, ["SIGTERM"], [False])],
)
def test_the_first_ctrl_c_tells_agents_unless_it_has_reached_them(
    saves: bool, signaled: bool, told: list[str], heard: list[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(tmp_path, monkeypatch, "told" if not signaled else "75")
    numbers: list[str] = []
    hears: list[bool] = []

    async def interrupted() -> int:
        agents = Agents(tmp_path / "run.json", asyncio.Queue())
        tell = agents.tell
        monkeypatch.setattr(agents, "tell", lambda number=signal.SIGTERM: (numbers.append(number.name), tell(number)))
        agents.news.put_nowait(signal.SIGINT)
        return await agents.run(hears.append, signaled=signaled, saves=saves)

    assert asyncio.run(interrupted()) == 130
    assert (numbers[: len(told)], hears) == (told, heard)


def test_an_agent_that_does_not_end_is_told_twice_and_killed_after_half_a_minute() -> None:
    clock, told = VirtualClock(0.0), list[tuple[float, str]]()
    agents = Agents(Path("run.json"), cast(Any, None))
    agents._processes = {0: cast(Any, SimpleNamespace(wait=forever, returncode=None))}
    agents.tell = lambda number=signal.SIGTERM: told.append((clock.now, number.name))  # type: ignore[method-assign]
    clock.run(agents.end())
    assert told == [(0, "SIGTERM"), (15, "SIGTERM"), (30, "SIGKILL")]


def test_a_program_of_a_shell_is_no_script_path(tmp_path: Path) -> None:
    (tmp_path / "workspace/sub").mkdir(parents=True)
    (tmp_path / "workspace/sub/start").write_text("#!/usr/bin/env bash\nif true; then echo; fi\n")
    with pytest.raises(
        ConfigError, match=r"start is a program of bash, which Python can't read: write script.command: \[bash, sub/start\]"
    ):
        check_inputs(resolved(tmp_path, script={"path": "sub/start"}))


@pytest.mark.parametrize(
    ("script", "expected"),
    [({"path": "a.py"}, None), ({"path": "a.py", "localRank": True}, True), ({"module": "a", "localRank": False}, False),
        ({"module": "a"}, None), ({"command": ["a"]}, False)],
)  # fmt: skip
def test_agents_hear_whether_ranks_get_their_local_rank(script: dict[str, Any], expected: bool | None, tmp_path: Path) -> None:
    assert (made(tmp_path, script=script).local_rank, made(tmp_path).local_rank) == (expected, False)
