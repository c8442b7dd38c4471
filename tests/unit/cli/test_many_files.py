"""No job file that is named is left out: every verb with -f takes several, or refuses several."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any, cast

import pytest

from lockstep.cli.shared.inputs import read_all
from lockstep.cli.shared.jobargs import TargetOptions
from lockstep.platforms.clusters.target import Target
from lockstep.platforms.places.orders import Order
from unit.cli.test_every_verb import VERBS, run

USAGE = 2
WITH_FILES = sorted(name for name, verb in VERBS.items() if any("-f" in one.opts and "--file" in one.opts for one in verb.params))
TAKE_SEVERAL = ("validate", "render", "plan", "delete")
MORE = {
    "run": ["--local"],
    "launch": ["--at", "127.0.0.1:29600"],
    "retry": ["--local"],
    "preflight": ["--local"],
    "plan": ["--offline"],
    "delete": ["--yes"],
    "cp": ["good.json", "good:"],
}
GOOD = {"apiVersion": "lockstep.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "good"},
    "spec": {"cluster": "local", "script": {"path": "/a.py"}}}  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")
    for name in ("good", "other"):
        Path(f"{name}.json").write_text(json.dumps({**GOOD, "metadata": {"name": name}}))
    Path("bad.yaml").write_text(json.dumps({**GOOD, "spec": {"nodes": "two"}}))
    return tmp_path


def test_the_verbs_with_files_are_found() -> None:
    assert {"validate", "render", "plan", "preflight", "run", "retry", "delete"} <= set(WITH_FILES)


def test_a_cluster_that_is_not_there_is_told_with_the_file_that_names_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("away.json").write_text(json.dumps({**GOOD, "spec": {**GOOD["spec"], "cluster": "away"}}))
    assert run(monkeypatch, ["validate", "good.json", "away.json"]) == USAGE
    assert "away.json: spec.cluster: there is no cluster away" in capsys.readouterr().err


def test_a_plan_of_one_file_begins_with_its_first_finding(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run(monkeypatch, ["plan", "--offline", "good.json"])
    assert capsys.readouterr().out.startswith("note ")


@pytest.mark.parametrize("order", [["good.json", "bad.yaml"], ["bad.yaml", "good.json"]])
@pytest.mark.parametrize("name", WITH_FILES)
def test_a_file_beside_another_is_not_left_out(
    name: str, order: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run(monkeypatch, [*name.split(), *(word for file in order for word in ("-f", file)), *MORE.get(name, [])])
    errors = capsys.readouterr().err
    assert code == USAGE
    assert "bad.yaml" in errors
    if name not in TAKE_SEVERAL:
        assert f"lockstep {name} takes one job file, and 2 were given ({', '.join(order)})" in errors


@pytest.mark.parametrize(
    "words",
    [
        ["-f", "good.json", "other.json"],
        ["good.json", "other.json"],
        ["-f", "good.json", "-f", "other.json"],
        ["--file", "good.json", "-f", "other.json"],
    ],
)
def test_a_shell_s_list_of_files_is_taken_as_it_is(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, ["validate", *words]) == 0
    assert capsys.readouterr().out == "good.json: ok\nother.json: ok\n"
    assert run(monkeypatch, ["plan", "--offline", *words]) == 0
    out = capsys.readouterr().out
    assert "job        good in" in out and "job        other in" in out
    assert run(monkeypatch, ["render", "-o", "job", *words]) == 0
    assert "name: good" in (out := capsys.readouterr().out) and "---" in out and "name: other" in out


def test_one_file_is_told_as_before(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, ["validate", "good.json"]) == 0
    assert capsys.readouterr().out == "ok\n"


def test_all_mistakes_of_all_files_are_told_at_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    Path("worse.yaml").write_text("kind: TrainingJob\n")
    assert run(monkeypatch, ["validate", "bad.yaml", "good.json", "worse.yaml", "nowhere.yaml"]) == USAGE
    errors = capsys.readouterr().err
    assert all(f"{name}.yaml:" in errors for name in ("bad", "worse", "nowhere"))


def test_a_folder_stands_for_its_job_files(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = folder / "jobs"
    jobs.mkdir()
    (folder / "good.json").rename(jobs / "b.json")
    (folder / "other.json").rename(jobs / "a.yml")
    (jobs / "c.yaml").write_text("kind: ConfigMap\n")
    (jobs / "notes.txt").write_text("not read")
    assert run(monkeypatch, ["validate", "-f", "jobs"]) == 0
    printed = capsys.readouterr()
    assert printed.out == "jobs/a.yml: ok\njobs/b.json: ok\n"
    assert "note: jobs/c.yaml holds no TrainingJob and is skipped" in printed.err
    assert run(monkeypatch, ["validate", "jobs/c.yaml"]) == USAGE, "a file that is named must hold a job"
    assert run(monkeypatch, ["run", "-f", "jobs", "--local"]) == USAGE
    assert "is a folder: name one of its files" in capsys.readouterr().err
    (folder / "empty").mkdir()
    assert run(monkeypatch, ["validate", "empty"]) == USAGE
    assert "empty: there is no job file" in capsys.readouterr().err


def test_several_jobs_of_one_file_are_told_apart(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    Path("two.yaml").write_text("---\n".join(Path(f"{name}.json").read_text() + "\n" for name in ("good", "other")))
    assert run(monkeypatch, ["validate", "two.yaml"]) == 0
    assert capsys.readouterr().out == "two.yaml: good: ok\ntwo.yaml: other: ok\n"
    assert run(monkeypatch, ["run", "-f", "two.yaml", "--local"]) == USAGE
    assert "holds 2 objects of kind TrainingJob" in capsys.readouterr().err


def test_the_number_of_nodes_counts_wherever_the_job_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes: list[int | None] = []

    def start(order: Order, *_: object) -> int:
        nodes.append(order.job.spec.nodes)
        return 0

    monkeypatch.setattr(TargetOptions, "target", lambda _: Target(cast(Any, None), "default", "local"))
    monkeypatch.setattr("lockstep.platforms.kubernetes.innamespace.InNamespace.run", lambda _, order: start(order))
    monkeypatch.setattr("lockstep.platforms.local.run.run_local", start)
    for place in ("--local", "--in-namespace"):
        assert run(monkeypatch, ["run", "-f", "good.json", place, "--nodes", "3"]) == 0
    assert nodes == [3, 3]


def test_what_is_piped_in_is_a_file_among_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(Path("good.json").read_bytes())))
    assert [one.job.metadata.name for one in read_all([Path("-"), Path("other.json")], TargetOptions())] == ["good", "other"]
