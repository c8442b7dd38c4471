"""`lockstep diff-runs`: what two runs were told, and what came of it."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from lockstep.cli.jobs import diff_runs
from lockstep.cli.main import app
from lockstep.cli.shared.kubesite import ClusterJob
from lockstep.plan.pages.diffruns import Side, compare, comparison_page, results_of, settings_of, spec_of
from lockstep_gang.agent.log import Journal
from lockstep_gang.contract.run import run_text
from unit.api.test_jobfile import JOB
from unit.gang.cases import make_run

Object = dict[str, Any]
ONE = Side("a", {"training.lora.rank": 8, "nodes": 2}, None, {"state": "Complete", "tokensPerSecond": 1000.0}, {10: 2.0, 20: 1.0}, {0: 3.0})
OTHER = Side(
    "b", {"training.lora.rank": 16, "nodes": 2}, None, {"state": "Failed", "tokensPerSecond": 1500.0}, {20: 1.5, 30: 0.5}, {0: 3.0}
)


def run_of(**training: Any) -> Object:
    found: Object = json.loads(run_text(make_run(training=training or None)))
    return found


def test_only_what_differs_of_the_configuration_is_shown_and_every_figure_is() -> None:
    found = compare(ONE, OTHER)
    assert found["configuration"] == [{"field": "training.lora.rank", "values": [8, 16]}]
    assert [row["name"] for row in found["results"]] == ["state", "tokensPerSecond"]


def test_losses_are_compared_at_the_steps_that_both_have() -> None:
    found = compare(ONE, OTHER)
    assert found["loss"] == [{"step": 20, "values": [1.0, 1.5]}] and found["evalLoss"] == [{"step": 0, "values": [3.0, 3.0]}]


def test_a_person_sees_both_and_the_change() -> None:
    lines = [line.split() for line in comparison_page(compare(ONE, OTHER))]
    for line in (
        ["training.lora.rank", "8", "16"],
        ["state", "Complete", "Failed"],
        ["tokensPerSecond", "1000", "1500", "+50.0%"],
        ["loss", "at", "step", "20", "1", "1.5", "+50.0%"],
        ["evalLoss", "at", "step", "0", "3", "3"],
    ):
        assert line in lines


def test_runs_that_were_told_the_same_or_have_no_step_in_common_say_so() -> None:
    text = "\n".join(comparison_page(compare(ONE, replace(ONE, name="c", steps={11: 1.0}, evaluations={}))))
    assert text.startswith("the same configuration: a and c") and text.endswith("no step was measured in both runs")


def test_of_a_long_curve_the_first_the_last_and_some_between_are_shown() -> None:
    steps = {step: 1 / step for step in range(1, 1000)}
    shown = [
        line for line in comparison_page(compare(replace(ONE, steps=steps), replace(OTHER, steps=steps))) if line.startswith("loss at")
    ]
    assert len(shown) == 10 and "step 1 " in shown[0] and "step 999 " in shown[-1]
    assert len(compare(replace(ONE, steps=steps), replace(OTHER, steps=steps))["loss"]) == 999


def test_names_addresses_and_files_of_a_run_make_no_difference() -> None:
    one = run_of(lora={"rank": 8})
    other = {**one, "job": {"name": "y"}, "addresses": ["b"], "runDir": "/other", "coordinatorPort": 1, "keyFile": "k"}
    assert settings_of(one) == settings_of(other) == {"nodes": 2, "ranksPerNode": 1, "gpusPerNode": 0, "training.lora.rank": 8}


def test_of_a_script_its_command_counts() -> None:
    assert settings_of(run_of())["command"] == ["python3", "rank.py"]


def test_the_rest_of_the_spec_counts_where_both_have_one_and_shows_no_secret() -> None:
    spec = spec_of(
        {"nodes": 2, "training": {}, "restart": {"maxRestarts": 1}, "env": [{"name": "HF_TOKEN", "value": "hf_abcdefghijklmnop1234"}]}
    )
    assert spec["restart.maxRestarts"] == 1 and "nodes" not in spec and "hf_abcdef" not in str(spec)
    other = {**spec, "restart.maxRestarts": 5}
    fields = [row["field"] for row in compare(replace(ONE, spec=spec), replace(ONE, spec=other))["configuration"]]
    assert fields == ["restart.maxRestarts"]
    assert compare(replace(ONE, spec=spec), ONE)["configuration"] == []


def test_figures_come_from_the_folder_and_the_status() -> None:
    summary = {
        "steps": {"1": {"loss": 3.0}, "2": {"loss": 1.0}, "3": {"loss": 2.0}},
        "evaluations": {"3": {"evalLoss": 2.5}},
        "medians": {"tokensPerSecond": 10.0, "mfu": None},
    }
    status = {
        "conditions": [{"type": "Complete", "status": "True"}],
        "restarts": 0,
        "goodput": {"percentage": 90},
        "result": {"evalLossBefore": "4.0"},
    }
    assert results_of(summary, status) == {
        "state": "Complete", "steps": 3, "lastLoss": 2.0, "leastLoss": 1.0, "evalLossBefore": "4.0", "evalLossAfter": 2.5,
        "tokensPerSecond": 10.0, "goodputPercentage": 90, "restarts": 0,
    }  # fmt: skip
    assert results_of({}, {"trainer": {"step": 7}}) == {"steps": 7}


def folder(root: Path, rank: int) -> Path:
    """Of a run that has ended, as an agent and a trainer leave it."""
    Journal(replace(make_run(training={"lora": {"rank": rank}}), run_dir=str(root)), 0, lambda line: None).close(5)
    (root / "logs/train_log.jsonl").write_text("".join(json.dumps({"step": step, "loss": step / rank}) + "\n" for step in (1, 2, 3)))
    (root / "gang").mkdir()
    (root / "gang/end.json").write_text('{"jobUid": "u", "state": "Complete"}')
    (root / "gang/attempts.jsonl").write_text('{"attempt": 1, "jobUid": "u", "restarts": 0}\n')
    (root / "gang/goodput.json").write_text(
        '{"jobUid": "u", "goodput": {"spent": {"train": 75, "load": 25, "queued": 500}, "furthestStep": 3}}'
    )
    return root


def test_two_folders_are_compared_without_any_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", "/nonexistent")
    one, other = folder(tmp_path / "one", 8), folder(tmp_path / "other", 16)
    done = CliRunner().invoke(app, ["diff-runs", str(one), str(other), "-o", "json"])
    found = json.loads(done.output)
    assert found["configuration"] == [{"field": "training.lora.rank", "values": [8, 16]}]
    assert found["loss"][-1] == {"step": 3, "values": [3 / 8, 3 / 16]}
    assert {"name": "goodputPercentage", "values": [75, 75]} in found["results"]


def test_a_job_file_is_compared_by_what_it_would_be_told(tmp_path: Path) -> None:
    for name, rank in (("a.yaml", 8), ("b.yaml", 4)):
        (tmp_path / name).write_text(JOB + f"    lora: {{rank: {rank}}}\n  gpusPerNode: 0\n")
    done = CliRunner().invoke(app, ["diff-runs", str(tmp_path / "a.yaml"), str(tmp_path / "b.yaml"), "-o", "json"])
    assert [row["values"] for row in json.loads(done.output)["configuration"] if row["field"] == "training.lora.rank"] == [[8, 4]], (
        done.exception
    )


def test_a_job_is_compared_by_its_frozen_run_and_its_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def summary(job: object) -> Object:
        return {"run": {}, "steps": {"3": {"loss": 9.0}}}

    async def frozen_run(*_: object) -> Object:
        return run_of(lora={"rank": 2})

    job = {"metadata": {"name": "x"}, "spec": {}, "status": {"restarts": 4}}
    target: Any = SimpleNamespace(client=SimpleNamespace(run=lambda work: asyncio.run(work(None))))
    monkeypatch.setattr(diff_runs, "_summary", summary)
    monkeypatch.setattr("lockstep.platforms.jobs.runs.frozen_run", frozen_run)
    monkeypatch.setattr(diff_runs, "find_cluster_job", lambda *_: ClusterJob(target, job))
    done = CliRunner().invoke(app, ["diff-runs", "x", str(folder(tmp_path, 8)), "-o", "json"])
    found = json.loads(done.output)
    assert found["configuration"] == [{"field": "training.lora.rank", "values": [2, 8]}]
    assert {"name": "restarts", "values": [4, 0]} in found["results"] and found["loss"][0]["values"] == [9.0, 3 / 8]


@pytest.mark.parametrize(("given", "words"), [("no/such/folder", "there is no folder no/such/folder"), (".", "is not a run's folder")])
def test_what_is_no_run_is_told(given: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert words in str(CliRunner().invoke(app, ["diff-runs", given, given]).exception)


def test_a_long_value_is_shown_by_its_first_forty_characters() -> None:
    sides = [replace(side, settings={"command": letter * 200}) for side, letter in ((ONE, "a"), (OTHER, "b"))]
    page = "\n".join(comparison_page(compare(*sides)))
    assert f"{'a' * 39}…" in page and "a" * 40 not in page and f"{'b' * 39}…" in page
