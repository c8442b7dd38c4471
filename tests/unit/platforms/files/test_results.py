"""Which adapter of a job is the newest, and what is fetched of it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lockstep import programs
from lockstep.api.errors import ConfigError
from lockstep.cli.files.adapter import _base_words
from lockstep.cli.main import main
from lockstep.kube.exec import PodPlace
from lockstep.platforms.files import results
from lockstep.platforms.files.results import Adapter, NoAdapter, idle_or_own_pod, merged_of, newest_adapter, resources_of
from lockstep.platforms.inpod.newest import CONFIG, MANIFEST, WEIGHTS, newest
from lockstep.platforms.jobs.processes import LocalPlace
from lockstep.programs import ProgramFailed
from support.fake_cluster import FakeCluster

PLACE = PodPlace(FakeCluster().as_cluster, "ns", "x-0", "trainer")


def write(folder: Path, time: int, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).touch()
        os.utime(folder / name, (time, time))
    return folder


def test_the_adapter_that_was_written_last_is_the_newest(tmp_path: Path) -> None:
    write(tmp_path / "checkpoints/step-10.a1", 10, MANIFEST)
    write(tmp_path / "adapter", 15, CONFIG, WEIGHTS)
    assert newest(tmp_path) == {"adapter": str(tmp_path / "adapter"), "commit": None}
    write(tmp_path / "checkpoints/step-20.a1", 20, MANIFEST)
    assert newest(tmp_path)["commit"] == str(tmp_path / "checkpoints/step-20.a1")
    write(tmp_path / "adapter", 21, CONFIG, WEIGHTS)
    assert newest(tmp_path) == {"adapter": str(tmp_path / "adapter"), "commit": None}


def test_an_adapter_whose_weights_are_not_there_yet_is_none(tmp_path: Path) -> None:
    write(tmp_path / "adapter", 1, CONFIG)
    assert newest(tmp_path) == {"adapter": None, "commit": None}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run's folder, where programs of the pod run as processes here; the trainer's export fails."""

    async def output_of(place: PodPlace, command: Sequence[str], *, stdin: bytes = b"", seconds: float = 60.0, most: int = 0) -> bytes:
        if "-m" in command:
            raise ProgramFailed("pod x-0: shard 1 of 2 is not here")
        pipe = subprocess.PIPE
        process = await asyncio.create_subprocess_exec(sys.executable, *command[1:], stdin=pipe, stdout=pipe)
        return (await process.communicate(stdin))[0]

    monkeypatch.setattr(programs, "output_of", output_of)
    monkeypatch.setattr(results, "output_of", output_of)
    monkeypatch.setattr(results, "WORKSPACE", str(tmp_path))
    return tmp_path / "runs/x"


def found(job: str = "x") -> Adapter:
    return asyncio.run(newest_adapter(PLACE, job))


def test_the_final_adapter_is_fetched(run: Path) -> None:
    write(run / "checkpoints/step-10.a1", 10, MANIFEST)
    folder = write(run / "adapter", 11, CONFIG, WEIGHTS)
    assert found() == Adapter(str(folder))


def test_shards_that_are_not_all_in_one_place_are_told_with_the_commands_that_bring_them_together(run: Path) -> None:
    write(run / "checkpoints/step-10.a1", 10, MANIFEST)
    with pytest.raises(NoAdapter, match=r"shard 1 of 2 is not here; .*lockstep cp x:.*/runs/x/checkpoints node-0 --node 0"):
        found()


@pytest.mark.parametrize("answer", ["", "[]", "[" * 100_000, '{"adapter": 1, "commit": null}', '{"adapter": "/etc", "commit": null}',
    '{"adapter": null, "commit": "--output"}', '{"adapter": null, "commit": "/w/runs/x/../../../etc"}', " " * (1 << 20)])  # fmt: skip
def test_an_answer_that_names_no_folder_of_the_run_is_refused(answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def output_of(place: PodPlace, command: Sequence[str], **options: Any) -> bytes:
        return answer.encode()

    monkeypatch.setattr(programs, "output_of", output_of)
    monkeypatch.setattr(results, "WORKSPACE", "/w")
    with pytest.raises(NoAdapter, match="doesn't say which adapter of /w/runs/x is the newest"):
        found()


FAKE_MERGE = """
import pathlib, sys
source, _, output, *options = sys.argv[1:]
pathlib.Path(output).mkdir()
pathlib.Path(output, "half").write_text(source)
sys.exit(f"lockstep: {options[0]} is not the base model" if options else 0)
"""


def merged(run: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> str:
    """What is in the folder of the merged model, while it is there."""
    (run / "fakemerge.py").write_text(FAKE_MERGE)
    monkeypatch.setenv("PYTHONPATH", str(run))
    monkeypatch.setattr(results, "MERGE_MODULE", "fakemerge")

    async def read() -> str:
        async with merged_of("x", LocalPlace(), str(run), "", options, lambda text: None) as folder:
            assert Path(folder).parent == run, "it is on the volume, where there is room"
            return (Path(folder) / "half").read_text()

    return asyncio.run(read())


def test_a_model_is_made_of_the_newest_weights_and_goes_when_it_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "runs/x"
    adapter = write(run / "adapter", 11, CONFIG, WEIGHTS)
    assert merged(run, monkeypatch) == str(adapter)
    commit = write(run / "checkpoints/step-12.a1", 12, MANIFEST)
    assert merged(run, monkeypatch) == str(commit)
    assert list(run.glob(".merged-*")) == []


def test_nothing_is_left_of_a_model_that_could_not_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "runs/x"
    write(run / "adapter", 11, CONFIG, WEIGHTS)
    with pytest.raises(ProgramFailed, match="other is not the base model"):
        merged(run, monkeypatch, "other")
    assert list(run.glob(".merged-*")) == []


def stateful_set(*, own_claims: bool) -> dict[str, Any]:
    resources = {
        "requests": {"cpu": "8", "memory": "64Gi", "nvidia.com/gpu": "4", "openshift.io/rail": "1"},
        "limits": {"nvidia.com/gpu": "4"},
    }
    template = {"spec": {"containers": [{"name": "trainer", "resources": resources}]}}
    claims = [{"metadata": {"name": "workspace"}}] if own_claims else []
    spec = {"template": template, "volumeClaimTemplates": claims}
    return {"kind": "StatefulSet", "metadata": {"name": "x", "namespace": "ns"}, "spec": spec}


def test_a_pod_to_generate_in_has_the_memory_of_the_jobs_and_only_the_gpus_that_were_asked_for() -> None:
    cpu = {"cpu": "8", "memory": "64Gi"}
    assert resources_of(stateful_set(own_claims=True), 0) == {"requests": cpu, "limits": {}}
    assert resources_of(stateful_set(own_claims=True), 1) == {"requests": cpu | {"nvidia.com/gpu": "1"}, "limits": {"nvidia.com/gpu": "1"}}


def pod(name: str) -> dict[str, Any]:
    status = {"containerStatuses": [{"name": "trainer", "state": {"running": {}}}]}
    return {"kind": "Pod", "metadata": {"name": name, "labels": {"lockstep.dev/job": "x"}}, "spec": {}, "status": status}


def where(spec: dict[str, Any], conditions: list[dict[str, Any]]) -> PodPlace:
    job = {"kind": "TrainingJob", "metadata": {"name": "x"}, "spec": spec, "status": {"conditions": conditions}}
    cluster = FakeCluster(job, stateful_set(own_claims=True), pod("x-0"))

    async def look() -> PodPlace:
        async with idle_or_own_pod(cluster.as_cluster, "ns", "x", 0, lambda line: None) as place:
            return place

    return asyncio.run(look())


@pytest.mark.parametrize(
    ("spec", "conditions"),
    [({"type": "Interactive"}, []), ({}, [{"type": "Failed", "status": "True", "reason": "RanksFailed", "message": ""}])],
)
def test_an_idle_pod_of_the_job_is_used(spec: dict[str, Any], conditions: list[dict[str, Any]]) -> None:
    assert where(spec, conditions) == PLACE


def test_a_pod_that_trains_is_left_alone() -> None:
    with pytest.raises(ConfigError, match=r"pod x-0 trains.*name that folder"):
        where({}, [])


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (
            {"training": {"model": {"name": "/workspace/models/x"}}},
            ". PEFT finds no /workspace/models/x here: load the base model from its",
        ),
        ({"training": {"model": {"name": "/"}}}, ". Its base model is /: load it from there"),
        ({"training": {"model": {"name": "org/x"}}}, ""),
        ({"script": {"path": "a.py"}}, ""),
    ],
)
def test_who_gets_an_adapter_reads_that_peft_has_to_be_given_a_base_that_was_a_folder(spec: dict[str, Any], words: str) -> None:
    said = _base_words(cast(Any, SimpleNamespace(job={"spec": spec})))
    assert said.startswith(words) and bool(said) == bool(words)


@pytest.mark.parametrize("verb", [["adapter", "get", "x", "out"], ["generate", "x", "hello"], ["chat", "x"]])
def test_without_a_cluster_they_say_so(
    verb: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.setattr("sys.argv", ["lockstep", *verb])
    assert main() == 2
    assert "no cluster can be reached" in capsys.readouterr().err
