"""A job in a namespace of a cluster, whose API server keeps it and whose operator writes its status."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lockstep.api.errors import ConfigError, Failed
from lockstep.api.names import AGENT_PATH, CONTAINER, DATASETS, KUBERNETES, WORKSPACE, pod_name
from lockstep.api.objects import Object, condition, current_status, go_on_words, has_ended, has_no_pods, is_run, is_running, is_true, uid_of
from lockstep.kube.cluster import NOT_FOUND, ApiError, Cluster
from lockstep.kube.exec import PodPlace
from lockstep.kube.jobs import delete_job, get_job, patch_spec
from lockstep.kube.kinds import path_of
from lockstep.kube.outage import Outage
from lockstep.kube.threads import in_thread
from lockstep.plan.pages.logs import LogSelection, layout_of, no_such_node, nodes_of
from lockstep.platforms.jobs.observe import JobObserver, operator_unheard
from lockstep.platforms.output import say, tell
from lockstep.platforms.places.backend import Backend
from lockstep.platforms.places.common import CommonJob, tell_if_suspended
from lockstep.platforms.places.orders import lack
from lockstep.platforms.places.values import JobGone, Say, Spot, Use, Volume, Words

if TYPE_CHECKING:
    from lockstep.plan.observed import Observed
    from lockstep.plan.pages.stacks import RankAnswer
    from lockstep.plan.pages.why import Answer, ClusterHome
    from lockstep.platforms.clusters.target import Target
    from lockstep.platforms.jobs.looks import Looks
    from lockstep_gang.contract.layout import RankLayout

T = TypeVar("T")
FILL_SECONDS = 86400
"""Lifetime of a pod that downloads: enough for a model of a terabyte over a slow link."""
WATCH_SECONDS = 2.0
"""Between two looks at a pod that is kept open."""


@dataclass(frozen=True)
class KubernetesJob(CommonJob):
    """A job as the API server has it."""

    target: Target
    job: Object
    backend: Backend

    @property
    def namespace(self) -> str:
        return str(self.job["metadata"]["namespace"])

    @property
    def at(self) -> str:
        return f"{self.name} -n {self.namespace}{self.target.options}"

    @property
    def home(self) -> ClusterHome | None:
        """Return the job's cluster and the namespace of its jobs, as a cluster file states them; None where none does."""
        named = self.job["spec"].get("cluster") or (None if self.target.is_stand_in else self.target.cluster)
        return self.target.files.home(named) if named else None

    def run(self, work: Callable[[Cluster], Coroutine[Any, Any, T]]) -> T:
        """Return the result of `work`, done on a connection to the job's cluster that ends with it."""
        return self.target.client.run(work)

    def node(self, cluster: Cluster, number: int) -> PodPlace:
        """Return the container of a node's ranks."""
        return PodPlace(cluster, self.namespace, pod_name(self.name, number), CONTAINER)

    def layout(self) -> RankLayout:
        from lockstep.platforms.jobs.runs import frozen_run

        nodes = nodes_of(self.job) or int(self.run(lambda cluster: frozen_run(cluster, self.job)).get("nodes", 0))
        return layout_of(self.status.get("ranks") or {}, nodes)

    def stacks(self, rank: int | None) -> list[RankAnswer]:
        from lockstep.platforms.jobs.runs import ask_ranks

        return self.run(lambda cluster: ask_ranks(cluster, self.job, rank))

    def seen(self) -> KubernetesJob:
        """Return a run of --in-namespace with its status; any other job as it is."""
        return replace(self, job=seen_runs(self.target, [self.job])[0]) if is_run(self.job) else self

    def look_again(self, before: Object | None = None) -> Object:
        if not is_run(self.job):
            return current_status(self.same(get_job(self.target.client, self.namespace, self.name)))
        status = self.seen().status
        if before is not None and has_no_pods(status) and not has_no_pods(before):  # (its volume is read once: a reader holds it)
            return replace(self, job=seen_runs(self.target, [self.job], read=True)[0]).status
        return status

    def same(self, found: Object | None) -> Object:
        """Return what the API server has under its name. Raises JobGone where that is nothing, or a job that was created since."""
        if found is None or uid_of(found) != self.uid:
            raise JobGone(self.name, found)
        return found

    def answer(self, bundle: Path | None) -> Answer:
        return self.run(lambda connection: _answer(connection, self, bundle))

    @property
    def pods(self) -> Target:
        return replace(self.target, namespace=self.namespace)

    def refuse_idle(self) -> None:
        """Raise ConfigError where no node waits for what it is asked to run, with what to do about it."""
        name, status = self.name, self.status
        if self.job["spec"].get("type") != "Interactive":
            raise ConfigError(f"job {name} is a Batch job: scripts run only in jobs of type Interactive")
        if is_true(status, "Failed"):
            raise ConfigError(f"{name} has failed: {condition(status, 'Failed')['message']}: lockstep retry {self.at}")
        stopped = condition(status, "Suspended")
        if stopped.get("status") == "True" or stopped.get("reason") == "Stopping":
            raise ConfigError(f"{name} has no pods now: bring it back with lockstep resume {self.at}")
        progress = condition(status, "Progressing")
        if progress.get("status") == "False":
            raise ConfigError(f"{name} can't run anything now: {progress['message']}: lockstep why {self.at}")

    def stop_script(self) -> int:
        """Stop it as a person would in the job's pod."""
        from lockstep.platforms.jobs.terminal import run_on_all_nodes

        self.refuse_idle()
        command = ["python3", "-I", AGENT_PATH, "stop"]
        return self.run(lambda cluster: run_on_all_nodes(self.node(cluster, 0), command))

    def suspend(self, *, now: bool = False) -> bool:
        if now:
            raise lack(KUBERNETES, "--now", job=self.name, again=f"-n {self.namespace}")
        if is_run(self.job):
            self.delete()
            return True
        return self._set_suspend(suspended=True)

    def resume(self) -> bool:
        return self._set_suspend(suspended=False) or self._take_back()

    def _set_suspend(self, *, suspended: bool) -> bool:
        if bool(self.job["spec"].get("suspend", False)) == suspended:
            return False
        self.patch({"suspend": suspended})
        return True

    def _take_back(self) -> bool:
        """Ask for the GPUs of a dev environment that nobody used. Return True if they had been released."""
        if "released" not in (self.status.get("interactive") or {}):
            return False
        self.raise_retry()
        return True

    def raise_retry(self) -> int:
        number = int(self.job["spec"].get("restart", {}).get("retry", 0)) + 1
        self.patch({"restart": {"retry": number}})
        return number

    def patch(self, spec: Object) -> None:
        """Change fields of its spec; what the API server refuses is raised in its words."""
        if is_run(self.job):
            raise ConfigError(
                f"{self.name} runs without the operator (run --in-namespace): lockstep stop {self.at}, then start its changed file the same"
                f" way, to {go_on_words(self.job)}"
            )
        patch_spec(self.target.client, self.namespace, self.name, spec)

    def delete(self) -> str:
        if is_run(self.job):  # all but the claims is its ConfigMap's, and goes with it
            self.target.client.request("DELETE", path_of("ConfigMap", self.namespace, self.status["run"]["name"]))
            return "its claims stay"
        try:
            self.run(lambda cluster: delete_job(cluster, self.namespace, self.name))
        except TimeoutError as error:
            raise Failed(str(error)) from error
        return "its claims stay"

    async def lines(
        self, selection: LogSelection, say: Say, *, follow: bool = False, watch: Callable[[Object], object] = has_ended
    ) -> AsyncGenerator[str, None]:
        """Yield the lines as `Job.lines` does. `watch` gets the status whenever there is no log to follow."""
        from lockstep.platforms.jobs import logs

        printed = False
        async with self.target.client.connected() as cluster:
            if follow:
                async for line in logs.follow(cluster, self.namespace, self.name, selection, _Over(cluster, self, say, watch)):
                    printed = True
                    yield line
            if not printed:
                async with aclosing(logs.lines(cluster, self.job, selection, say)) as output:
                    async for line in output:
                        yield line

    def running_pod(self, node: int) -> str:
        """Return the name of a node's pod. Raises ConfigError for a node that the job doesn't have, Failed when its pod doesn't run."""
        name, default = pod_name(self.name, node), self.target.files.default_nodes(self.target.cluster)
        nodes = int(self.job["spec"].get("nodes") or (default[1] if default else 0))
        if node >= nodes > 0:
            raise no_such_node(self.name, node, nodes)
        try:
            pod = self.target.client.request("GET", path_of("Pod", self.namespace, name))
        except ApiError as error:
            if error.status != NOT_FOUND:
                raise
            if has_ended(self.status):
                has_left = f"lockstep logs {self.at} and lockstep cp read what it has left"
                raise Failed(f"job {self.name} has ended and pod {name} is gone: {has_left}") from None
            raise Failed(f"pod {name} is not there: lockstep why {self.at}") from None
        if not is_running(pod) or "deletionTimestamp" in pod["metadata"]:
            state = "ends" if "deletionTimestamp" in pod["metadata"] else f"is {pod['status'].get('phase', 'unknown')} and doesn't run yet"
            raise Failed(f"pod {name} {state}: lockstep why {self.at}")
        return name

    @asynccontextmanager
    async def spot(self, node: int, *, ports: bool) -> AsyncIterator[Spot]:
        from lockstep.kube.forward import forwarded
        from lockstep.platforms.jobs.editor import attach_command, refuse_without_rights

        pod, namespace, client = await in_thread(partial(self.running_pod, node)), self.namespace, self.target.client
        async with client.connected() as cluster:

            def way(there: int, here: int) -> AbstractAsyncContextManager[int]:
                return forwarded(cluster, namespace, pod, there, here, say)

            async def desktop(folder: str) -> str:
                found = await cluster.get("Pod", namespace, pod)
                return "" if found is None else attach_command(client.kubeconfig, self.target.context, found, CONTAINER, folder)

            if ports:
                await refuse_without_rights(cluster, namespace)
            yield Spot(pod, Volume(self.node(cluster, node), WORKSPACE, DATASETS), way, desktop, None, lambda: self._until_gone(node))

    async def _until_gone(self, node: int) -> None:
        """Wait until the node's pod doesn't run any more, and raise Failed then."""
        outage = Outage(say)
        while await in_thread(lambda: outage.ask(lambda: self.running_pod(node), "away")):  # noqa: ASYNC110 (nothing here tells of it)
            await asyncio.sleep(WATCH_SECONDS)

    def nodes_with_volumes(self) -> list[int]:
        from lockstep.platforms.files.reader import nodes_with_volumes

        return self.run(lambda cluster: nodes_with_volumes(cluster, self.namespace, self.name))

    @asynccontextmanager
    async def volume(self, node: int, say: Say, use: Use = Use.READ, gpus: int = 0) -> AsyncIterator[Volume]:
        async with self.target.client.connected() as cluster, self._pod_for(cluster, node, say, use, gpus) as place:
            yield Volume(place, WORKSPACE, DATASETS)

    def _pod_for(self, cluster: Cluster, node: int, say: Say, use: Use, gpus: int) -> AbstractAsyncContextManager[PodPlace]:
        """Return the container that sees a node's files for this use: in a pod of its own where the ranks' isn't there, or won't do."""
        from lockstep.platforms.files.reader import beside
        from lockstep.platforms.files.results import idle_or_own_pod

        if use is Use.RANKS:
            return nullcontext(self.node(cluster, node))
        if use is Use.MODEL:
            return idle_or_own_pod(cluster, self.namespace, self.name, gpus, say)
        if use is Use.FILL:  # (with its variables from Secrets)
            return beside(cluster, self.namespace, self.name, node, seconds=FILL_SECONDS, secrets=True, say=say)
        return beside(cluster, self.namespace, self.name, node, say=say)


def seen_runs(target: Target, runs: Sequence[Object], *, read: bool = False) -> list[Object]:
    """Return runs of --in-namespace with their status, all looked at over one connection. `read`: as `observe_run` takes it."""
    if not runs:
        return []
    from lockstep.platforms.kubernetes.status import observe_run

    async def observed(cluster: Cluster) -> list[Object]:
        look = JobObserver(cluster)
        return [one.job for one in await asyncio.gather(*(observe_run(look, cluster, run, read=read) for run in runs))]

    return target.client.run(observed)


class _Over:
    """Answers whether a job that is followed has ended."""

    def __init__(self, cluster: Cluster, job: KubernetesJob, say: Say, watch: Callable[[Object], object]) -> None:
        self._cluster, self._job, self._say, self._watch = cluster, job, say, watch
        self._reason, self._outage = "", Outage(say)

    async def __call__(self) -> bool:
        from lockstep.plan.ahead.submission import standstill
        from lockstep.platforms.jobs.logs import has_run_ended

        try:
            if is_run(self._job.job):
                return await has_run_ended(self._cluster, self._job.namespace, self._job.name)
            found = await self._cluster.get("TrainingJob", self._job.namespace, self._job.name)
        except Failed as error:
            if not self._outage.passes(error):
                raise
            return False
        self._outage.over()
        status = current_status(self._job.same(found))
        self._watch(status)
        if (still := standstill(status)) and not is_true(status, "Suspended"):
            raise Failed(f"job {self._job.name} has no log to come: {still}")
        self._reason = tell_if_suspended(self._job, status, self._reason, self._say)
        return has_ended(status)


async def _answer(connection: Cluster, job: KubernetesJob, bundle: Path | None) -> Answer:
    from lockstep.plan.pages.why import answer_page, is_awaited
    from lockstep.plan.pages.why import why as answer_of
    from lockstep.platforms.clusters.facts import unserved
    from lockstep.platforms.jobs.logs import unheard_lines
    from lockstep.platforms.kubernetes.status import observe_run

    look, unheard, lacks = JobObserver(connection), None, ""
    if is_run(job.job):
        observed = await observe_run(look, connection, job.job, read=True)
    else:
        observed, unheard, lacks = await asyncio.gather(
            look.at(job.job), operator_unheard(connection, job.namespace), unserved(connection, job.namespace)
        )
    answer = answer_of(observed, tuple(look.not_seen), time.time(), lacks, unheard, job.home)
    if is_run(job.job):
        retry = f"lockstep retry -f FILE --in-namespace -n {job.namespace}{job.target.options}"
        steps = (replace(step, command=re.sub(r"^lockstep (retry|resume) .*", retry, step.command)) for step in answer.next)
        answer = replace(answer, next=tuple(steps))
    if is_awaited(observed) or answer.stale:
        answer = replace(answer, says=tuple(await unheard_lines(connection, job.namespace, observed.pods)))
    if bundle is not None:
        await _write(bundle, connection, observed, answer_page(answer))
    return answer


async def _write(path: Path, connection: Cluster, observed: Observed, answer: str) -> None:
    from lockstep.platforms.jobs.bundle import write_bundle

    try:
        missing = await write_bundle(path, connection, observed, answer)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
    tell(f"wrote {path}" + (f"; not in it: {'; '.join(missing)}" if missing else ""))


def words_in(namespace: str, options: str = "") -> Words:
    """Return the words for a namespace. `options`: those of its target."""
    return Words(f"-n {namespace}{options}", f"in namespace {namespace}", noun="TrainingJob", elsewhere="-n names another namespace")


async def known_job(cluster: Cluster, namespace: str, name: str, hint: str = "") -> None:
    """Refuse a job that doesn't exist. Raises ConfigError, which names the jobs that do, and ends with the hint."""
    from lockstep.platforms.clusters.remove import JOB, all_of

    if await cluster.get("StatefulSet", namespace, name) is not None:
        return
    names = [str(job["metadata"]["name"]) for job in await all_of(cluster, JOB, namespace)]
    if name not in names:
        raise ConfigError(f"{words_in(namespace).no_such_job(name, names)}{hint}")


async def looks_of_job(job: KubernetesJob, interval: float, *, live: bool) -> Looks:
    from lockstep.plan.pages.top import snapshot
    from lockstep.platforms.files.results import run_folder
    from lockstep.platforms.jobs.looks import CURVE_POINTS, Curve, Look, page_lines, with_age
    from lockstep.platforms.jobs.top import NodesWatch, curve_on_volume, nodes_in_pods, of_job, pods_of

    name, namespace = job.name, job.namespace
    curve = Curve()
    measuring = (lambda line: None) if live else say
    async with (
        job.target.client.connected() as cluster,
        NodesWatch(nodes_in_pods(cluster, namespace, name), of_job(name, run_folder(name)), measuring) as nodes,
    ):
        ask = nodes.ask if live else nodes.ask_all
        while True:
            answers, status, pods, silent = await asyncio.gather(
                ask(curve.points()),
                in_thread(job.look_again),
                pods_of(cluster, namespace, name),
                operator_unheard(cluster, namespace),
            )
            curve.take(answers.get(0, {}))
            over = has_ended(status)
            if over and not curve.steps and "step" in status.get("trainer", {}):
                curve.steps = await curve_on_volume(cluster, namespace, name, CURVE_POINTS, say)
            answers.setdefault(0, {})["curve"] = curve.steps
            page = with_age(snapshot({**job.job, "status": status}, pods, answers), None if over or is_run(job.job) else silent)
            yield Look(page, page_lines(page), over)
            await asyncio.sleep(interval)
