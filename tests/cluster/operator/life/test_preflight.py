"""Preflight on a real cluster: jobs with an input, or a package, that isn't there."""

from __future__ import annotations

from support.clusters.cluster_jobs import API, Jobs, until


def test_data_that_is_missing_fails_the_job_before_any_rank_and_names_node_and_fix(jobs: Jobs) -> None:
    training = {"model": {"name": "/workspace"}, "data": {"path": "/datasets/nowhere.jsonl"}}
    spec = {"nodes": 2, "training": training}
    jobs.create({"apiVersion": API, "kind": "TrainingJob", "metadata": {"name": "blind"}, "spec": spec})
    failed = jobs.until_condition("blind", "Failed", "True", "PreflightFailed")
    assert (
        "spec.training.data.path: there is no file or folder /datasets/nowhere.jsonl on node 0 (blind-0): put it there" in failed["message"]
    )
    status = jobs.job("blind")["status"]
    assert (status["attempts"], status["failure"]["cause"], status["preflight"]["ok"]) == (0, "Configuration", False)
    found = status["preflight"]["findings"]
    assert [(f["check"], f["severity"], f["node"]) for f in found] == [("paths", "Error", 0), ("paths", "Error", 1)]
    assert len({f["nodeName"] for f in found}) == 2
    log = until("the last lines", lambda: jobs.get("ConfigMap", "blind-log"))["data"]["node-0.log"]
    assert log.count("[lockstep] preflight: ") == 1, log  # waiting wouldn't help, so it isn't made again
    until("an event says so", lambda: "PreflightFailed" in reasons(jobs, "blind"))
    jobs.end("blind")


def reasons(jobs: Jobs, name: str) -> set[str]:
    events = jobs.kind("Event").get(namespace=jobs.namespace).to_dict()["items"]
    return {event["reason"] for event in events if event["involvedObject"]["name"] == name}


def test_an_image_without_the_trainer_fails_the_job_while_other_nodes_are_waited_for(jobs: Jobs) -> None:
    """Three nodes of which the cluster has two; the ranks' Python finds no packages, as in an image that Lockstep didn't build."""
    training = {"model": {"name": "/workspace"}, "data": {"path": "/datasets"}}
    spec = {"nodes": 3, "training": training, "env": [{"name": "PYTHONPATH", "value": "/nowhere"}]}
    jobs.create({"apiVersion": API, "kind": "TrainingJob", "metadata": {"name": "foreign"}, "spec": spec})
    failed = jobs.until_condition("foreign", "Failed", "True", "PreflightFailed")
    assert "has no trainer (No module named 'lockstep_" in failed["message"] and "lockstep build trainer" in failed["message"]
    status = jobs.job("foreign")["status"]
    assert (status["attempts"], status["failure"]["cause"], status["preflight"]["ok"]) == (0, "Setup", False)
    assert {finding["check"] for finding in status["preflight"]["findings"]} == {"trainer"}
    jobs.end("foreign")
