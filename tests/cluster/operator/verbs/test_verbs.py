"""The verbs about a job, typed by a person: on a real cluster, and where there is nothing to act on."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import yaml

from support.clusters.cluster_jobs import Jobs, until
from support.in_process import Told
from support.in_process import lockstep as typed


def lockstep(jobs: Jobs, *arguments: str, namespaced: bool = True) -> Told:
    """Type the verb in the jobs' namespace."""
    return typed(*arguments, *(["-n", jobs.namespace] if namespaced else []))


@pytest.fixture(scope="module")
def running(jobs: Jobs) -> Iterator[str]:
    jobs.start("verbs")
    jobs.until_running("verbs")
    yield "verbs"
    jobs.end("verbs")


def test_a_job_is_listed_described_and_waited_for(jobs: Jobs, running: str) -> None:
    assert lockstep(jobs, "wait", running, "--for", "Running", "--timeout", "30").returncode == 0
    table = lockstep(jobs, "get").stdout.splitlines()
    assert table[0].split()[0] == "NAME" and "Running" in next(line for line in table if line.startswith(running))
    assert yaml.safe_load(lockstep(jobs, "get", running, "-o", "yaml").stdout)["metadata"]["name"] == running
    assert json.loads(lockstep(jobs, "get", "-o", "json").stdout)["kind"] == "List"
    page = lockstep(jobs, "describe", running).stdout
    assert "2 of 2 ready, on 2 of 2 nodes" in page and "RanksReady" in page
    until("the event", lambda: "2 of 2 ranks ready" in lockstep(jobs, "events", running).stdout)


def test_a_job_is_stopped_and_goes_on(jobs: Jobs, running: str) -> None:
    stopped = lockstep(jobs, "stop", running)
    assert stopped.returncode == 0, stopped.stderr
    assert jobs.pods(running) == []
    assert "is stopped already" in lockstep(jobs, "stop", running, "--no-wait").stdout
    assert lockstep(jobs, "wait", running, "--for", "Running", "--timeout", "1").returncode == 1
    assert "goes on" in lockstep(jobs, "resume", running).stdout
    jobs.until_running(running)


def test_a_new_number_of_nodes_reaches_the_spec(jobs: Jobs, running: str) -> None:
    assert "has 2 nodes already" in lockstep(jobs, "scale", running, "--nodes", "2").stdout
    told = lockstep(jobs, "scale", running, "--nodes", "1")
    assert "2 → 1 node;" in told.stdout, told.stderr
    assert jobs.job(running)["spec"]["nodes"] == 1


def test_a_job_that_runs_is_deleted_only_when_that_is_meant(jobs: Jobs) -> None:
    jobs.start("doomed", suspend=False)
    refused = lockstep(jobs, "delete", "doomed")
    assert refused.returncode == 2 and "has not ended: use --yes" in refused.stderr
    done = lockstep(jobs, "delete", "doomed", "--yes")
    assert done.returncode == 0 and "its claims stay" in done.stdout, done.stderr
    assert jobs.job("doomed") == {}
    until("the pods are gone", lambda: not jobs.pods("doomed"))


@pytest.mark.parametrize(
    "verb",
    [
        ["get"],
        ["describe"],
        ["events"],
        ["wait"],
        ["stop", "--no-wait"],
        ["resume"],
        ["stop"],
        ["scale", "--nodes", "2"],
        ["delete"],
        ["logs"],
        ["top"],
        ["diff-runs", "x"],
    ],
)
def test_a_name_that_nobody_has_is_told_with_the_names_there_are(jobs: Jobs, running: str, verb: list[str]) -> None:
    told = lockstep(jobs, verb[0], "verb", *verb[1:])
    assert told.returncode == 2
    assert f"there is no TrainingJob verb in namespace {jobs.namespace}" in told.stderr and "did you mean verbs?" in told.stderr
