"""Status of a run of `lockstep run --in-namespace`, from its objects and node 0's report file: as an operator would have written it."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import replace

from lockstep.api.errors import Failed
from lockstep.api.names import CONTAINER, pod_name
from lockstep.api.objects import NO_PODS, Object, condition, is_running
from lockstep.api.status import ConditionType
from lockstep.kube.cluster import ApiError, Cluster
from lockstep.kube.exec import NotRunning, PodPlace, looks_again
from lockstep.plan.observed import Observed, ReceivedReport
from lockstep.plan.reconcile.conditions import Ending, View
from lockstep.plan.reconcile.status import job_status
from lockstep.plan.render.objects import Frozen, thaw
from lockstep.platforms.files.reader import beside
from lockstep.platforms.jobs.keeper import exit_code
from lockstep.platforms.jobs.observe import JobObserver
from lockstep.programs import Place, answer_of, output_of
from lockstep_gang.contract.report import Report, State, parse_report
from lockstep_spec.codec import ContractError
from lockstep_spec.exits import DONE
from lockstep_spec.words import number_of


async def observe_run(look: JobObserver, cluster: Cluster, job: Object, *, read: bool = False) -> Observed:
    """Observe the run (of `runs_without_operator`) with its status. `read`: where its pods are gone, start one that reads its volume."""
    observed = await look.at(job)
    name, namespace = observed.name, observed.namespace
    config_map = observed.objects.get(("ConfigMap", job["status"]["run"]["name"]))
    stateful_set = observed.stateful_set
    if config_map is None:
        left = f"; {number_of(len(observed.pods), 'pod')} left" if observed.pods else ""
        stopped = {"status": str(not left), "reason": "Stopped", "message": f"the run is removed, its claims stay{left}"}
        return replace(observed, job={**job, "status": {"conditions": [{"type": "Suspended", **stopped}]}})
    if stateful_set is None:
        return observed
    frozen, first, report = thaw(config_map), observed.pod(0), None
    with suppress(Failed, ApiError, OSError):  # (its state by its pods alone is better than none)
        if first is not None and is_running(first):
            report = await _report(PodPlace(cluster, namespace, pod_name(name, 0), CONTAINER), frozen)
        elif read and not observed.pods:
            report = await _report_on_volume(cluster, namespace, name, frozen)
    now, end = time.time(), _ending(first, report, f"{name} -n {namespace}")
    received = None if report is None else ReceivedReport(report, "" if first is None else first["metadata"]["uid"], now)
    metadata = {**job["metadata"], "creationTimestamp": config_map["metadata"].get("creationTimestamp")}
    job = {**job, "metadata": metadata, "spec": {"nodes": frozen.nodes}}
    view = View(observed=replace(observed, job=job), wanted_pods=frozen.nodes, now=now, received=received, end=end, hears=False)
    status = job_status(view, frozen, pending=False, **dict.fromkeys(("cluster", "stop", "active", "placement", "interference")))
    if not (stateful_set["spec"].get("replicas") or observed.pods or end.finished):
        why = f"no pods: it was interrupted, waits for nodes, or has ended (lockstep why {name} -n {namespace} reads how from its volume)"
        condition(status, ConditionType.PROGRESSING).update(status="False", reason=NO_PODS, message=why)
    return replace(observed, job={**job, "status": status})


def _ending(first: Object | None, report: Report | None, at: str) -> Ending:
    """Return the run's end, without a report by node 0's exit code, as its keeper sees it: that of a container that has just ended can't be
    read.
    """
    if report is not None:
        return Ending(complete=report.state is State.COMPLETE, failed=report.state is State.FAILED, message=report.message)
    if (code := exit_code(first)) is None:
        return Ending()
    return Ending(complete=code == DONE, failed=code != DONE, message=f"node 0 ended with exit code {code}: lockstep logs {at}")


async def _report_on_volume(cluster: Cluster, namespace: str, name: str, frozen: Frozen) -> Report | None:
    began = time.monotonic()
    while True:
        try:
            async with beside(cluster, namespace, name) as place:
                return await _report(place, frozen)
        except NotRunning:
            if not await looks_again(began):
                raise


async def _report(place: Place, frozen: Frozen) -> Report | None:
    """The report that node 0 keeps in the run's folder; None for none, or one of an earlier run."""
    found = answer_of(await output_of(place, ["cat", f"{frozen.parsed.run_dir}/gang/report.json"]), place.name)
    with suppress(ContractError):
        report = parse_report(json.dumps(found.get("report")).encode())
        return report if report.job.uid == frozen.parsed.job.uid else None
    return None
