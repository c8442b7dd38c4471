"""The operator while it leads: watches jobs and brings the cluster to what they say.

kopf watches; an event is taken in and marks keys. One queue works the keys off, one worker a job at a time, and a slow resync makes up for
events that were lost. No timer, daemon or change handler of kopf's: those write finalizers and annotations.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import kopf

from lockstep.api.errors import Failed
from lockstep.api.names import OPERATOR_NAME, OPERATOR_NAMESPACE, REPORT_AUDIENCE, REPORT_URL
from lockstep.kube.clock import OFF_SECONDS
from lockstep.kube.cluster import FORBIDDEN, NOT_FOUND, ApiError, Cluster
from lockstep.kube.kinds import KINDS
from lockstep.plan.layers import Notice
from lockstep.plan.observed import Observed
from lockstep.plan.reconcile.events import JobEvent
from lockstep.plan.reconcile.reconcile import Plan, reconcile
from lockstep.plan.render.objects import RenderContext
from lockstep.plan.render.run import report_target
from lockstep.plan.waiting.containers import lacks_secret
from lockstep.platforms.operator.authenticate import token_reviewer
from lockstep.platforms.operator.certificate import Certificates, authority_made
from lockstep.platforms.operator.execute import Executor, status_refused
from lockstep.platforms.operator.issuer import IssuedTokens
from lockstep.platforms.operator.memory.history import RememberedRuns
from lockstep.platforms.operator.memory.inventory import WATCHED, Inventory, Watched
from lockstep.platforms.operator.memory.objects import job_of
from lockstep.platforms.operator.memory.queue import DelayedWrites, Key, Refusals, WorkQueue, patiently
from lockstep.platforms.operator.metrics import Jobs, Metrics
from lockstep.platforms.operator.report_server import ReportServer, Signs, Standing, problem
from lockstep.platforms.operator.secrets import job_key, key_secret, run_key
from lockstep.platforms.operator.watching import kopf_settings, registry
from lockstep_gang.build import build_id

RESYNC_SECONDS = 600.0
LIST_ITEMS = 100
"""Objects of a list at a time: as dicts, 500 StatefulSets would take 30 MB, which the process would keep."""
RELIST_SECONDS = 2.0
"""Wait after watches have missed something: the others begin anew, too."""
RELIST_APART_SECONDS = 10.0
"""Least seconds between two of these: a watch that fails all the time misses something every few seconds."""
UNSERVED_SECONDS = 60.0
"""Seconds until the operator tries a namespace again in which it lacks a right."""
SETTLING_SECONDS = 40.0
"""Seconds after an outage of the API server, or this process's start, until a silent Node is taken for lost. Kubernetes gives a kubelet as
long (node-monitor-grace-period): when the API server is back, it takes all Nodes for silent that could not reach it either, for some
seconds.
"""
CLOCK_SECONDS = 60.0
"""Seconds between two looks at a job while this machine's clock differs from the API server's."""
AT_ONCE = frozenset({"TrainingJob", "TrainingCluster", "Node"})
"""Kinds whose events are looked at without waiting for more: what people write, and what concerns all jobs anyway."""
GONE_MAX = 64
"""Deleted jobs of which something is still in memory."""
log = logging.getLogger("lockstep.operator")


class WentBack(Failed):
    """The API server's revision is lower than it was. Reports, messages and events that it sent are of jobs that may never have been: a new
    process begins.
    """


@dataclass(frozen=True)
class Settings:
    """Settings from the Deployment's environment."""

    agent_image: str
    """Image of the init container that brings the agent: the operator's own."""
    namespace: str = OPERATOR_NAMESPACE
    report_url: str = REPORT_URL
    port: int = 8443
    pod: str = OPERATOR_NAME
    """This replica's name in the election."""
    pod_ip: str = ""
    metrics_port: int = 0
    """0: none."""
    health_port: int = 0
    """Port of the kubelet's probes: what fills the report port doesn't touch them. 0: any."""
    namespaces: tuple[str, ...] = ()
    """Namespaces where it works; none: the whole cluster."""
    profile: str = ""
    """A file with the TrainingCluster: that of an operator which has no rights outside its namespace. It sees no Nodes."""

    @property
    def address(self) -> str:
        """Address where this replica itself takes reports; "" if it isn't told one."""
        host = f"[{self.pod_ip}]" if ":" in self.pod_ip else self.pod_ip
        return f"{host}:{self.port}" if host else ""

    @property
    def watched(self) -> tuple[Watched, ...]:
        """The kinds that it may see."""
        return tuple(watched for watched in WATCHED if KINDS[watched.kind].namespaced or not self.profile)

    def places(self, kind: str) -> tuple[str | None, ...]:
        """Namespaces where objects of a kind are listed; None: everywhere."""
        return self.namespaces or (None,) if KINDS[kind].namespaced else (None,)

    @classmethod
    def from_environment(cls, environment: dict[str, str]) -> Settings:
        return cls(
            agent_image=environment["LOCKSTEP_AGENT_IMAGE"],
            namespace=environment.get("LOCKSTEP_NAMESPACE", OPERATOR_NAMESPACE),
            report_url=environment.get("LOCKSTEP_REPORT_URL", REPORT_URL),
            port=int(environment.get("LOCKSTEP_REPORT_PORT", "8443")),
            pod=environment.get("LOCKSTEP_POD", OPERATOR_NAME),
            pod_ip=environment.get("LOCKSTEP_POD_IP", ""),
            metrics_port=int(environment.get("LOCKSTEP_METRICS_PORT", "8444")),
            health_port=8445 if "LOCKSTEP_POD_IP" in environment else 0,
            namespaces=tuple(filter(None, environment.get("LOCKSTEP_NAMESPACES", "").split(","))),
            profile=environment.get("LOCKSTEP_CLUSTER", ""),
        )


@dataclass
class Operator:
    """One operator of one cluster."""

    cluster: Cluster
    settings: Settings
    master: bytes
    tls: Certificates
    inventory: Inventory = field(default_factory=Inventory)
    standing: Callable[[], Standing] = Standing
    metrics: Metrics = field(default_factory=Metrics)
    synced: bool = False

    def __post_init__(self) -> None:
        self._missed = asyncio.Event()
        self._gone = 0
        self._refused = Refusals()
        self._refused_statuses = Refusals()
        self._watched: dict[str, float] = {}
        self._unserved: set[str] = set()
        self.inventory.own_namespace = self.settings.namespace
        self._listed = 0.0
        self._leads_since: float | None = None
        self.queue = WorkQueue(self.work)
        self.executor = Executor(self.cluster, self.written, lambda kind, item: self.observe(kind, item, deleted=False))
        self.settling = DelayedWrites()
        self.runs = RememberedRuns()
        review = IssuedTokens(self.cluster) if self.settings.profile else token_reviewer(self.cluster, REPORT_AUDIENCE)
        self.server = ReportServer(self.master, review, self.inventory, self.queue.mark, self.standing)
        self.server.written = self.queue.worked
        self.server.now, self.server.problem = self.cluster.clock.now, lambda: problem(self.signs(), time.monotonic())
        self.metrics.clock_off = lambda: self.cluster.clock.off_seconds
        leads, depth = lambda: self.standing().leads, lambda: self.queue.depth
        self.inventory.unsettled_seconds = lambda: max(0.0, SETTLING_SECONDS - self.cluster.answers.back_seconds())
        if self.settings.profile:
            self.inventory.sees_nodes = False
            self.inventory.observe("TrainingCluster", read_profile(Path(self.settings.profile)), deleted=False)
        self.metrics.registry.register(Jobs(leads, self.inventory.job_objects, self.server.reports.time, depth))

    def observe(self, kind: str, item: dict[str, Any], deleted: bool) -> None:
        if kind == "Pod" and (job := job_of(item)):
            self._see_pod((item["metadata"]["namespace"], job), item, deleted=deleted)
        try:
            keys = self.inventory.observe(kind, item, deleted=deleted)
        except Exception:  # one object that nobody thought of: a list says the same again
            log.exception("an event of a %s can't be taken in", kind)
            return
        for key in keys:
            if deleted:
                self._refused.forget(key)  # it may have been in the way
            self.queue.mark(key) if kind in AT_ONCE else self.queue.mark_soon(key)

    def _see_pod(self, key: Key, pod: dict[str, Any], *, deleted: bool) -> None:
        losses, now = self.server.losses, self.cluster.clock.now()
        if deleted:
            losses.see_gone(key, pod, self.inventory.item("TrainingJob", key), self.inventory.item("StatefulSet", key), now)
        else:
            losses.see_pod(key, pod, now)

    def written(self, kind: str, item: dict[str, Any]) -> None:
        """Take in what this operator wrote before the watch reports it: nothing is decided, or sent again, on what was there before."""
        for key in self.inventory.observe_write(kind, item):
            self.queue.progressed(key)
            self.queue.mark_soon(key)

    async def work(self, key: Key) -> float | None:
        """Reconcile one job; seconds until it should be looked at again."""
        with self.metrics.reconciling():
            return await self._reconcile(key)

    async def _reconcile(self, key: Key) -> float | None:
        observed = await self._observed(key)
        if observed is None:
            self.server.losses.forget(key)
            self._refused.forget(key)
            self._refused_statuses.forget(key)
            self._gone += 1
            if self._gone >= GONE_MAX:
                self._forget_others(self.inventory.uids())
            return None
        if not self.inventory.serves(observed.namespace):
            return None  # it has an operator of its own (`lockstep deploy --namespace-only`), or what can't be listed may run all the same
        self.server.losses.see(key, observed, self.cluster.clock.now())
        if lacks_secret(observed):
            self.inventory.forget_secret(key)
            observed = await self._observed(key) or observed
        self.metrics.count(observed, observed.status)
        context = self._context(observed)
        received = self.server.reports.of(observed.uid)
        plan = reconcile(observed, received, context, self.cluster.clock.now())
        self.runs.see(observed.uid, plan.run)
        obstacle, refused_for = await self._write(key, observed, plan)
        if obstacle != observed.obstacle:
            self.inventory.set_obstacle(key, obstacle)
            observed = await self._observed(key) or observed
            plan = reconcile(observed, received, context, self.cluster.clock.now())
        if plan.passing and (left := self.settling.left(observed.uid)) > 0:
            return min(left, plan.again_seconds or left)
        self.settling.settled(observed.uid)
        await self.executor.send_events(observed, plan.events, self.cluster.clock.now())
        await self._report_clock(observed)
        status_refused_for = None
        if plan.status is not None:
            try:
                status_refused_for = await self._write_status(key, observed, plan.status)
            except ApiError as error:
                if error.status == NOT_FOUND:  # deleted meanwhile: its event comes
                    return plan.again_seconds
                raise
        looks = [look for look in (refused_for, status_refused_for, self._again(plan.again_seconds)) if look is not None]
        return min(looks, default=None)

    async def _observed(self, key: Key) -> Observed | None:
        """All that is known of the job, with the contents of its own children that were too large to keep."""
        observed = self.inventory.observed(key)
        if observed is None:
            return None
        objects = dict(observed.objects)
        for kind, name in self.inventory.to_read(key):
            item = await self.cluster.get(kind, key[0], name)
            if item is None:
                objects.pop((kind, name))
            else:
                self.inventory.observe(kind, item, deleted=False)
                objects[kind, name] = {**item, "kind": kind}
        return replace(observed, objects=objects)

    async def _write(self, key: Key, observed: Observed, plan: Plan) -> tuple[Notice | None, float | None]:
        """Return the obstacle, and the seconds until the next try. What was refused is sent again only then, or when it is something
        else.
        """
        if plan.taken_back:
            return observed.obstacle, None
        write = (
            observed.generation,
            *((i["kind"], i["metadata"]["name"]) for i in (*plan.create, *plan.claims, *plan.apply, *plan.delete)),
        )
        if (left := self._refused.left(key, write)) > 0:
            return observed.obstacle, left
        obstacle = await self.executor.write_objects(observed, plan)
        if obstacle is None:
            self._refused.forget(key)
            return None, None
        return obstacle, self._refused.refused(key, write)

    async def _write_status(self, key: Key, observed: Observed, status: dict[str, Any]) -> float | None:
        """Return the seconds until the next try if the API server refused it: an event of the job says so, and as much as it takes is
        stored. Raises ApiError.
        """
        write = (observed.uid, observed.generation, *((c["type"], c["status"], c["reason"]) for c in status["conditions"]))
        if (left := self._refused_statuses.left(key, write)) > 0:
            return left
        try:
            await self.executor.write_status(observed, status)
        except ApiError as error:
            if not error.is_refusal:
                raise
            await self.executor.send_events(observed, (status_refused(error),), self.cluster.clock.now())
            await self.executor.write_less(observed, status, error)
            return self._refused_statuses.refused(key, write)
        self._refused_statuses.forget(key)
        self.metrics.count(observed, status)
        return None

    def _again(self, seconds: float | None) -> float | None:
        """Return the seconds until the next look. While clocks differ, what is due waits for them to agree, and no event says when they
        do.
        """
        return min(seconds or CLOCK_SECONDS, CLOCK_SECONDS) if self.cluster.clock.off_seconds else seconds

    async def _report_clock(self, observed: Observed) -> None:
        """Report that clocks differ, as an event of a job for which something would be done because a time is over."""
        spec = observed.job["spec"]
        waits = [name for name in ("activeDeadlineSeconds", "ttlSecondsAfterFinished") if spec.get(name) is not None]
        if self.cluster.clock.off_seconds and waits:
            text = (
                f"the operator's clock and the API server's differ by more than {OFF_SECONDS:.0f} s: spec.{' and spec.'.join(waits)} wait"
                " until they agree"
            )
            await self.executor.send_events(observed, (JobEvent("Warning", "ClocksDiffer", text),), self.cluster.clock.now())

    def _context(self, observed: Observed) -> RenderContext:
        uid = observed.uid
        report = report_target(self.settings.report_url, self.tls.ca_cert)
        return RenderContext(
            self.settings.agent_image,
            job_key(self.master, uid),
            uid,
            report,
            self.server.reports.since,
            key_secret=key_secret(self.master, observed.name, uid),
            authority_made=authority_made(self.tls).timestamp(),
            is_unverified=self.server.reports.is_unverified(uid),
            run_key=run_key(self.master, uid),
            remembered=self.runs.of(uid),
            clock_off=bool(self.cluster.clock.off_seconds),
            build=build_id(),
        )

    async def resync(self, every_job: bool = True) -> None:
        """Replace what is known with what the API server lists, and look at every job, or at those only for which that is news."""
        news, unserved = set[Key](), set[str]()
        self.inventory.begin_lists()
        for watched in self.settings.watched:
            news |= await self._list(watched, unserved)
        if self.inventory.has_gone_back:
            raise WentBack(
                "the API server is at an earlier revision than before: its store was restored, and what this process knows is of a time"
                " that is gone"
            )
        self.synced, self._listed = True, time.monotonic()
        self._forget_others(self.inventory.uids())
        served_again, self._unserved = self._unserved - unserved, unserved
        self.inventory.unserved = unserved
        jobs = self.inventory.jobs()
        for key in jobs if every_job else news.union(key for key in jobs if key[0] in served_again):
            self.queue.mark(key)

    async def _list(self, watched: Watched, unserved: set[str]) -> set[Key]:
        """The keys of jobs for which this is news. A namespace that refuses the list is added to `unserved`: whoever administers it must
        not stop the others' jobs. Raises ApiError where none is left.
        """
        listed, news, versions = set[Key](), set[Key](), list[str]()
        for place in self.settings.places(watched.kind):
            if place in unserved:
                continue
            version = "0"
            pages = self.cluster.pages(watched.kind, place, watched.query, LIST_ITEMS, metadata_only=watched.metadata_only, bounded=True)
            try:
                async for page in pages:
                    names, changed = self.inventory.take_in(watched.kind, page["items"])
                    listed, news = listed | names, news | changed
                    version = page["metadata"].get("resourceVersion", "0")
            except ApiError as error:
                if place is None or error.status != FORBIDDEN or {*unserved, place} >= {*self.settings.namespaces}:
                    raise
                log.warning("namespace %s is not served: %s; lockstep deploy CLUSTER gives the right again", place, error)
                unserved.add(place)
                continue
            versions.append(version)
        oldest = min((int(version) if version.isdigit() else 0 for version in versions), default=0)
        return news | self.inventory.drop_others(watched.kind, listed, oldest)

    def _forget_others(self, uids: set[str]) -> None:
        """Jobs that are gone."""
        self._gone = 0
        self.server.reports.forget(uids)
        self.executor.forget(uids)
        self.settling.forget(uids)
        self.runs.forget(uids)
        self.metrics.forget(uids)

    def watch_goes_on(self, plural: str) -> None:
        self._watched[plural] = time.monotonic()

    def signs(self) -> Signs:
        """Signs of life of its loops."""
        answers = self.cluster.answers
        return Signs(
            leads_since=self._leads_since,
            working_seconds=self.queue.longest_seconds,
            waiting=self.queue.depth,
            worked=self.queue.last_end,
            listed=self._listed,
            watched=self._watched,
            refused_since=answers.refused_since,
            answers=answers.is_answering,
        )

    def watch_missed(self) -> None:
        """Note that a watch begins anew: what was deleted before is in no event."""
        self._missed.set()

    async def resync_forever(self) -> None:
        """Look at all jobs now and then; and each time that watches have missed something, at those that it concerns."""
        looked = listed = time.monotonic()
        relist, relisted = math.inf, -math.inf
        while True:
            due = min(relist, listed + (UNSERVED_SECONDS if self._unserved else RESYNC_SECONDS))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, due - time.monotonic())):
                    await self._missed.wait()
            now = time.monotonic()
            if self._missed.is_set():
                self._missed.clear()
                relist = min(relist, max(now + RELIST_SECONDS, relisted + RELIST_APART_SECONDS))
                continue
            relist, relisted, listed = math.inf, now if relist <= now else relisted, now
            every_job = now - looked >= RESYNC_SECONDS
            try:
                await self.resync(every_job)
                looked = now if every_job else looked
            except WentBack:
                raise
            except (ApiError, OSError) as error:
                log.warning("resync: %s", error)
                self._missed.set()
            except Exception:  # the watches go on, and what is known stays
                log.exception("resync failed")

    async def run(self, watching: Callable[[], None] = lambda: None) -> None:
        """Work until cancelled. The list comes first: a gang that runs must never be taken for one that isn't there."""
        self._leads_since = time.monotonic()
        await patiently("the first list", self.resync)
        # No report is taken before; where the list takes a minute, that is no gang's silence.
        self.server.reports.since = self.cluster.clock.now()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._watch(watching))
                group.create_task(self.queue.run())
                group.create_task(self.resync_forever())
        except* WentBack as errors:
            raise errors.exceptions[0] from None

    async def _watch(self, watching: Callable[[], None]) -> None:
        """`watching` is called once kopf is there: it has then taken SIGTERM and SIGINT for itself."""
        others = asyncio.all_tasks()
        tasks = await kopf.spawn_tasks(
            registry=registry(self.settings.watched, self.observe, self.watch_missed, self.watch_goes_on),
            settings=kopf_settings(),
            clusterwide=not self.settings.namespaces,
            namespaces=self.settings.namespaces,
            standalone=True,
            identity=OPERATOR_NAME,  # its default looks up a user name, and an arbitrary UID has none
        )
        watching()
        await kopf.run_tasks(tasks, ignored=others)
        raise RuntimeError("the watching ended")


def read_profile(path: Path) -> dict[str, Any]:
    """The TrainingCluster of a namespace's own operator, as an API server would have it. Raises OSError, ValueError."""
    profile: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    digest = hashlib.sha256(json.dumps(profile, sort_keys=True).encode()).hexdigest()
    return {**profile, "metadata": {**profile["metadata"], "uid": f"file-{digest[:16]}", "resourceVersion": "0", "generation": 1}}
