"""Every fault of a cluster is done to a job of two nodes on the embedded one; `lockstep why` must name it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from corpus.of_administrators import ADMINISTRATOR_FAULTS
from corpus.of_clusters import CLUSTER_FAULTS, ClusterFault, Place
from corpus.of_the_field import FIELD_CLUSTER_FAULTS
from corpus.verdicts import Answer, Fault, Score, answer, judge
from support.checkout import ROOT
from support.clusters.cluster_jobs import API, Jobs, until

pytestmark = pytest.mark.corpus
OWN_CLUSTERS = ("no-class", "limit-range", "cluster-deleted", "much-cpu", "no-runtime-class")
UNTOLD = ("no-operator",)
KEEPS_FROM_RUNNING = ("Accepted", "PodsScheduled", "RanksReady", "Progressing")


@pytest.fixture
def place(jobs: Jobs, request: pytest.FixtureRequest) -> Iterator[Place]:
    fault: ClusterFault = request.getfixturevalue("fault")
    here = Place(jobs, fault.id)
    jobs.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": f"script-{fault.id}"}, "data": {"script.py": fault.script}})
    fault.before(here)
    try:
        jobs.create({"apiVersion": API, "kind": "TrainingJob", "metadata": {"name": fault.id}, "spec": spec_of(fault, jobs)})
        yield here
    finally:
        fault.after(here)
        jobs.end(fault.id)
        until("the job is gone", lambda: not jobs.job(fault.id), 180)


def spec_of(fault: ClusterFault, jobs: Jobs) -> dict[str, Any]:
    volume = {"name": "script", "mountPath": "/scripts", "configMap": {"name": f"script-{fault.id}"}}
    template = {"volumes": [volume], **fault.spec.get("podTemplate", {})}
    own = {"cluster": f"{jobs.namespace}-{fault.id}"} if fault.id in OWN_CLUSTERS else {}
    plain = {"nodes": 2, "script": {"path": "/scripts/script.py"}, "restart": {"maxRestarts": 0}}
    return {**plain, **own, **fault.spec, "podTemplate": template}


def asked(place: Place) -> Answer:
    command = [sys.executable, "-m", "lockstep.cli.main", "why", place.name, "-n", place.namespace, "-o", "json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.startswith("{"), done.stderr
    conditions = [place.jobs.condition(place.name, kind) for kind in KEEPS_FROM_RUNNING]
    failed = place.jobs.condition(place.name, "Failed")
    reason = (
        failed["reason"]
        if failed.get("status") == "True"
        else next((c["reason"] for c in conditions if c.get("status") in ("False", "Unknown")), "")
    )
    return answer(json.loads(done.stdout), reason)


def goes_on(place: Place) -> bool:
    """Whether another step than the one that is known now becomes known; without an operator none does."""
    if place.name in UNTOLD:
        return True
    before = step_of(place)
    try:
        return until("another step", lambda: step_of(place) not in (None, before))
    except AssertionError:
        return False


def step_of(place: Place) -> int | None:
    return ((place.jobs.job(place.name).get("status") or {}).get("trainer") or {}).get("step")


@pytest.mark.parametrize("fault", (*CLUSTER_FAULTS, *ADMINISTRATOR_FAULTS, *FIELD_CLUSTER_FAULTS), ids=lambda fault: fault.id)
def test_a_fault_of_a_cluster_is_named(fault: ClusterFault, place: Place, scored: Callable[[Fault, Score, str], None]) -> None:
    fault.meanwhile(place)
    if fault.act is not None:
        until("steps are made", lambda: step_of(place), 120)
        fault.act(place)
    end = time.monotonic() + fault.seconds
    while True:
        given = asked(place)
        score, difference = judge(fault.expected, given)
        if score is Score.RIGHT or time.monotonic() > end:
            break
        time.sleep(1)
    if score is Score.RIGHT and fault.expected.state == "Running" and not goes_on(place):
        score, difference = Score.WRONG, "no step is made any more"
    scored(fault, score, difference)
    assert score is Score.RIGHT, f"{fault.what}: {difference}\n{given}\n{place.jobs.job(place.name).get('status')}"
