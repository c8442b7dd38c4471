"""The operator's metrics, and `GET /metrics` over HTTPS. Nothing of a job's spec, no Secret and no text that a user wrote but names.

Labels are bounded: namespaces that have jobs, clusters that jobs use, kinds, causes and states; a job has series of its own only until it
ends, and only the first JOBS_WITH_SERIES of them. `job_namespace` and `job_name`, because Prometheus keeps `namespace` and `job` for what
it scrapes.

Names of jobs and namespaces are not for every pod's eyes: RBAC says who reads them, as for the cluster's own components. The scraper shows
its own token; the API server says whose it is (TokenReview) and whether that account may get the URL /metrics (SubjectAccessReview;
ClusterRole lockstep-metrics-reader).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from lockstep.api.objects import Object
from lockstep.kube.cluster import ApiError, Cluster
from lockstep.kube.kinds import KINDS as API_KINDS
from lockstep.kube.kinds import path_of
from lockstep.plan.observed import Observed
from lockstep.plan.reconcile.measures import (
    CAUSES,
    FINISHED,
    GOODPUT,
    KINDS,
    LOST,
    LOST_GPU,
    OUTCOMES,
    RESTARTS,
    STATES,
    Counted,
    counted,
    gauges,
    growth,
    profile_of,
    state,
)
from lockstep.platforms.operator.authenticate import FORBIDDEN, UNAUTHENTICATED, Refusal, bearer_token, token_reviewer

JOBS_WITH_SERIES = 500
IDLE_SECONDS = 3600.0
"""Seconds that counters of a namespace and cluster stay after their last job: long enough to be scraped, and for the next job to go on with
them.
"""
IDLE_GROUPS = 50
"""Most of those: namespaces come and go, too, and each has about fifty series."""
PREFIX = "lockstep"
_PLURALS = frozenset(kind.plural for kind in API_KINDS.values())
_JOB_LABELS = ("job_namespace", "job_name")
_GROUP_LABELS = ("job_namespace", "training_cluster")
JOB_GAUGES = {
    "running": "1 while all its ranks run.",
    "restarts": "Starts of all ranks after a failure.",
    "step": "The optimizer step reached.",
    "total_steps": "Optimizer steps of the whole run.",
    "estimated_remaining_seconds": "Time to the end at the present speed.",
    "loss": "Loss of the newest step.",
    "tokens_per_second": "Tokens per second of the newest step, all ranks together.",
    "mfu": "Model FLOPs utilization of the newest step, as a share of 1.",
    "peak_memory_bytes": "The most memory that any rank has held so far, of its GPU where it has one.",
    "checkpoint_age_seconds": "Since the newest commit.",
    "checkpoint_step": "Step of the newest commit.",
    "checkpoint_commit_seconds": "How long the last save took, beside the steps.",
    "goodput_percentage": "Training and evaluation, of the time with pods.",
    "fabric_verified": "1: the network is the one asked for, 0: it is not; absent while unknown.",
    "straggling": "1: a rank is slower than the others, which wait for it.",
    "record_unwritten": "1: the job's record can't be written, so nothing starts or ends.",
    "preflight_ok": "0: an error of the last preflight stopped the start.",
    "preflight_clocks_off": "Nodes whose clock the last preflight found away from node 0's.",
    "report_age_seconds": "Since the newest report of the job's coordinator.",
}
_COUNTERS = {
    GOODPUT: ("goodput_seconds", "Time of jobs by what it was spent on.", "kind", KINDS),
    LOST: ("lost_seconds", "Time down and of steps done again, by the failure's cause.", "cause", CAUSES),
    LOST_GPU: ("lost_gpu_seconds", "The same, times the job's GPUs.", "cause", CAUSES),
    RESTARTS: ("restarts", "Failed attempts, by cause.", "cause", CAUSES),
    FINISHED: ("jobs_finished", "Ends of jobs, by outcome.", "outcome", OUTCOMES),
}
"""Counters of `measures`: name, help, the label of its own and all its values, which begin at 0."""


class Metrics:
    """All that /metrics shows. One for a process; the jobs' part is the leader's only."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for every counter, which nobody reads
        self.registry = CollectorRegistry()
        self._known: dict[str, Counted] = {}
        self._group_of: dict[str, tuple[str, str]] = {}
        """Group of each job that is counted, by its uid."""
        self._seen: dict[tuple[str, str], float] = {}
        """Times at which a job of each group was last counted, the most recent at the end."""
        self._unseen: dict[tuple[str, str], dict[tuple[str, str], int]] = {}
        """Growth by counter and label, of groups that no scrape has shown yet: Prometheus sees an increase only where it has seen the 0
        before it.
        """
        self._counters = {
            key: Counter(f"{PREFIX}_{name}", text, (*_GROUP_LABELS, label), registry=self.registry)
            for key, (name, text, label, _) in _COUNTERS.items()
        }
        self._requests = Counter(
            f"{PREFIX}_api_requests", "Requests to the API server, watches aside.", ("verb", "resource", "code"), registry=self.registry
        )
        buckets = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1, 5, 30)
        self._reconciles = Histogram(
            f"{PREFIX}_reconcile_seconds", "One look at one job, writes included.", buckets=buckets, registry=self.registry
        )
        self.clock_off: Callable[[], float] = lambda: 0.0
        off = Gauge(
            f"{PREFIX}_clock_offset_seconds",
            "How far the operator's clock is ahead of the API server's; 0 while they agree.",
            registry=self.registry,
        )
        off.set_function(lambda: float(self.clock_off()))
        ProcessCollector(registry=self.registry)

    def count(self, observed: Observed, status: Object) -> None:
        """Count how this stored status has grown. The first one of a job is where this process begins."""
        group = (observed.namespace, profile_of(observed.job))
        self._begin(group)
        self._group_of[observed.uid] = group
        previous = self._known.get(observed.uid)
        if previous is None:
            self._known[observed.uid] = counted(status)
            return
        self._known[observed.uid], grown = growth(previous, status)
        for more in grown:
            if (unseen := self._unseen.get(group)) is not None:
                unseen[more.counter, more.label] = unseen.get((more.counter, more.label), 0) + more.amount
            else:
                self._counters[more.counter].labels(*group, more.label).inc(more.amount)

    def scraped(self) -> None:
        """Count the growth that waited for its group's zeros to be scraped."""
        for group, growths in self._unseen.items():
            for (counter, label), amount in growths.items():
                self._counters[counter].labels(*group, label).inc(amount)
        self._unseen.clear()

    def _begin(self, group: tuple[str, str]) -> None:
        is_new = self._seen.pop(group, None) is None
        self._seen[group] = time.monotonic()
        if not is_new:
            return
        self._unseen[group] = {}
        for key, (_, _, _, values) in _COUNTERS.items():
            for value in values:
                self._counters[key].labels(*group, value)

    def forget(self, uids: set[str]) -> None:
        """Keep how far these jobs are counted only, and the counters of groups that have one of them, or had one lately."""
        self._known = {uid: counters for uid, counters in self._known.items() if uid in uids}
        self._group_of = {uid: group for uid, group in self._group_of.items() if uid in uids}
        used, now = set(self._group_of.values()), time.monotonic()
        idle = [group for group in self._seen if group not in used]
        for number, group in enumerate(reversed(idle)):
            if number >= IDLE_GROUPS or now - self._seen[group] > IDLE_SECONDS:
                self._drop(group)

    def _drop(self, group: tuple[str, str]) -> None:
        del self._seen[group]
        self._unseen.pop(group, None)
        for key, (_, _, _, values) in _COUNTERS.items():
            for value in values:
                self._counters[key].remove(*group, value)

    @contextmanager
    def reconciling(self) -> Iterator[None]:
        with self._reconciles.time():
            yield

    def requested(self, verb: str, path: str, code: int) -> None:
        """A request to the API server; 0: it could not be reached."""
        resource = next((part for part in reversed(path.partition("?")[0].split("/")) if part in _PLURALS), "other")
        self._requests.labels(verb, resource, str(code)).inc()


class Jobs(Collector):
    """Gauges of the operator and its jobs, made at each scrape from what is known then."""

    def __init__(
        self,
        leads: Callable[[], bool],
        jobs: Callable[[], Iterable[Object]],
        report_time: Callable[[str], float | None],
        depth: Callable[[], int],
    ) -> None:
        self._leads = leads
        self._jobs = jobs
        self._report_time = report_time
        self._depth = depth

    def describe(self) -> list[Metric]:
        """Nothing in advance: at the start nothing is known."""
        return []

    def collect(self) -> Iterator[Metric]:
        leads = self._leads()
        yield GaugeMetricFamily(f"{PREFIX}_operator_leader", "1 for the replica that leads.", float(leads))
        yield GaugeMetricFamily(f"{PREFIX}_queue_depth", "Jobs that wait to be looked at.", float(self._depth()))
        jobs = list(self._jobs()) if leads else []
        yield _states(jobs)
        going = [job for job in jobs if state(_status(job)) not in OUTCOMES]
        shown = sorted(going, key=lambda job: str(job["metadata"].get("creationTimestamp", "")))[:JOBS_WITH_SERIES]
        yield GaugeMetricFamily(
            f"{PREFIX}_jobs_without_series",
            "Unfinished jobs beyond the limit of those with series of their own.",
            float(len(going) - len(shown)),
        )
        yield from self._series(shown, time.time())

    def _series(self, jobs: list[Object], now: float) -> Iterator[Metric]:
        families = {name: GaugeMetricFamily(f"{PREFIX}_job_{name}", text, labels=_JOB_LABELS) for name, text in JOB_GAUGES.items()}
        for job in jobs:
            report_time = self._report_time(job["metadata"]["uid"])
            for name, value in gauges(_status(job), now, None if report_time is None else max(0.0, now - report_time)).items():
                families[name].add_metric((job["metadata"]["namespace"], job["metadata"]["name"]), value)
        yield from families.values()


def _states(jobs: list[Object]) -> Metric:
    family = GaugeMetricFamily(f"{PREFIX}_jobs", "Jobs by state.", labels=(*_GROUP_LABELS, "state"))
    by_state: dict[tuple[str, str], dict[str, int]] = {}
    for job in jobs:
        counts = by_state.setdefault((job["metadata"]["namespace"], profile_of(job)), dict.fromkeys(STATES, 0))
        counts[state(_status(job))] += 1
    for group, counts in by_state.items():
        for name, count in counts.items():
            family.add_metric((*group, name), float(count))
    return family


def _status(job: Object) -> Object:
    return job.get("status") or {}


PATH = "/metrics"


class MetricsServer:
    """`cluster` isn't fenced: every replica is scraped."""

    def __init__(self, cluster: Cluster, metrics: Metrics) -> None:
        self._cluster = cluster
        self._metrics = metrics

    def application(self) -> web.Application:
        app = web.Application()
        app.router.add_get(PATH, self.show)
        return app

    async def show(self, request: web.Request) -> web.Response:
        try:
            await self._ask(bearer_token(request.headers.get("Authorization", "")))
        except Refusal as refusal:
            return web.Response(text=f"{refusal}\n", status=refusal.status)
        except (ApiError, OSError) as error:
            return web.Response(text=f"the token can't be checked now: {error}\n", status=503)
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        body = encode(self._metrics.registry)
        self._metrics.scraped()
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def _ask(self, token: str) -> None:
        """Ask the API server whose token it is, and whether that account may scrape. Raises Refusal."""
        status = await token_reviewer(self._cluster)(token)
        if not status.get("authenticated"):
            raise Refusal(UNAUTHENTICATED, "the token isn't valid")
        user = status["user"]
        account = {key: user[key] for key in ("uid", "groups", "extra") if key in user} | {"user": user["username"]}
        spec = {**account, "nonResourceAttributes": {"path": PATH, "verb": "get"}}
        access = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": spec}
        if not (await self._cluster.request("POST", path_of("SubjectAccessReview"), access))["status"].get("allowed"):
            raise Refusal(FORBIDDEN, f"{user['username']} may not get {PATH}: bind it to ClusterRole lockstep-metrics-reader")
