"""`lockstep run -f` on a cluster: create the TrainingJob, and follow it or leave it to the operator."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from contextlib import aclosing

from lockstep.api.errors import ConfigError, Failed
from lockstep.api.job import TrainingJob
from lockstep.api.objects import Object, condition, current_status, has_ended, is_true
from lockstep.kube.cluster import CONFLICT, INVALID, NOT_FOUND, ApiError, Cluster
from lockstep.kube.jobs import runs_without_operator, with_last_applied
from lockstep.kube.outage import Outage
from lockstep.plan.ahead.submission import SubmittedAs, SubmittedState, name_taken, standing
from lockstep.plan.cluster.scope import NO_OPERATOR
from lockstep.plan.pages.logs import LogSelection
from lockstep.plan.render.resolve import refuse_missing_gpus
from lockstep.platforms.clusters.facts import unserved
from lockstep.platforms.clusters.target import Target
from lockstep.platforms.jobs.observe import operator_unheard
from lockstep.platforms.jobs.resolved import resolve_with_warnings
from lockstep.platforms.kubernetes.job import KubernetesJob
from lockstep.platforms.output import put, say
from lockstep.platforms.places.backend import Backend
from lockstep.platforms.places.orders import Order
from lockstep.platforms.places.values import POLL_SECONDS, JobGone
from lockstep_spec.exits import FAILED
from lockstep_spec.words import number_of

LASTS_SECONDS = 2.0
"""Time for which a job must be in one state before that is said: a start passes through several."""
UNSEEN_SECONDS = 20.0
"""Time after which you should know that no operator has looked at the job."""
ANNOTATION_CHARACTERS_MAX = 200 << 10
"""The API server takes 256 KiB of annotations in all."""


def run_on_cluster(order: Order, target: Target, backend: Backend) -> int:
    """Hand the job to the operator of its cluster, and return its exit code. Raises as `submit` does, and ConfigError for a job that names
    another cluster, or can't run on this one.
    """
    job, cluster, typed = order.job, order.cluster.cluster.name, order.typed
    if typed.cluster and job.spec.cluster not in (None, cluster):
        raise ConfigError(
            f"{typed.file}: spec.cluster is {job.spec.cluster}, but --cluster is {cluster}: leave out --cluster, or say --set"
            f" cluster={cluster}"
        )
    if job.spec.cluster is None and not target.is_stand_in:  # the operator must take the cluster that is checked here
        job = job.model_copy(update={"spec": job.spec.model_copy(update={"cluster": cluster})})
    if target.is_known:  # (a cluster file that stands in for the kubeconfig's cluster says nothing about that one)
        refuse_missing_gpus(resolve_with_warnings(job, order.cluster, target.namespace))
    place = f"cluster {cluster}" if target.is_known else f"the cluster at {target.client.server}"
    return submit(job, target, SubmittedAs(typed, cluster, target.namespace, place, target.options), order, backend)


def submit(wanted: TrainingJob, target: Target, submitted: SubmittedAs, order: Order, backend: Backend) -> int:
    """Create the job, or find the same one that runs, and return its exit code: 0 complete, 1 failed. Ctrl-C ends the output only.

    A detached order returns once the operator has accepted it. A dev environment is not followed: it has no end.

    Raises:
        ConfigError: the API server or the operator refuses the job as it is written, or another job has its name.
        Failed: no operator works there, or the job is not accepted for another reason.
    """
    name, namespace = wanted.metadata.name, target.namespace
    if runs_without_operator(target.client, namespace, name):
        raise ConfigError(
            f"namespace {namespace} has a run {name} without the operator (run --in-namespace), and nothing was created: give this job"
            f" another name, or remove the run first (lockstep delete {name} -n {namespace}{target.options}; its claims stay)"
        )
    job, is_new = target.client.run(lambda cluster: _find_or_create(cluster, wanted, target, submitted, backend))
    if not is_new:
        follows = "" if order.detach else ": this follows it"
        say(f"job {job.name} is in namespace {job.namespace} already, as {order.typed.file} describes it, and has not ended{follows}")
    watch = StartWatch(job, submitted, is_new=is_new)
    try:
        if order.detach:
            _until(job, watch, lambda now: now.accepted)
            say(f"the operator has accepted job {job.name}")
            return 0
        if wanted.spec.type == "Interactive":
            _until(job, watch, lambda now: now.is_ready)
            say(f"{job.name} is ready: lockstep run --job {job.at} SCRIPT runs a script on all its nodes")
            return 0
        return asyncio.run(_follow(job, watch))
    except (KeyboardInterrupt, SystemExit):  # SystemExit: by SIGTERM, or a terminal that was closed
        say(f"job {job.name} goes on: lockstep logs {job.at} -f shows it again, lockstep stop {job.at} saves and stops it")
        raise


async def _find_or_create(
    cluster: Cluster, wanted: TrainingJob, target: Target, submitted: SubmittedAs, backend: Backend
) -> tuple[KubernetesJob, bool]:
    """Return the job on the cluster, and whether it was created. Raises ConfigError, Failed."""
    name, namespace = wanted.metadata.name, target.namespace
    existing = await cluster.get("TrainingJob", namespace, name)
    if existing is None:
        await _look_for_operator(cluster, namespace)
        try:
            job = KubernetesJob(target, await cluster.create(_document(wanted, namespace)), backend)
        except ApiError as error:
            if error.status != CONFLICT:
                raise _explained(error, submitted.typed.file, namespace) from error
            existing = await cluster.get("TrainingJob", namespace, name)
        else:
            nodes = f" ({number_of(wanted.spec.nodes, 'node')})" if wanted.spec.nodes else ""
            follow = f"lockstep logs {job.at} -f"
            say(f"job {name}{nodes} is created in namespace {namespace} of {submitted.place}; it goes on without this terminal: {follow}")
            return job, True
    if existing is None:
        raise Failed(f"job {name} of namespace {namespace} was deleted meanwhile: repeat {submitted.again()}")
    taken = name_taken(wanted, existing, submitted)
    if taken:
        raise ConfigError(*taken)
    return KubernetesJob(target, existing, backend), False


def _document(wanted: TrainingJob, namespace: str) -> Object:
    """Return the TrainingJob as `kubectl apply` would create it."""
    written = wanted.written()
    document = {**written, "metadata": {**written["metadata"], "namespace": namespace}}
    return with_last_applied(document) if len(json.dumps(document)) < ANNOTATION_CHARACTERS_MAX else document


async def _look_for_operator(cluster: Cluster, namespace: str) -> None:
    """Raise Failed where no operator would start a job of this namespace. Say so where the one that does is silent."""
    reason, unheard = await asyncio.gather(unserved(cluster, namespace), operator_unheard(cluster, namespace))
    if reason:
        raise Failed(f"nothing was created: {reason}")
    if unheard is not None:
        say(f"warning: {unheard.why} since {unheard.since}: the job waits for it (lockstep doctor -n {namespace})")


def _explained(error: ApiError, file: str, namespace: str) -> Exception:
    """Return the API server's refusal of the job as a person can use it."""
    if error.status == INVALID:
        return ConfigError(f"{file}: the API server refuses it: {error.message}")
    if error.status != NOT_FOUND:
        return error
    if "namespaces" in error.message:
        return Failed(f"there is no namespace {namespace}: name another one with -n, or create it (kubectl create namespace {namespace})")
    return Failed(f"this cluster doesn't know TrainingJobs: {NO_OPERATOR}")


class NotAccepted(Failed):
    """The job waits until something other than the job is corrected."""


class StartWatch:
    """Tells what a job waits for if the wait lasts, and ends the wait if the job can't start."""

    def __init__(self, job: KubernetesJob, submitted: SubmittedAs, *, is_new: bool) -> None:
        """`is_new`: the job was created for this, so that it is removed again if it is refused before it was ever accepted."""
        self._job, self._submitted, self._is_new = job, submitted, is_new
        self._since = self._line_since = time.monotonic()
        self._line, self._is_said, self._is_unseen, self._was_accepted = "", False, False, False
        self.status: Object = {}
        """Newest status that was seen."""

    def __call__(self, status: Object) -> SubmittedState:
        """Raises ConfigError where the operator refuses the job as it is written, NotAccepted where it can't start until somebody helps."""
        now, job = standing(status), self._job
        self.status = status
        if now.accepted or status.get("startTime"):
            self._is_new, self._was_accepted = False, True
        starts_by_itself = not now.is_final or (now.is_of_cluster and not self._is_new)
        if now.refused and starts_by_itself and not (now.passes or self._was_accepted):
            raise NotAccepted(f"job {job.name} is not accepted yet: {now.refused}; it starts by itself then: lockstep why {job.at}")
        if now.refused and not starts_by_itself:
            raise ConfigError(f"the operator refuses job {job.name}: {now.refused}; {self._after_refusal(now)}")
        if now.line != self._line:
            self._line, self._line_since, self._is_said = now.line, time.monotonic(), False
        lasts = time.monotonic() - self._line_since >= LASTS_SECONDS
        if now.line and lasts and not (self._is_said or has_ended(status) or is_true(status, "Suspended")):
            self._is_said = True
            say(f"{job.name}: {now.line}{f': lockstep why {job.at}' if now.refused else ''}")
        if not (now.line or self._is_unseen) and time.monotonic() - self._since > UNSEEN_SECONDS:
            self._is_unseen = True
            say(f"no operator has looked at job {job.name} for {UNSEEN_SECONDS:.0f} s: lockstep doctor -n {job.namespace}")
        return now

    def _after_refusal(self, now: SubmittedState) -> str:
        """Remove a new job that is refused: it has no pods, and would be in the way of the corrected one. Return what became of it, and
        what to do.
        """
        job, file = self._job, self._submitted.typed.file
        if self._is_new:
            try:
                job.run(lambda cluster: cluster.delete("TrainingJob", job.namespace, job.name, job.uid))
            except Failed:  # (not everybody who may create jobs may delete them)
                pass
            else:
                mend = "once the cluster is right:" if now.is_of_cluster else f"correct {file}, then"
                return f"it was removed again: {mend} {self._submitted.again()}"
        if now.is_of_cluster:
            return f"it stays there, and starts by itself once the cluster is right, or lockstep delete {job.at}"
        there = job.job["spec"].get("cluster")
        return f"it stays there: correct {file}, then {self._submitted.apply(there, there)}, or lockstep delete {job.at} and run it again"


def _until(job: KubernetesJob, watch: StartWatch, reached: Callable[[SubmittedState], bool]) -> None:
    """Wait until the job has come so far, or has ended. Raises as `watch` does, and Failed where the job has failed, or is suspended."""
    status, outage = current_status(job.job), Outage(say)
    while True:
        now = watch(status)
        if reached(now) or is_true(status, "Complete"):
            return
        if is_true(status, "Failed"):
            raise Failed(_failed(job, status))
        if is_true(status, "Suspended"):
            raise Failed(f"job {job.name} is suspended, and doesn't go on by itself: {condition(status, 'Suspended')['message']}")
        time.sleep(POLL_SECONDS)
        status = outage.ask(job.look_again, status)


async def _follow(job: KubernetesJob, watch: StartWatch) -> int:
    trouble: Failed | ConfigError | None = None
    try:
        async with aclosing(job.lines(LogSelection(), say, follow=True, watch=watch)) as lines:
            async for line in lines:
                put(line, flush=True)
    except (Failed, ConfigError) as error:  # (also of a job that has ended before it had a log)
        trouble = error
    status = watch.status
    if trouble is not None and not has_ended(status):
        if isinstance(trouble, (ConfigError, JobGone, NotAccepted)):
            raise trouble
        raise Failed(f"{trouble}; job {job.name} goes on: lockstep logs {job.at} -f") from trouble
    if is_true(status, "Failed"):
        say(_failed(job, status))
        return FAILED
    say(f"job {job.name} is complete: lockstep describe {job.at} shows where its results are")
    return 0


def _failed(job: KubernetesJob, status: Object) -> str:
    return f"job {job.name} has failed: {condition(status, 'Failed').get('message', '')}: lockstep why {job.at}"
