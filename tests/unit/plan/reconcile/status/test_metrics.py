"""What the operator's metrics say, who may read them, and that nothing is counted twice or lost over a change of the leader."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from base64 import b64encode
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from lockstep.api.objects import Object
from lockstep.kube.cluster import ApiError
from lockstep.plan.observed import Observed
from lockstep.plan.reconcile.measures import FINISHED, GOODPUT, LOST_GPU, RESTARTS, STATES, Counted, Growth, counted, gauges, growth, state
from lockstep.platforms.operator import metrics as module
from lockstep.platforms.operator.metrics import Jobs, Metrics, MetricsServer
from unit.plan.reconcile.test_reconcile import NOW, fresh

MEASURED = {
    "saveSeconds": "1.5",
    "loss": "2.2500",
    "tokensPerSecond": "41250",
    "mfu": "0.2790",
    "peakMemoryBytes": "97000000000",
    "other": "4",
}
RESTART = {"attempt": 1, "cause": "Hang", "message": "m", "lostSteps": 1}


def status(train: int = 0, gpu: int = 0, end: str = "", restarts: list[Object] | None = None, **fields: Any) -> Object:
    goodput: Object = {
        "percentage": 50,
        "trainSeconds": train,
        "losses": [{"cause": "Hang", "seconds": gpu // 8, "gpuSeconds": gpu}] if gpu else [],
    }
    conditions = [{"type": end, "status": "True", "reason": end}] if end else []
    return {"goodput": goodput, "conditions": conditions, "restartHistory": restarts or [], "cluster": {"name": "p"}, **fields}


def job(name: str = "x", found: Object | None = None, uid: str = "u") -> Observed:
    observed = fresh()
    metadata = {**observed.job["metadata"], "name": name, "uid": uid, "creationTimestamp": f"2027-01-01T00:00:{len(name):02}Z"}
    return replace(observed, job={**observed.job, "metadata": metadata, "status": found or status()})


def scraped() -> Metrics:
    """Metrics of an operator whose counters of the job's namespace Prometheus has seen at 0."""
    metrics = Metrics()
    metrics.count(job(found={}), {})
    metrics.count(job(uid="before"), status())
    metrics.scraped()
    return metrics


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    found = metrics.registry.get_sample_value(name, {"job_namespace": "ns", "training_cluster": "p", **labels})
    return None if found is None else float(found)


def test_time_of_which_nobody_knows_what_it_was_is_counted_once_it_stays_so() -> None:
    book = {"goodput": {"unknownSeconds": 70, "loadSeconds": 0}}
    known, more = growth(counted({}), book)
    assert more == ()
    known, more = growth(known, {"goodput": {"unknownSeconds": 0, "loadSeconds": 75}})
    assert [(item.counter, item.label, item.amount) for item in more] == [("goodput", "load", 75)]
    ended = {**book, "conditions": [{"type": "Complete", "status": "True"}]}
    assert ("goodput", "unknown", 70) in [(item.counter, item.label, item.amount) for item in growth(counted({}), ended)[1]]


def test_growth_is_what_is_new_since_it_was_counted() -> None:
    known = counted(status(train=10, gpu=80))
    known, more = growth(known, status(train=25, gpu=160, restarts=[RESTART], end="Failed"))
    assert set(more) == {
        Growth(GOODPUT, "train", 15),
        Growth("lost", "Hang", 10),
        Growth(LOST_GPU, "Hang", 80),
        Growth(RESTARTS, "Hang", 1),
        Growth(FINISHED, "Failed", 1),
    }
    assert growth(known, status(train=25, gpu=160, restarts=[RESTART], end="Failed")) == (known, ())


def test_a_total_that_went_back_is_counted_only_once_it_is_beyond() -> None:
    known, more = growth(counted(status(train=10)), status(train=8))
    assert more == ()
    assert growth(known, status(train=13))[1] == (Growth(GOODPUT, "train", 3),)


def test_a_second_end_after_a_retry_is_another_end() -> None:
    known, first = growth(Counted(), status(end="Failed"))
    known, going = growth(known, status(retry=1))
    known, second = growth(known, status(end="Failed", retry=1))
    assert ([more.counter for more in first], going, [more.counter for more in second]) == ([FINISHED], (), [FINISHED])


def test_nothing_is_lost_or_counted_twice_when_another_replica_takes_over() -> None:
    first, second = scraped(), Metrics()
    for train in (10, 40, 40):
        first.count(job(), status(train=train))
    second.count(job(), status(train=40))  # what is stored when it takes over
    second.count(job(), status(train=55, restarts=[RESTART]))
    second.scraped()
    second.count(job(), status(train=55, restarts=[RESTART]))
    name, labels = "lockstep_goodput_seconds_total", {"kind": "train"}
    assert (value(first, name, **labels), value(second, name, **labels)) == (40, 15)
    assert (value(first, "lockstep_restarts_total", cause="Hang"), value(second, "lockstep_restarts_total", cause="Hang")) == (0, 1)


def test_the_first_scrape_shows_zeros_so_that_a_failure_before_it_is_an_increase_too() -> None:
    metrics = Metrics()
    metrics.count(job(), status())
    metrics.count(job(), status(end="Failed", restarts=[{**RESTART, "cause": "OutOfMemory"}]))
    shown = []
    for _ in range(3):
        shown.append(
            (
                value(metrics, "lockstep_restarts_total", cause="OutOfMemory"),
                value(metrics, "lockstep_jobs_finished_total", outcome="Failed"),
            )
        )
        metrics.scraped()
    assert shown == [(0, 0), (1, 1), (1, 1)]


def test_a_deleted_job_takes_nothing_back() -> None:
    metrics = scraped()
    metrics.count(job(), status(train=30))
    metrics.forget(set())
    assert value(metrics, "lockstep_goodput_seconds_total", kind="train") == 30


def in_bytes(work: Callable[[], None]) -> int:
    """How much more is held after the work."""
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        work()
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("field", "jobs"), [("cluster", 1000), ("namespace", 200)])
def test_names_that_people_make_up_take_no_memory_and_make_no_series(monkeypatch: pytest.MonkeyPatch, field: str, jobs: int) -> None:
    """Jobs made and deleted again, with a fifth of the groups: each of a cluster that doesn't exist, or each in a namespace of its own."""
    monkeypatch.setattr(module, "IDLE_GROUPS", module.IDLE_GROUPS // 5)
    metrics, observed = Metrics(), replace(fresh(), job={**fresh().job, "status": {}})
    generate_latest(metrics.registry)

    def cycles() -> None:
        for number in range(jobs):
            metadata = {**observed.job["metadata"], "uid": f"u{number}"} | ({"namespace": f"n{number}"} if field == "namespace" else {})
            spec = {**observed.job["spec"]} | ({"cluster": f"p{number}"} if field == "cluster" else {})
            made = replace(observed, job={**observed.job, "metadata": metadata, "spec": spec})
            metrics.count(made, made.status)
            metrics.forget(set())

    assert in_bytes(cycles) <= 1 << 20
    assert len(generate_latest(metrics.registry).splitlines()) < 100 * (10 + 1)


def test_counters_of_a_namespace_go_an_hour_after_its_last_job(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    metrics = Metrics()
    metrics.count(job(), status(train=30))
    now[0] += 3600.0 + 1
    metrics.forget({"u"})
    assert value(metrics, "lockstep_goodput_seconds_total", kind="train") == 0
    metrics.forget(set())
    assert value(metrics, "lockstep_goodput_seconds_total", kind="train") is None


def test_a_job_that_waits_for_a_profile_that_does_not_exist_has_no_profile_s_label() -> None:
    waits = {"metadata": {"namespace": "ns", "name": "x", "uid": "u"}, "spec": {"cluster": "made-up"}}
    registry = CollectorRegistry()
    registry.register(Jobs(lambda: True, lambda: [waits], lambda uid: None, lambda: 0))
    assert b"made-up" not in generate_latest(registry)


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        ({}, "Waiting"),
        ({"Progressing": ("True", "Running")}, "Running"),
        ({"Progressing": ("False", "Unschedulable")}, "Waiting"),
        ({"Progressing": ("Unknown", "NoReport")}, "Silent"),
        ({"Progressing": ("True", "Resizing")}, "Stopping"),
        ({"Progressing": ("False", "Suspended"), "Suspended": ("True", "Suspended")}, "Suspended"),
        ({"Progressing": ("False", "Failed"), "Failed": ("True", "RanksFailed")}, "Failed"),
    ],
)
def test_a_job_is_in_exactly_one_state(conditions: dict[str, tuple[str, str]], expected: str) -> None:
    found = {"conditions": [{"type": kind, "status": s, "reason": r} for kind, (s, r) in conditions.items()]}
    assert state(found) == expected
    assert expected in STATES


def shown(jobs: list[Observed], *, leads: bool = True, heard: float | None = None) -> dict[str, list[tuple[dict[str, str], float]]]:
    collector = Jobs(lambda: leads, lambda: [each.job for each in jobs], lambda uid: heard, lambda: 3)
    return {family.name: [(sample.labels, sample.value) for sample in family.samples] for family in collector.collect()}


def test_a_running_job_has_series_of_its_own_and_a_finished_one_none() -> None:
    found = status(
        trainer={"step": 7, "totalSteps": 70, "metrics": [{"name": name, "value": text} for name, text in MEASURED.items()]},
        checkpoint={"lastCommittedStep": 5, "lastCommitTime": "2020-01-01T00:00:00Z"}, preflight={"ok": True},
    )  # fmt: skip
    found["conditions"] = [
        {"type": "Progressing", "status": "True", "reason": "Running"},
        {"type": "FabricVerified", "status": "False", "reason": "Degraded"},
    ]
    series = shown([job("a", found), job("b", status(end="Complete"))])
    labels = {"job_namespace": "ns", "job_name": "a"}
    expected = {
        "running": 1,
        "step": 7,
        "total_steps": 70,
        "checkpoint_step": 5,
        "checkpoint_commit_seconds": 1.5,
        "loss": 2.25,
        "tokens_per_second": 41250,
        "mfu": 0.279,
        "peak_memory_bytes": 97e9,
        "fabric_verified": 0,
        "preflight_ok": 1,
    }
    for name, number in expected.items():
        assert series[f"lockstep_job_{name}"] == [(labels, number)], name
    assert series["lockstep_job_checkpoint_age_seconds"][0][1] > 1e8
    assert series["lockstep_job_straggling"] == []
    by_state = {sample[0]["state"]: sample[1] for sample in series["lockstep_jobs"]}
    assert by_state == dict.fromkeys(STATES, 0) | {"Running": 1, "Complete": 1}


def test_the_oldest_jobs_have_series_and_the_others_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "JOBS_WITH_SERIES", 2)
    series = shown([job("aaa"), job("a"), job("aa")])
    assert [labels["job_name"] for labels, _ in series["lockstep_job_running"]] == ["a", "aa"]
    assert series["lockstep_jobs_without_series"] == [({}, 1)]


def test_a_follower_shows_that_it_follows_and_no_job() -> None:
    series = shown([job("a")], leads=False)
    assert series["lockstep_operator_leader"] == [({}, 0)]
    assert (series["lockstep_jobs"], series["lockstep_job_running"]) == ([], [])


def test_requests_are_counted_by_resource_whatever_their_names() -> None:
    metrics = Metrics()
    for path in ("/api/v1/namespaces/ns/pods?limit=5", "/apis/lockstep.dev/v1alpha1/namespaces/ns/trainingjobs/x/status", "/version"):
        metrics.requested("GET", path, 200)
    for resource in ("pods", "trainingjobs", "other"):
        assert metrics.registry.get_sample_value("lockstep_api_requests_total", {"verb": "GET", "resource": resource, "code": "200"}) == 1


class Reviewer:
    """An API server that knows one token of an account that may, and one of another."""

    async def request(self, method: str, path: str, body: Any) -> Object:
        if body["spec"].get("token") == "away":
            raise ApiError(500, "InternalError", "away")
        if path.endswith("tokenreviews"):
            name = {"reader": "reader", "other": "other"}.get(body["spec"]["token"])
            return {"status": {"authenticated": name is not None, "user": {"username": name, "groups": ["g"]}}}
        assert body["spec"]["nonResourceAttributes"] == {"path": "/metrics", "verb": "get"}
        return {"status": {"allowed": body["spec"]["user"] == "reader"}}


def scrape(*headers: dict[str, str]) -> tuple[list[int], list[str]]:
    async def run() -> tuple[list[int], list[str]]:
        metrics = Metrics()
        metrics.count(job(), status())
        metrics.count(job(), status(end="Failed"))
        server = MetricsServer(Reviewer(), metrics)  # type: ignore[arg-type]
        codes, texts = list[int](), list[str]()
        async with TestClient(TestServer(server.application())) as client:
            for each in headers:
                async with client.get("/metrics", headers=each) as reply:
                    codes.append(reply.status)
                    texts.append(await reply.text())
        return codes, texts

    return asyncio.run(run())


def test_only_who_may_get_metrics_sees_them() -> None:
    tokens = ("reader", "other", "nobody", "away")
    basic = {"Authorization": "Basic " + b64encode(b"a:b").decode()}
    codes, texts = scrape({}, basic, *({"Authorization": f"Bearer {token}"} for token in tokens))
    assert codes == [401, 401, 200, 403, 401, 503]
    assert "lockstep_jobs_finished" in [family.name for family in text_string_to_metric_families(texts[2])]
    assert not any("lockstep_" in text for text in (*texts[:2], *texts[3:]))


def test_a_scrape_lets_what_happened_before_it_be_counted() -> None:
    reader = {"Authorization": "Bearer reader"}
    _, (refused, first, second) = scrape({}, reader, {**reader, "Accept": "application/openmetrics-text; version=1.0.0"})
    line = 'lockstep_jobs_finished_total{{job_namespace="ns",outcome="Failed",training_cluster="p"}} {}.0'
    assert (line.format(0) in first, line.format(1) in second) == (True, True), refused


def told(progress: str, ranks: str = "AllRanksReady") -> Object:
    fabric = {"type": "FabricVerified", "status": "False", "reason": "Degraded"}
    reasons = {"Progressing": progress, "RanksReady": ranks}
    return {"conditions": [fabric, *({"type": kind, "status": "True", "reason": reason} for kind, reason in reasons.items())]}


@pytest.mark.parametrize("found", [told("Running"), told("Restarting"), told("NoReport"), told("Starting", "WaitingForRanks")])
def test_a_job_with_pods_shows_how_long_it_was_silent_and_whether_its_network_is_the_one_asked_for(found: Object) -> None:
    assert gauges(found, NOW, 400.0).items() >= {"report_age_seconds": 400, "fabric_verified": 0}.items()


@pytest.mark.parametrize(
    "found",
    [told("Suspended"), told("Unschedulable"), told("Stopping"), told("Starting", "Starting"), told("Starting", "WaitingForReport")],
)
def test_what_the_pods_of_an_earlier_start_said_raises_no_alarm(found: Object) -> None:
    assert not gauges(found, NOW, 400.0).keys() & {"report_age_seconds", "fabric_verified"}


@pytest.mark.parametrize(("checks", "off"), [([], 0), (["clock", "gpus", "clock"], 2)])
def test_nodes_whose_clock_a_preflight_found_off_are_counted(checks: list[str], off: int) -> None:
    found = {"preflight": {"ok": True, "findings": [{"check": check} for check in checks]}}
    assert gauges(found, NOW, None)["preflight_clocks_off"] == off
    assert "preflight_clocks_off" not in gauges({}, NOW, None)


def test_an_age_is_never_negative() -> None:
    assert shown([job("a", told("Running"))], heard=NOW * 10)["lockstep_job_report_age_seconds"][0][1] == 0


def test_causes_that_a_pod_makes_up_get_no_series() -> None:
    metrics = Metrics()
    metrics.count(job(), status())
    for number in range(100):
        loss = {"cause": f"made-up-{number}", "seconds": number + 1, "gpuSeconds": number + 1}
        found = status(restarts=[{**RESTART, "attempt": number + 1, "cause": loss["cause"]}])
        metrics.count(job(), {**found, "goodput": {"percentage": 1, "losses": [loss]}})
    assert b"made-up" not in generate_latest(metrics.registry)


def test_500_jobs_have_series_of_their_own() -> None:
    series = shown([job(f"x-{number}") for number in range(503)])
    assert (len(series["lockstep_job_running"]), series["lockstep_jobs_without_series"]) == (500, [({}, 3)])


def test_counters_of_50_namespaces_without_a_job_stay() -> None:
    metrics = Metrics()
    for number in range(60):
        one = job()
        metrics.count(replace(one, job={**one.job, "metadata": {**one.job["metadata"], "namespace": f"n{number}"}}), status(train=30))
        metrics.forget(set())
    families = metrics.registry.collect()
    found = {sample.labels["job_namespace"] for family in families for sample in family.samples if "job_namespace" in sample.labels}
    assert found == {f"n{number}" for number in range(10, 60)}
