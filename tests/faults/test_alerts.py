"""Prometheus' own promtool runs every alert rule over series as replicas of the operator show them: a sample each 30 seconds."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from faults.prometheus import promtool
from lockstep.platforms.clusters.install import kustomized
from support.checkout import ROOT

INTERVAL = "30s"
GROUPS = next(item for item in kustomized(ROOT / "manifests" / "monitoring") if item["kind"] == "PrometheusRule")["spec"]["groups"]
RULES: dict[str, dict[str, Any]] = {rule["alert"]: rule for group in GROUPS for rule in group["rules"]}


def series(name: str, replica: str = "a", **labels: str) -> str:
    pairs = ",".join(f'{label}="{value}"' for label, value in {"instance": replica, **labels}.items())
    return f"lockstep_{name}{{{pairs}}}"


def job(gauge: str, replica: str = "a") -> str:
    return series(f"job_{gauge}", replica, job_namespace="ns", job_name="x")


def finished(outcome: str, replica: str = "a") -> str:
    return series("jobs_finished_total", replica, job_namespace="ns", training_cluster="c", outcome=outcome)


def failed_now(replica: str = "a") -> str:
    return series("jobs", replica, job_namespace="ns", training_cluster="c", state="Failed")


def restarts(cause: str, replica: str = "a") -> str:
    return series("restarts_total", replica, job_namespace="ns", training_cluster="c", cause=cause)


def requests(code: str, replica: str = "a") -> str:
    return series("api_requests_total", replica, verb="GET", resource="pods", code=code)


IN_NAMESPACE = {"job_namespace": "ns"}
OF_JOB = {"job_namespace": "ns", "job_name": "x"}
EXPECTED: dict[str, tuple[dict[str, str], str]] = {
    "LockstepJobFailed": (IN_NAMESPACE, "A TrainingJob in ns has failed"),
    "LockstepJobNoProgress": (OF_JOB, "ns/x runs and has made no step for 20 minutes"),
    "LockstepJobHung": (IN_NAMESPACE, "A job in ns hung and was restarted"),
    "LockstepRestartLoop": (OF_JOB, "ns/x was restarted 3 times in an hour"),
    "LockstepCheckpointTooOld": (OF_JOB, "The newest checkpoint of ns/x is 6h 11m 0s old"),
    "LockstepFabricDegraded": (OF_JOB, "ns/x does not use the network that it asked for"),
    "LockstepRecordUnwritten": (OF_JOB, "ns/x waits for its volume: the job's record can't be written"),
    "LockstepStraggling": (OF_JOB, "ns/x waits for one slow rank"),
    "LockstepPreflightFailed": (OF_JOB, "ns/x does not start: preflight found an error"),
    "LockstepJobSilent": (OF_JOB, "Nothing was heard from ns/x for five minutes"),
    "LockstepNodeClockOff": (OF_JOB, "2 nodes of ns/x have a clock that is off"),
    "LockstepOperatorDown": ({}, "Lockstep's operator can't be scraped"),
    "LockstepNoLeader": ({}, "No replica of Lockstep's operator leads"),
    "LockstepReconcileErrors": ({"resource": "pods"}, "The API server refuses or does not answer the operator (pods)"),
    "LockstepOperatorClockOff": (
        {"instance": "a"},
        "The clock of Lockstep's operator is -45s ahead of the API server's (negative: behind)",
    ),
}
"""Labels, but for the severity, and the summary of each alert."""


@dataclass(frozen=True)
class Case:
    alert: str
    what: str
    series: Mapping[str, str]
    """Values in promtool's notation: `1x3` is four times 1, `0+2x3` is 0 2 4 6, `_` no sample, and `stale` the end of a series."""
    fires: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()


FAILED, STUCK, LOOP, OLD = "LockstepJobFailed", "LockstepJobNoProgress", "LockstepRestartLoop", "LockstepCheckpointTooOld"
CASES = (
    Case(FAILED, "the first failure of a namespace", {finished("Failed"): "0 1x60", failed_now(): "1x60"}, fires=("1m", "14m"),
        silent=("17m",)),
    Case(FAILED, "an older failed job expires", {finished("Failed"): "3x20 4x60", failed_now(): "3x80"}, fires=("11m", "25m"),
        silent=("10m", "27m")),
    Case(
        FAILED, "a failure while the leader changes", {
            finished("Failed"): "3x20 stale", failed_now(): "3x20 stale", finished("Failed", "b"): "_x22 0 1x60",
                failed_now("b"): "_x22 4x60",
        }, fires=("12m", "26m"), silent=("11m", "28m"),
    ),
    Case(
        FAILED, "a failure that the leader before showed in no scrape", {
            finished("Failed"): "3x40 stale", failed_now(): "3x40 stale", finished("Failed", "b"): "_x42 0x80",
                failed_now("b"): "_x42 4x80",
        }, fires=("22m", "34m"), silent=("20m", "37m"),
    ),
    Case(
        FAILED, "nothing but a change of the leader", {
            finished("Failed"): "3x20 stale", failed_now(): "3x20 stale", finished("Failed", "b"): "_x22 0x60",
                failed_now("b"): "_x19 3x63",
        }, silent=("10m", "12m", "20m", "26m"),
    ),
    Case(FAILED, "the leader's process starts again", {finished("Failed"): "3x20 0x60", failed_now(): "3x80"}, silent=("11m", "20m")),
    Case(FAILED, "a job completes", {finished("Complete"): "0 1x60", finished("Failed"): "0x60"}, silent=("1m", "10m")),
    Case(STUCK, "no step any more", {job("step"): "0+1x20 20x100", job("running"): "1x120"}, fires=("31m", "50m"), silent=("11m", "29m")),
    Case(STUCK, "no step after the first report", {job("step"): "5x100", job("running"): "1x100"}, fires=("21m",), silent=("1m", "19m")),
    Case(
        STUCK, "no step, and the leader changes", {
            job("step"): "0+1x20 20x19 stale", job("running"): "1x40 stale", job("step", "b"): "_x43 20x60",
                job("running", "b"): "_x43 1x60",
        }, fires=("31m",), silent=("29m",),
    ),
    Case(
        STUCK, "the leader changed twenty minutes ago", {
            job("step"): "20x20 stale", job("running"): "1x20 stale", job("step", "b"): "_x23 20x60", job("running", "b"): "_x23 1x60",
        }, fires=("30m", "30m30s", "31m", "31m30s"), silent=("19m",),
    ),
    Case(STUCK, "the job ends", {job("step"): "0+1x60 60x4 stale", job("running"): "1x64 stale"}, silent=("32m", "33m", "50m", "52m")),
    Case(STUCK, "a step takes a quarter of an hour", {job("step"): "1x29 2x29 3x29 4x29", job("running"): "1x120"},
        silent=("25m", "40m", "55m")),
    Case(STUCK, "a script reports its first step after half an hour", {job("step"): "_x60 1x60", job("running"): "1x120"},
        silent=("31m", "49m")),
    Case(STUCK, "a restart within these minutes", {job("step"): "20x120", job("running"): "1x50 0x4 1x70"}, fires=("24m", "49m"),
        silent=("30m", "46m")),
    Case("LockstepJobHung", "a hang", {restarts("Hang"): "0x10 1x80"}, fires=("6m", "35m"), silent=("5m", "37m")),
    Case("LockstepJobHung", "another cause", {restarts("Hang"): "0x40", restarts("UserCode"): "0x10 1x40"}, silent=("6m", "15m")),
    Case("LockstepJobHung", "the leader changes", {restarts("Hang"): "2x20 stale", restarts("Hang", "b"): "_x22 0x40"},
        silent=("12m", "20m")),
    Case(LOOP, "the third restart", {job("restarts"): "0x10 1x20 2x20 3x60"}, fires=("27m",), silent=("26m",)),
    Case(
        LOOP, "three restarts, and the leader changes", {job("restarts"): "0x10 1x20 2x10 stale", job("restarts", "b"): "_x45 3x60"},
        fires=("23m", "40m"), silent=("21m",),
    ),
    Case(LOOP, "two restarts", {job("restarts"): "1x10 2x20 3x120"}, silent=("16m", "40m", "65m")),
    Case(LOOP, "three in an hour and a half", {job("restarts"): "0x60 1x60 2x60 3x60"}, silent=("62m", "92m", "110m")),
    Case(LOOP, "the leader changes after three", {job("restarts"): "3x20 stale", job("restarts", "b"): "_x22 3x60"}, silent=("12m", "30m")),
    Case(LOOP, "a retry counts anew", {job("restarts"): "4x20 0x60"}, silent=("11m", "30m")),
    Case(OLD, "no commit for six hours", {job("checkpoint_age_seconds"): "0+30x760", job("running"): "1x760"}, fires=("6h11m",),
        silent=("6h10m",)),
    Case(OLD, "a commit each five hours", {job("checkpoint_age_seconds"): "0+30x600 0+30x600", job("running"): "1x1200"},
        silent=("5h", "9h")),
    Case(OLD, "a job that was suspended goes on", {job("checkpoint_age_seconds"): "9000+30x900", job("running"): "0x800 1x100"},
        silent=("7h", "7h25m")),
    Case(OLD, "a job that is suspended", {job("checkpoint_age_seconds"): "9000+30x900", job("running"): "1x99 0x800"},
        silent=("6h30m", "7h")),
    Case("LockstepFabricDegraded", "another network", {job("fabric_verified"): "1x10 0x20"}, fires=("8m",), silent=("7m",)),
    Case("LockstepFabricDegraded", "for a minute", {job("fabric_verified"): "1x10 0x2 1x20"}, silent=("6m", "8m", "15m")),
    Case("LockstepFabricDegraded", "for a minute, and the job ends", {job("fabric_verified"): "1x10 0x2 stale"}, silent=("6m", "8m")),
    Case("LockstepRecordUnwritten", "a full volume", {job("record_unwritten"): "0x10 1x20 0x20"}, fires=("7m",), silent=("5m30s", "17m")),
    Case("LockstepRecordUnwritten", "a volume that is back soon", {job("record_unwritten"): "0x10 1x1 0x40"},
        silent=("5m30s", "7m", "17m")),
    Case("LockstepStraggling", "a slow rank", {job("straggling"): "0x10 1x60"}, fires=("21m",), silent=("20m",)),
    Case("LockstepStraggling", "for ten minutes", {job("straggling"): "0x10 1x20 0x60"}, silent=("15m", "21m", "30m")),
    Case("LockstepPreflightFailed", "an error", {job("preflight_ok"): "1x4 0x20"}, fires=("4m",), silent=("3m",)),
    Case("LockstepPreflightFailed", "no error", {job("preflight_ok"): "1x40"}, silent=("5m", "15m")),
    Case("LockstepJobSilent", "no report", {job("report_age_seconds"): "0+30x30"}, fires=("6m",), silent=("5m",)),
    Case(
        "LockstepJobSilent", "no report, and the leader changes",
        {job("report_age_seconds"): "0+30x15 stale", job("report_age_seconds", "b"): "_x19 570+30x40"}, fires=("7m", "10m"), silent=("5m",),
    ),
    Case("LockstepJobSilent", "a report each 15 seconds", {job("report_age_seconds"): "14x40"}, silent=("6m", "15m")),
    Case("LockstepNodeClockOff", "two clocks", {job("preflight_clocks_off"): "0x4 2x30"}, fires=("8m",), silent=("7m",)),
    Case("LockstepNodeClockOff", "no clock", {job("preflight_clocks_off"): "0x30"}, silent=("8m",)),
    Case("LockstepOperatorDown", "both replicas", {series("operator_leader"): "1x10 stale", series("operator_leader", "b"): "0x10 stale"},
        fires=("11m",), silent=("10m",)),
    Case("LockstepOperatorDown", "one replica", {series("operator_leader"): "1x10 stale", series("operator_leader", "b"): "0x12 1x30"},
        silent=("11m", "20m")),
    Case("LockstepNoLeader", "two followers", {series("operator_leader"): "1x10 0x30", series("operator_leader", "b"): "0x40"},
        fires=("8m",), silent=("7m",)),
    Case("LockstepNoLeader", "the leader changes", {series("operator_leader"): "1x10 0x30", series("operator_leader", "b"): "0x12 1x30"},
        silent=("8m", "15m")),
    Case("LockstepReconcileErrors", "errors of both replicas", {requests("503"): "0+2x60", requests("0", "b"): "0+2x60"}, fires=("15m",),
        silent=("12m",)),
    Case("LockstepReconcileErrors", "a few errors among many requests", {requests("503"): "0+2x60", requests("200"): "0+90x60"},
        silent=("11m", "25m")),
    Case("LockstepOperatorClockOff", "one replica's",
        {series("clock_offset_seconds"): "0x4 -45x30", series("clock_offset_seconds", "b"): "0x35"}, fires=("8m",), silent=("7m",)),
    Case("LockstepOperatorClockOff", "for a minute", {series("clock_offset_seconds"): "0x4 45x2 0x30"}, silent=("3m", "8m", "15m")),
)  # fmt: skip


def test_prometheus_takes_all_rules(tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text(json.dumps({"groups": GROUPS}))
    assert f"SUCCESS: {len(RULES)} rules found" in promtool("check", "rules", "rules.yaml", folder=tmp_path)


def test_every_rule_has_a_case_in_which_it_fires_and_one_in_which_it_never_does() -> None:
    assert (
        {case.alert for case in CASES if case.fires} == {case.alert for case in CASES if not case.fires} == RULES.keys() == EXPECTED.keys()
    )


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Run one promtool over a file of each case, with its rule alone, and return what it says of each file."""
    folder = tmp_path_factory.mktemp("alerts")
    for alert, rule in RULES.items():
        (folder / f"{alert}.yaml").write_text(json.dumps({"groups": [{"name": "one", "rules": [rule]}]}))
    names = [f"case-{number}.yaml" for number in range(len(CASES))]
    for name, case in zip(names, CASES, strict=True):
        checks = [{"eval_time": time, "alertname": case.alert, "exp_alerts": []} for time in case.silent]
        checks += [{"eval_time": time, "alertname": case.alert, "exp_alerts": [expected(case.alert)]} for time in case.fires]
        given = [{"series": name, "values": values} for name, values in case.series.items()]
        tests = [{"interval": INTERVAL, "input_series": given, "alert_rule_test": checks}]
        (folder / name).write_text(json.dumps({"rule_files": [f"{case.alert}.yaml"], "evaluation_interval": INTERVAL, "tests": tests}))
    parts = re.split(r"(?m)^Unit Testing:  (\S+)$", promtool("test", "rules", *names, folder=folder, check=False))
    return dict(zip(parts[1::2], map(str.strip, parts[2::2]), strict=True))


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: f"{CASES[number].alert}: {CASES[number].what}")
def test_a_rule_fires_when_its_sentence_is_true_and_only_then(number: int, reports: dict[str, str]) -> None:
    assert reports[f"case-{number}.yaml"] == "SUCCESS"


def expected(alert: str) -> dict[str, Any]:
    labels, summary = EXPECTED[alert]
    description = str(RULES[alert]["annotations"]["description"])
    for name, value in labels.items():
        description = description.replace(f"{{{{ $labels.{name} }}}}", value)
    return {
        "exp_labels": labels | RULES[alert]["labels"], "exp_annotations": {"summary": summary, "description": description},
    }  # fmt: skip
