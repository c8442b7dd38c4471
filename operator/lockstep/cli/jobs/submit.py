"""`lockstep run -f` on a cluster: create the TrainingJob, and follow it or leave it to the operator."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from lockstep.api.errors import ConfigError, Failed
from lockstep.api.objects import Object, condition, current_status, has_ended, is_true
from lockstep.cli.shared.inputs import FRESH, resolve_inputs
from lockstep.kube.outage import Outage
from lockstep.platforms.backend import POLL_SECONDS, JobGone
from lockstep.platforms.kubernetes.backend import KubernetesJob
from lockstep.platforms.output import put, say
from lockstep_spec.exits import FAILED
from lockstep_spec.words import number_of

if TYPE_CHECKING:
    from lockstep.cli.shared.inputs import Inputs
    from lockstep.cli.shared.jobargs import TargetOptions
    from lockstep.kube.cluster import ApiError, Cluster
    from lockstep.plan.ahead.submission import SubmittedAs, SubmittedState
    from lockstep.platforms.kubernetes.target import Target

LASTS_SECONDS = 2.0
"""Time for which a job must be in one state before that is said: a start passes through several."""
UNSEEN_SECONDS = 20.0
"""Time after which you should know that no operator has looked at the job."""
ANNOTATION_CHARACTERS_MAX = 200 << 10
"""The API server takes 256 KiB of annotations in all."""


class Options(NamedTuple):
    """Options of `lockstep run -f`, as they were typed."""

    file: str
    where: TargetOptions
    changes: tuple[str, ...]
    """Values of --set, with those that other options stand for."""

    def to_same_place(self) -> tuple[str, ...]:
        """Return the options that lead to the same job again, without --context and --fresh."""
        stated = {"--cluster": self.where.cluster, "-n": self.where.namespace}
        named = [word for option, value in stated.items() if value for word in (option, value)]
        return (*named, *(word for change in self.changes if change != FRESH for word in ("--set", change)))


def run_on_cluster(inputs: Inputs, options: Options, *, detach: bool) -> int:
    """Hand the job to the operator of its cluster, and return its exit code. Raises as `submit` does, and ConfigError for a job that names
    another cluster, or can't run on this one.
    """
    from lockstep.cli.shared.target import as_found, is_embedded, target_of
    from lockstep.plan.ahead.submission import SubmittedAs
    from lockstep.plan.render.resolve import refuse_missing_gpus

    job, cluster, where = inputs.job, inputs.cluster.cluster.name, options.where
    verb = where.verb
    if where.cluster and job.spec.cluster not in (None, cluster):
        raise ConfigError(
            f"{options.file}: spec.cluster is {job.spec.cluster}, but --cluster is {cluster}: leave out --cluster, or say --set"
            f" cluster={cluster}"
        )
    if job.spec.cluster is None and verb.unnamed is None:  # the operator must take the cluster that is checked here
        inputs = replace(inputs, job=job.model_copy(update={"spec": job.spec.model_copy(update={"cluster": cluster})}))
    is_known = verb.unnamed is None or is_embedded(verb, cluster)
    target = target_of(verb, where.cluster or as_found(verb, inputs.cluster), where.namespace or job.metadata.namespace)
    inputs = replace(inputs, namespace=target.namespace)
    if is_known:  # (a cluster file that stands in for the kubeconfig's cluster says nothing about that one)
        refuse_missing_gpus(resolve_inputs(inputs))
    place = f"cluster {cluster}" if is_known else f"the cluster at {target.client.server}"
    fresh = (FRESH,) if FRESH in options.changes else ()
    typed = SubmittedAs(options.file, cluster, target.namespace, place, options.to_same_place(), target.options, where.context, fresh)
    return submit(inputs, target, typed, detach=detach)


def submit(inputs: Inputs, target: Target, typed: SubmittedAs, *, detach: bool) -> int:
    """Create the job, or find the same one that runs, and return its exit code: 0 complete, 1 failed. Ctrl-C ends the output only.

    With `detach` return once the operator has accepted it. A dev environment is not followed: it has no end.

    Raises:
        ConfigError: the API server or the operator refuses the job as it is written, or another job has its name.
        Failed: no operator works there, or the job is not accepted for another reason.
    """
    from lockstep.kube.jobs import runs_without_operator

    name, namespace = inputs.job.metadata.name, target.namespace
    if runs_without_operator(target.client, namespace, name):
        raise ConfigError(
            f"namespace {namespace} has a run {name} without the operator (run --in-namespace), and nothing was created: give this job"
            f" another name, or remove the run first (lockstep delete {name} -n {namespace}{target.options}; its claims stay)"
        )
    job, is_new = target.client.run(lambda cluster: _find_or_create(cluster, inputs, target, typed))
    if not is_new:
        follows = "" if detach else ": this follows it"
        say(f"job {job.name} is in namespace {job.namespace} already, as {typed.file} describes it, and has not ended{follows}")
    watch = StartWatch(job, typed, is_new=is_new)
    try:
        if detach:
            _until(job, watch, lambda now: now.accepted)
            say(f"the operator has accepted job {job.name}")
            return 0
        if inputs.job.spec.type == "Interactive":
            _until(job, watch, lambda now: now.is_ready)
            say(f"{job.name} is ready: lockstep run --job {job.at} SCRIPT runs a script on all its nodes")
            return 0
        return asyncio.run(_follow(job, watch))
    except (KeyboardInterrupt, SystemExit):  # SystemExit: by SIGTERM, or a terminal that was closed
        say(f"job {job.name} goes on: lockstep logs {job.at} -f shows it again, lockstep stop {job.at} saves and stops it")
        raise


async def _find_or_create(cluster: Cluster, inputs: Inputs, target: Target, typed: SubmittedAs) -> tuple[KubernetesJob, bool]:
    """Return the job on the cluster, and whether it was created. Raises ConfigError, Failed."""
    from lockstep.kube.cluster import CONFLICT, ApiError
    from lockstep.plan.ahead.submission import name_taken

    name, namespace = inputs.job.metadata.name, target.namespace
    existing = await cluster.get("TrainingJob", namespace, name)
    if existing is None:
        await _look_for_operator(cluster, namespace)
        try:
            job = KubernetesJob(target, await cluster.create(_document(inputs, namespace)))
        except ApiError as error:
            if error.status != CONFLICT:
                raise _explained(error, inputs, namespace) from error
            existing = await cluster.get("TrainingJob", namespace, name)
        else:
            nodes = f" ({number_of(inputs.job.spec.nodes, 'node')})" if inputs.job.spec.nodes else ""
            say(
                f"job {name}{nodes} is created in namespace {namespace} of {typed.place}; it goes on without this terminal: lockstep logs"
                f" {job.at} -f"
            )
            return job, True
    if existing is None:
        raise Failed(f"job {name} of namespace {namespace} was deleted meanwhile: repeat {typed.again()}")
    taken = name_taken(inputs.job, existing, typed)
    if taken:
        raise ConfigError(*taken)
    return KubernetesJob(target, existing), False


def _document(inputs: Inputs, namespace: str) -> Object:
    """Return the TrainingJob as `kubectl apply` would create it."""
    from lockstep.kube.jobs import with_last_applied

    written = inputs.job.written()
    document = {**written, "metadata": {**written["metadata"], "namespace": namespace}}
    return with_last_applied(document) if len(json.dumps(document)) < ANNOTATION_CHARACTERS_MAX else document


async def _look_for_operator(cluster: Cluster, namespace: str) -> None:
    """Raise Failed where no operator would start a job of this namespace. Say so where the one that does is silent."""
    from lockstep.platforms.clusters.facts import unserved
    from lockstep.platforms.jobs.observe import operator_unheard

    reason, unheard = await asyncio.gather(unserved(cluster, namespace), operator_unheard(cluster, namespace))
    if reason:
        raise Failed(f"nothing was created: {reason}")
    if unheard is not None:
        say(f"warning: {unheard.why} since {unheard.since}: the job waits for it (lockstep doctor -n {namespace})")


def _explained(error: ApiError, inputs: Inputs, namespace: str) -> Exception:
    """Return the API server's refusal of the job as a person can use it."""
    from lockstep.kube.cluster import INVALID, NOT_FOUND
    from lockstep.plan.cluster.scope import NO_OPERATOR

    if error.status == INVALID:
        return ConfigError(f"{inputs.source}: the API server refuses it: {error.message}")
    if error.status != NOT_FOUND:
        return error
    if "namespaces" in error.message:
        return Failed(f"there is no namespace {namespace}: name another one with -n, or create it (kubectl create namespace {namespace})")
    return Failed(f"this cluster doesn't know TrainingJobs: {NO_OPERATOR}")


class NotAccepted(Failed):
    """The job waits until something other than the job is corrected."""


class StartWatch:
    """Tells what a job waits for if the wait lasts, and ends the wait if the job can't start."""

    def __init__(self, job: KubernetesJob, typed: SubmittedAs, *, is_new: bool) -> None:
        """`is_new`: the job was created for this, so that it is removed again if it is refused before it was ever accepted."""
        self._job, self._typed, self._is_new = job, typed, is_new
        self._since = self._line_since = time.monotonic()
        self._line, self._is_said, self._is_unseen, self._was_accepted = "", False, False, False
        self.status: Object = {}
        """Newest status that was seen."""

    def __call__(self, status: Object) -> SubmittedState:
        """Raises ConfigError where the operator refuses the job as it is written, NotAccepted where it can't start until somebody helps."""
        from lockstep.plan.ahead.submission import standing

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
        job, file = self._job, self._typed.file
        if self._is_new:
            try:
                job.run(lambda cluster: cluster.delete("TrainingJob", job.namespace, job.name, job.uid))
            except Failed:  # (not everybody who may create jobs may delete them)
                pass
            else:
                mend = "once the cluster is right:" if now.is_of_cluster else f"correct {file}, then"
                return f"it was removed again: {mend} {self._typed.again()}"
        if now.is_of_cluster:
            return f"it stays there, and starts by itself once the cluster is right, or lockstep delete {job.at}"
        there = job.job["spec"].get("cluster")
        return f"it stays there: correct {file}, then {self._typed.apply(there, there)}, or lockstep delete {job.at} and run it again"


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
    from lockstep.plan.pages.logs import LogSelection

    trouble: Failed | ConfigError | None = None
    try:
        async with aclosing(job.follow(LogSelection(), say, watch)) as lines:
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
