"""Every loop that waits, and the ends by which it ends: what it waits for can't come any more, or its time is over."""

from __future__ import annotations

import ast
import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from typer.testing import CliRunner

import lockstep
from lockstep.api.errors import ConfigError, Failed
from lockstep.api.objects import Typed
from lockstep.cli.jobs import change, get, top
from lockstep.cli.main import app
from lockstep.cli.shared.jobargs import Form, TargetOptions
from lockstep.kube import jobs
from lockstep.kube.cluster import Cluster
from lockstep.plan.ahead.submission import SubmittedAs
from lockstep.plan.pages.logs import LogSelection
from lockstep.platforms.clusters import imagebuild
from lockstep.platforms.files import sending
from lockstep.platforms.hosts import backend as hosts_backend
from lockstep.platforms.hosts import backend as runonhosts
from lockstep.platforms.hosts.backend import HostsJob
from lockstep.platforms.jobs import logs, looks
from lockstep.platforms.jobs import runs as folders
from lockstep.platforms.kubernetes import alone as in_namespace
from lockstep.platforms.kubernetes import files as sync
from lockstep.platforms.kubernetes import job as kubernetes_looks
from lockstep.platforms.kubernetes import submit
from lockstep.platforms.kubernetes.backend import KubernetesBackend
from lockstep.platforms.kubernetes.job import KubernetesJob, _Over
from lockstep.platforms.places import drilledjob, drills
from lockstep.platforms.places.values import Words
from support.fake_cluster import FakeCluster
from unit.platforms.kubernetes.test_run import RUNS, Namespace, node, ran
from unit.silent_place import SilentPlace
from unit.virtual_time import VirtualClock, clock_of

Object = dict[str, Any]
ROOT = Path(lockstep.__file__).parent
WAITS = {"sleep", "wait", "watch", "poll", "look_again", "polled"}
NOT_VERBS = {"devcluster", "inpod", "onhost", "operator"}
"""The embedded clusters, programs beside the ranks, and the operator, which have no end to wait for."""


def functions_in(item: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for inner in ast.walk(item):
        if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield inner


def waits(item: ast.AST, *, in_loop: bool = False) -> bool:
    """Return True if something waits in a loop of `item`, and not of a function within it."""
    for inner in ast.iter_child_nodes(item):
        if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        loops_here = in_loop or isinstance(inner, (ast.While, ast.For, ast.AsyncFor))
        called = inner.func if isinstance(inner, ast.Call) else None
        if (loops_here and WAITS & {getattr(called, "attr", ""), getattr(called, "id", "")}) or waits(inner, in_loop=loops_here):
            return True
    return False


def loops() -> Iterator[tuple[str, str]]:
    """(module and function, its text) of each loop in which something waits."""
    for path in sorted(ROOT.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if not NOT_VERBS & set(path.relative_to(ROOT).parts) and any(f"{word}(" in text for word in WAITS):
            for function in functions_in(ast.parse(text)):
                if waits(function):
                    lines = text.splitlines()[function.lineno - 1 : function.end_lineno]
                    yield f"{path.relative_to(ROOT)} {function.name}", "\n".join(lines)


DELETED, ANEW, COMPLETE, FAILED, SUSPENDED, REFUSED = "deleted", "made anew", "complete", "failed", "suspended", "refused"
ENDED = (COMPLETE, FAILED)
EVERY = (DELETED, ANEW, *ENDED, SUSPENDED, REFUSED)
BY_JOB: dict[str, tuple[str, ...]] = {
    "cli/jobs/get.py wait": EVERY,
    "cli/jobs/get.py _watch": (DELETED, ANEW, *ENDED),
    "cli/jobs/change.py _until_stopped": (DELETED, ANEW, *ENDED, SUSPENDED),
    "platforms/kubernetes/submit.py _until": EVERY,
    "platforms/kubernetes/job.py looks_of_job": (DELETED, ANEW, *ENDED),
    "platforms/jobs/top.py looks_of_job": (DELETED, ANEW, *ENDED),
    "platforms/hosts/backend.py _until_running": (DELETED, ANEW, *ENDED, SUSPENDED),
    "platforms/hosts/backend.py _until_ended": (DELETED, ANEW, SUSPENDED),
    "platforms/files/sending.py send_all": (DELETED, *ENDED),
    "platforms/kubernetes/job.py _until_gone": (DELETED,),
    "kube/jobs.py delete_job": (DELETED, ANEW),
    "platforms/jobs/logs.py follow": (DELETED, ANEW, *ENDED, REFUSED),
    "platforms/jobs/runs.py followed": (DELETED, ANEW, *ENDED),
    "platforms/places/drills.py _until": (DELETED, ANEW, *ENDED),
    "platforms/kubernetes/alone.py _until_end": (DELETED, ANEW, *ENDED),
    "platforms/clusters/imagebuild.py _followed": (DELETED, *ENDED),
}
"""The ends of a job (or a build) by which a wait for it ends. A suspended job that is followed goes on when it is resumed, which is said.
"""
BY_TIME = {
    "cli/jobs/get.py wait": "timeout",
    "cli/jobs/change.py _until_stopped": "STOP_SECONDS",
    "platforms/hosts/backend.py _until_ended": "STOP_SECONDS",
    "platforms/local/backend.py delete": "STOP_SECONDS",
    "kube/jobs.py delete_job": "GONE_TIMEOUT_SECONDS",
    "platforms/clusters/devenv.py until_up": "seconds",
    "platforms/clusters/install.py polled": "seconds",
    "platforms/clusters/install.py until_established": "READY_SECONDS",
    "platforms/clusters/install.py until_ready": "seconds",
    "platforms/clusters/remove.py _remove_jobs": "GONE_SECONDS",
    "platforms/jobs/bundle.py _log_of": "until",
    "platforms/files/reader.py _until_running": "START_SECONDS",
    "platforms/files/reader.py hear": "watch",
    "platforms/files/transfer.py retried": "TRIES",
    "platforms/hosts/ssh.py patiently": "PAUSES",
    "platforms/hosts/wheelhouse.py _again": "TRIES",
    "platforms/kubernetes/probe.py _ended": "WAIT_SECONDS",
    "platforms/kubernetes/alone.py _make_room": "GONE_SECONDS",
    "platforms/places/drilledjob.py until": "timeout_seconds",
    "platforms/places/drilledjob.py wait": "seconds",
    "platforms/places/drilledjob.py __enter__": "30.0",
    "platforms/local/joined/join.py _held": "give_up",
    "platforms/local/joined/join.py _connected": "patience_seconds",
    "platforms/local/joined/token.py _waited_for": "wait_seconds",
}
"""The limit that the function names."""
WITH_ANOTHER = {
    "platforms/kubernetes/backend.py looks_of_all": "a view of a namespace, whose jobs may come at any time",
    "platforms/jobs/top.py looks_of_machines": "a view of machines, which stay",
    "cli/shared/terminal.py show": "the work that it counts the seconds of",
    "kube/expiry.py _beat": "the work beside which it runs",
    "programs.py beat": "the program that it keeps alive",
    "platforms/hosts/ssh.py alone_at": "another process of yours, whose lock ends with it",
    "platforms/kubernetes/shortruns.py _all_pods": "run_until, which has a limit and ends it",
    "platforms/jobs/terminal.py _follow_size": "the session, which cancels it",
    "platforms/local/joined/join.py _attend": "the agent, whose own waits end",
    "platforms/local/joined/join.py _follow": "the agent's end, which ends it",
}
"""What ends it."""


def test_every_loop_that_waits_is_in_the_table() -> None:
    texts = dict(loops())
    through_another = {"platforms/places/drills.py _until"}
    assert texts.keys() | through_another == BY_JOB.keys() | BY_TIME.keys() | WITH_ANOTHER.keys()
    assert [loop for loop, limit in BY_TIME.items() if loop in texts and limit not in texts[loop]] == []


def condition(kind: str, status: str = "True", reason: str = "") -> Object:
    return {"type": kind, "status": status, "reason": reason or kind, "message": f"it is {kind}"}


RUNNING = [condition("Progressing", reason="Running"), condition("Suspended", "False", "NotSuspended")]
CONDITIONS = {
    COMPLETE: [condition("Progressing", "False", "Complete"), condition("Complete")],
    FAILED: [condition("Progressing", "False", "Failed"), condition("Failed")],
    SUSPENDED: [condition("Progressing", "False", "Suspended"), condition("Suspended")],
    REFUSED: [condition("Progressing", "False", "SpecInvalid"), condition("Accepted", "False", "SpecInvalid")],
}


def job_of(uid: str = "u", conditions: list[Object] = RUNNING, **spec: Any) -> Object:
    metadata = {"name": "x", "namespace": "ns", "uid": uid, "generation": 2}
    return {"kind": "TrainingJob", "metadata": metadata, "spec": spec, "status": {"conditions": conditions, "observedGeneration": 2}}


def job_after(end: str) -> Object | None:
    if end in (DELETED, ANEW):
        return None if end == DELETED else job_of("another")
    return job_of(conditions=CONDITIONS[end], suspend=end == SUSPENDED)


async def at_once(function: Callable[..., object], *words: object, **named: object) -> object:
    return function(*words, **named)


class Limited(VirtualClock):
    """A clock that ends a wait which would never end."""

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        assert self.now < 5000, "it waits for ever"


class World:
    """A job that runs for five seconds of a clock, and then is as `end` says."""

    def __init__(self, end: str, patch: pytest.MonkeyPatch) -> None:
        self.end, self.patch, self.clock = end, patch, Limited(0.0)
        modules = (get, change, submit, looks, runonhosts, hosts_backend, jobs, drilledjob)
        clock_of(patch, *modules)
        for module in modules:
            patch.setattr(module, "time", self.clock)
        patch.setattr(kubernetes_looks, "get_job", lambda *_: self.job)
        patch.setattr(asyncio, "to_thread", at_once)
        self.cluster = FakeCluster().as_cluster
        patch.setattr(self.cluster, "get", self._get)
        patch.setattr(self.cluster, "request", self._request, raising=False)

    @property
    def job(self) -> Object | None:
        return job_of() if self.clock.now < 5 else job_after(self.end)

    async def _get(self, kind: str, namespace: str | None, name: str) -> Object | None:
        return self.job if kind == "TrainingJob" else None

    async def _request(self, *_: object) -> Object:
        return {}

    @property
    def cluster_job(self) -> KubernetesJob:
        target = SimpleNamespace(
            client=SimpleNamespace(request=lambda *_: {}, connected=lambda: nullcontext(self.cluster)),
            namespace="ns",
            options="",
            cluster="c",
        )
        return KubernetesJob(cast(Any, target), job_of(), cast(Any, SimpleNamespace(words=Words("-n ns", "in namespace ns"))))

    @property
    def host_job(self) -> HostsJob:
        """A job on hosts, whose records and status are those of the cluster's job."""

        def seen() -> Any:
            job = self.job
            if job is None:
                return None
            record = SimpleNamespace(uid=job["metadata"]["uid"], ranks=(1,))
            return SimpleNamespace(record=record, job=job, hosts=[], jobs={}, problems={}, runs=self.clock.now < 5)

        class Known(HostsJob):
            def _see(self, now: Any) -> None:
                self.seen, self.job = now, now.job

        async def look_for(*_: object, **__: object) -> tuple[Object, Object]:
            return {}, {}

        fleet = SimpleNamespace(look_for=look_for, place=lambda host: SilentPlace())
        self.patch.setattr("lockstep.plan.hosts.status.seen_jobs", lambda *_: {"x": now} if (now := seen()) else {})
        backend = SimpleNamespace(fleet=lambda: fleet, words=Words("--cluster c", "on the hosts of c"), late_seconds=None)
        return Known(cast(Any, backend), seen())

    def typed(self, *words: str) -> int:
        result = CliRunner().invoke(app, list(words))
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code


def wait(world: World) -> object:
    world.patch.setattr(get, "find_job", lambda *_: world.cluster_job)
    return world.typed("wait", "x", "--for", "CheckpointCommitted")


def watch(world: World) -> object:
    def every(*_: object, **__: object) -> list[Any]:
        return [KubernetesJob(world.cluster_job.target, world.job, world.cluster_job.backend)] if world.job else []

    world.patch.setattr(KubernetesBackend, "job", lambda *_: world.cluster_job)
    world.patch.setattr(KubernetesBackend, "jobs", every)
    world.patch.setattr(KubernetesBackend, "current", lambda _, listed: ([one.job for one in listed], None))
    world.patch.setattr(KubernetesBackend, "default_nodes", lambda *_: 1)
    world.patch.setattr(TargetOptions, "backend", lambda *_, **__: KubernetesBackend(world.cluster_job.target))
    return world.typed("get", "x", "-w")


def until(world: World) -> None:
    seen = submit.StartWatch(world.cluster_job, SubmittedAs(Typed("x.yaml"), "local", "ns", ""), is_new=False)
    submit._until(world.cluster_job, seen, lambda now: now.is_ready)


class Answers:
    async def ask(self, points: int) -> Object:
        return {}


def looks_of_job(world: World) -> Awaitable[object]:
    async def nothing(*_: object) -> None:
        return None

    async def no_pods(*_: object) -> tuple[()]:
        return ()

    world.patch.setattr("lockstep.platforms.jobs.top.NodesWatch", lambda *_: nullcontext(Answers()))
    world.patch.setattr("lockstep.platforms.jobs.top.pods_of", no_pods)
    world.patch.setattr(kubernetes_looks, "operator_unheard", nothing)
    return top._until_over(kubernetes_looks.looks_of_job(world.cluster_job, 2.0, live=True), lambda lines: None, Form.TEXT, live=True)


def looks_of_host(world: World) -> Awaitable[object]:
    world.patch.setattr("lockstep.platforms.jobs.top.NodesWatch", lambda *_: nullcontext(Answers()))
    looks = world.host_job.looks(2.0, live=True)
    return top._until_over(looks, lambda lines: None, Form.TEXT, live=True)


def over_of(world: World) -> _Over:
    return _Over(world.cluster, world.cluster_job, lambda line: None, lambda status: None)


async def lines_of(lines: AsyncIterator[str]) -> int:
    return len([line async for line in lines])


class Silent(FakeCluster):
    """An API server whose streams say nothing and never end, as after a firewall forgot the connection."""

    async def log(self, *_: object) -> AsyncIterator[str]:
        await asyncio.Event().wait()
        yield ""


def followed_log(world: World) -> Awaitable[object]:
    return lines_of(logs.follow(Silent().as_cluster, "ns", "x", LogSelection(), over_of(world)))


def followed_folder(world: World) -> Awaitable[object]:
    async def news(*_: object) -> AsyncIterator[tuple[str, str]]:
        for nothing in list[Any]():
            yield nothing

    world.patch.setattr(folders, "_news", news)
    job = world.host_job
    return lines_of(folders.followed(cast(Any, SilentPlace()), "/x", {"tail": -1}, lambda: job.is_over(print)))


def drilled(world: World) -> object:
    one = drilledjob.DrilledJob(world.cluster_job, {"attempts": 1, "nodes": 1}, 900.0, lambda text: None)
    return drills._until(one, "the recovery", lambda status: False)


def synced(world: World) -> Awaitable[object]:
    async def once(*_: object) -> list[Any]:
        if world.clock.now < 5:
            return []
        raise ConfigError("no pod of job x runs")

    receivers: Any = SimpleNamespace(are_there=False)
    job = sending.Sending("x", Path("/none"), "/workspace", "-n ns", watch=True)
    return sending.send_all(job, receivers, once, lambda: sync._is_over(world.cluster, "ns", "x"))


def forwarded(world: World) -> Awaitable[object]:
    def running_pod(*_: object) -> str:
        if world.job is None:
            raise Failed("there is no pod x-0")
        return "x-0"

    world.patch.setattr(type(world.cluster_job), "running_pod", running_pod)
    return world.cluster_job._until_gone(0)


def in_a_namespace(world: World) -> Awaitable[object]:
    """A run whose keeper has taken its pods at its end, while nothing looked."""
    run = ran()
    server, steps = Namespace(run, (node(0, RUNS), node(1, RUNS))), iter(range(1000))
    stateful_set = server.objects["StatefulSet", "x"]
    pods, code = server.list, int(world.end == FAILED)

    async def listed(kind: str, *words: Any) -> Object:
        if kind == "Pod" and next(steps) == 3:
            if world.end == DELETED:
                server.objects.pop(("StatefulSet", "x"))
                server.objects["StatefulSet", "other"] = stateful_set
            elif world.end == ANEW:
                stateful_set["metadata"]["ownerReferences"] = [{"kind": "ConfigMap", "name": "x-run-another"}]
            else:
                stateful_set["spec"]["replicas"] = 0
        return await pods(kind, *words) if ("StatefulSet", "x") in server.objects else {"items": []}

    async def ended_since(*_: object) -> int:
        return code

    world.patch.setattr(server, "list", listed)
    world.patch.setattr(in_namespace, "_ended_since", ended_since)
    return in_namespace._follow(cast(Cluster, server), run, lambda line: None)


def built(world: World) -> Awaitable[object]:
    async def request(method: str, path: str) -> Object:
        if world.clock.now >= 5 and world.end == DELETED:
            raise Failed("there is no build b")
        phase = {COMPLETE: "Complete", FAILED: "Failed"}[world.end] if world.clock.now >= 5 else "Pending"
        return {"metadata": {"name": "b"}, "status": {"phase": phase}}

    async def log_of(*_: object) -> AsyncIterator[str]:
        for nothing in list[Any]():
            yield nothing

    return imagebuild._followed(cast(Any, SimpleNamespace(request=request, log_of=log_of)), "ns", "b", lambda line: None)


async def until_ended(world: World) -> None:
    """Here the job's agents have ended five seconds after they were told to stop."""
    await world.host_job._until_ended()


STORIES: dict[str, Callable[[World], Any]] = {
    "cli/jobs/get.py wait": wait,
    "cli/jobs/get.py _watch": watch,
    "cli/jobs/change.py _until_stopped": lambda world: change._until_stopped(world.cluster_job, 600.0),
    "platforms/kubernetes/submit.py _until": until,
    "platforms/kubernetes/job.py looks_of_job": looks_of_job,
    "platforms/jobs/top.py looks_of_job": looks_of_host,
    "platforms/hosts/backend.py _until_running": lambda world: runonhosts._until_running(world.host_job),
    "platforms/hosts/backend.py _until_ended": until_ended,
    "platforms/files/sending.py send_all": synced,
    "platforms/kubernetes/job.py _until_gone": forwarded,
    "kube/jobs.py delete_job": lambda world: jobs.delete_job(world.cluster, "ns", "x"),
    "platforms/jobs/logs.py follow": followed_log,
    "platforms/jobs/runs.py followed": followed_folder,
    "platforms/places/drills.py _until": drilled,
    "platforms/kubernetes/alone.py _until_end": in_a_namespace,
    "platforms/clusters/imagebuild.py _followed": built,
}
QUICK = 45.0
"""Seconds within which a wait ends; all limits are longer."""


@pytest.mark.parametrize(("loop", "end"), [(loop, end) for loop, ends in BY_JOB.items() for end in ends])
def test_a_wait_ends_when_what_it_waits_for_cannot_come(loop: str, end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(end, monkeypatch)

    def story() -> None:
        result = STORIES[loop](world)
        if asyncio.iscoroutine(result):
            world.clock.run(asyncio.wait_for(result, 300))

    raised: BaseException | None = None
    try:
        story()
    except (Failed, ConfigError) as error:
        raised = error
    assert world.clock.now < QUICK
    if end in (DELETED, ANEW) and loop != "kube/jobs.py delete_job":
        assert raised is not None and any(word in str(raised) for word in ("deleted", "there is no", "no pod"))


def test_what_a_spec_has_taken_back_does_not_end_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator has yet to see that the job was resumed or corrected."""
    from lockstep.api.objects import current_status
    from lockstep.plan.ahead.submission import standstill

    suspended, refused = job_of(conditions=CONDITIONS[SUSPENDED], suspend=True), job_of(conditions=CONDITIONS[REFUSED])
    assert (
        standstill(current_status(suspended)) == "it is Suspended"
        and standstill(current_status(refused)) == "the operator refuses it: it is Accepted"
    )
    refused["metadata"]["generation"] = 3
    resumed = job_of(conditions=CONDITIONS[SUSPENDED], suspend=False)
    idle = job_of(conditions=[condition("Suspended", reason="Idle")], suspend=False, restart={"retry": 1})
    assert [standstill(current_status(one)) for one in (refused, resumed, idle)] == ["", "", ""]
