"""Unicode text and a real API server: it stores what was sent, by each way of sending, and a job whose last words are such text is told
ended.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client

from lockstep.kube.cluster import MERGE
from lockstep.kube.kinds import path_of
from lockstep_gang.contract.report import Cause, Failure, State
from support.clusters.control_plane import Plane, connected
from support.clusters.operator_faults import rig_in
from support.clusters.played_job import JOB

EVERY = "".join(chr(number) for number in range(0x110000) if not 0xD800 <= number <= 0xDFFF)
PIECE = 150_000
"""Characters: what a ConfigMap may have is a megabyte."""
TELLING = "\U0001f917 rank 1: ValueError: bad label \u2028 caf\u00e9 \x85 \ufffe \U0010ffff"


SAMPLE = EVERY[1:0x300] + EVERY[0x300::40]
"""What a program can be given, in less than the 128 KiB that arguments may have."""


def text(name: str, data: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "namespace": "default"}, "data": {"text": data}}


async def test_every_character_is_stored_as_it_was_sent(plane: Plane) -> None:
    async with await connected(plane.kubeconfig) as cluster:
        for number in range(0, len(EVERY), PIECE):
            piece = EVERY[number : number + PIECE]
            try:
                await cluster.create(text("sent", piece))
                await cluster.apply(text("applied", piece))
                await cluster.create(text("merged", ""))
                await cluster.request("PATCH", path_of("ConfigMap", "default", "merged"), {"data": {"text": piece}}, content_type=MERGE)
                for name in ("sent", "applied", "merged"):
                    stored = await cluster.get("ConfigMap", "default", name)
                    assert stored is not None and stored["data"]["text"] == piece, f"{name}, from U+{ord(piece[0]):04X}"
            finally:
                for name in ("sent", "applied", "merged"):
                    await cluster.delete("ConfigMap", "default", name)


async def test_half_of_a_pair_is_stored_as_its_escape(plane: Plane) -> None:
    async with await connected(plane.kubeconfig) as cluster:
        try:
            stored = await cluster.apply(text("half", "a\udc80\\\ud83db"))
            assert stored["data"]["text"] == "a\\udc80\\\\ud83db"
        finally:
            await cluster.delete("ConfigMap", "default", "half")


POLICY = {
    "apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingAdmissionPolicy", "metadata": {"name": "no-lines"},
    "spec": {
        "failurePolicy": "Fail",
        "matchConstraints": {"resourceRules": [
            {"apiGroups": ["lockstep.dev"], "apiVersions": ["*"], "operations": ["UPDATE"], "resources": ["trainingjobs/status"]}
        ]},
        "validations": [{"expression": "!has(object.status.failure) || !has(object.status.failure.lastLines)",
            "message": "no last lines here"}],
    },
}  # fmt: skip
BINDING = {
    "apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingAdmissionPolicyBinding", "metadata": {"name": "no-lines"},
    "spec": {"policyName": "no-lines", "validationActions": ["Deny"]},
}  # fmt: skip


def is_in_force(api: client.ApiClient, namespace: str) -> bool:
    """Try a status with last lines; it is stored in no case."""
    body = {"status": {"failure": {"lastLines": ["a line"]}}}
    try:
        client.CustomObjectsApi(api).patch_namespaced_custom_object_status(
            "lockstep.dev", "v1alpha1", namespace, "trainingjobs", JOB, body, dry_run="All"
        )
    except client.ApiException as error:
        return "no last lines here" in str(error.body)
    return False


def test_a_job_whose_status_is_refused_is_told_ended_without_what_is_refused(plane: Plane, tmp_path: Path) -> None:
    with rig_in(tmp_path, plane) as rig, rig.job() as job:
        policies = client.AdmissionregistrationV1Api(rig.api.client)
        job.create()
        job.until("running", job.runs)
        policies.create_validating_admission_policy(POLICY)
        policies.create_validating_admission_policy_binding(BINDING)
        try:
            job.until("the policy is in force", lambda: is_in_force(rig.api.client, job.jobs.namespace))
            job.state = State.FAILED
            job.more = {"failure": Failure("a bad label", rank=1, node=1, exit_code=1, cause=Cause.USER_CODE, last_lines=("a line",))}
            job.until("told failed", lambda: job.is_("Failed"))
            status = job.jobs.job(JOB)["status"]
        finally:
            policies.delete_validating_admission_policy_binding("no-lines")
            policies.delete_validating_admission_policy("no-lines")
        told = next(one["message"] for one in status["conditions"] if one["type"] == "Failed")
        assert "StatusRefused: " in told and "no last lines here" in told
        assert (status["failure"]["cause"], status["failure"].get("lastLines")) == ("UserCode", None)


def test_a_job_that_fails_with_any_words_is_told_failed_with_them(plane: Plane, tmp_path: Path) -> None:
    with rig_in(tmp_path, plane) as rig, rig.job() as job:
        job.create()
        job.until("running", job.runs)
        failure = Failure(TELLING, rank=1, node=1, exit_code=1, cause=Cause.USER_CODE, last_lines=(TELLING, "\U0001f680" * 300))
        job.state, job.more = State.FAILED, {"failure": failure}
        job.until("told failed", lambda: job.is_("Failed"))
        stored = job.jobs.job(JOB)["status"]["failure"]
        assert "\U0001f917" in stored["message"] and "\U0010ffff" in stored["message"] and "caf\u00e9" in stored["message"]
        assert stored["lastLines"][1] == "\U0001f680" * 300


REFUSED: dict[str, dict[str, Any]] = {
    "spec.script.args[0]": {"script": {"path": "x.py", "args": ["a\0b"]}},
    "spec.script.path": {"script": {"path": "x\0.py"}},
    "spec.env[0].value": {"script": {"path": "x.py"}, "env": [{"name": "A", "value": "b\0"}]},
}
"""Text that no program can be given, by the field that is named."""


def test_a_job_s_own_text_reaches_its_run_and_its_pods_as_it_was_sent(plane: Plane, tmp_path: Path) -> None:
    pieces = [SAMPLE[number : number + 4000] for number in range(0, len(SAMPLE), 4000)]
    annotations = {f"example.com/said-{number}": f"\0{piece}" for number, piece in enumerate(pieces)}
    path = f"/scripts/{SAMPLE[:0x3F0].replace('/', '')}.py"
    with rig_in(tmp_path, plane) as rig, rig.job() as job:
        for field, more in REFUSED.items():
            with pytest.raises(client.ApiException) as refused:
                job.create(**more)
            assert f"{field}: Invalid value" in json.loads(refused.value.body)["message"]
        job.create(
            script={"path": path, "args": pieces},
            env=[{"name": f"SAID_{number}", "value": piece} for number, piece in enumerate(pieces)],
            podTemplate={"schedulerName": "played", "annotations": annotations},
        )
        job.until("running", job.runs)
        name = job.jobs.job(JOB)["status"]["run"]["name"]
        run = json.loads((job.jobs.get("ConfigMap", name) or {})["data"]["run.json"])
        template = (job.jobs.get("StatefulSet", JOB, "apps/v1") or {})["spec"]["template"]
        assert run["command"][-1 - len(pieces) :] == [path, *pieces]
        given = {one["name"]: one.get("value", "") for one in template["spec"]["containers"][0]["env"]}
        assert [given[f"SAID_{number}"].replace("$$", "$") for number in range(len(pieces))] == pieces
        assert annotations.items() <= template["metadata"]["annotations"].items()
