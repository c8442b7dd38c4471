"""`lockstep plan` as it is typed: what it asks of an API server, what it prints, and how it ends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from golden.plan_cases import CHECKOUT
from lockstep.cli.main import app
from support.api_stub import ApiStub, served

Object = dict[str, Any]
TEAM = "/api/v1/namespaces/team"


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiStub]:
    """A cluster with the service account, the storage class, two nodes and nothing else."""
    nodes = [
        {"metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}}, "spec": {},
            "status": {"allocatable": {"cpu": "8", "memory": "64Gi", "pods": "9"}}}
        for name in ("a", "b")
    ]  # fmt: skip
    classes = [{"metadata": {"name": name}} for name in ("local-rwx", "local-python", "local-rwo")]
    stub = ApiStub(
        objects={
            "/api/v1/nodes": {"metadata": {}, "items": nodes},
            "/apis/storage.k8s.io/v1/storageclasses": {"metadata": {}, "items": classes},
            f"{TEAM}/serviceaccounts/ml-dev-sa": {"metadata": {"name": "ml-dev-sa"}},
            "/api/v1/namespaces/team": {"metadata": {"name": "team"}},
            "/apis/lockstep.dev/v1alpha1/trainingclusters/local": {"metadata": {"name": "local"}, "spec": {}},
        }
    )
    with served(stub, tmp_path) as path:
        monkeypatch.setenv("KUBECONFIG", str(path))
        yield stub


def job_file(folder: Path, **spec: Any) -> Path:
    given = {"nodes": 2, "script": {"path": "a.py"}, **spec}
    path = folder / "job.yaml"
    path.write_text(json.dumps({"apiVersion": "lockstep.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "x"}, "spec": given}))
    return path


def plan(path: Path, *options: str) -> Result:
    return CliRunner().invoke(app, ["plan", "-f", str(path), "--cluster", "local", "-n", "team", *options])


def test_it_changes_nothing_every_write_is_a_dry_run(stub: ApiStub, tmp_path: Path) -> None:
    done = plan(job_file(tmp_path))
    assert (done.exit_code, done.output.splitlines()[-1]) == (0, "fits now"), done.output
    writes = [(method, path, query) for method, path, query in stub.asked if method != "GET"]
    assert sorted(path.rsplit("/", 1)[-1] for _, path, _ in writes) == ["pods", "statefulsets", "x"]
    assert all(query.get("dryRun") == "All" for _, _, query in writes)


def test_contents_of_secrets_are_never_asked_for(stub: ApiStub, tmp_path: Path) -> None:
    stub.objects[f"{TEAM}/secrets/hf"] = {"metadata": {"name": "hf"}}
    done = plan(job_file(tmp_path, envFrom=[{"secretRef": {"name": "hf"}}]))
    assert "Secret hf are there (contents are not read)" in done.output
    asked = [accept for (_, path, _), accept in zip(stub.asked, stub.accepted, strict=True) if "/secrets" in path]
    assert asked == ["application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"]


def test_json_holds_the_lines_the_figures_and_the_verdict(stub: ApiStub, tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "vocab_size": 8,
        "hidden_size": 4,
        "intermediate_size": 6,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = {"script": None, "training": {"model": {"name": "/workspace/m"}, "data": {"path": "/d.jsonl"}}}
    done = plan(job_file(tmp_path, **spec), "-o", "json", "--model-config", str(tmp_path), "--samples", "10")
    found = json.loads(done.output)
    assert (found["verdict"], found["figures"]["parameters"], found["figures"]["steps"]) == ("may fail once it runs", 212, 5)
    assert found["message"].startswith("may fail once it runs; not known: memory (gpus.type in the cluster file, or spec.resources.memory")
    assert {"section": "quota", "outcome": "ok", "message": "the namespace has no ResourceQuota"} in found["lines"]


def test_warnings_of_the_server_are_told(stub: ApiStub, tmp_path: Path) -> None:
    stub.warnings["statefulsets"] = 'would violate PodSecurity "restricted:latest"'
    assert 'the API server warns of the StatefulSet: would violate PodSecurity "restricted:latest"' in plan(job_file(tmp_path)).output


def test_what_is_missing_is_refused_with_exit_code_1(stub: ApiStub, tmp_path: Path) -> None:
    del stub.objects[f"{TEAM}/serviceaccounts/ml-dev-sa"]
    done = plan(job_file(tmp_path))
    assert done.exit_code == 1
    assert done.output.splitlines()[-1].startswith(
        "refused: ServiceAccount ml-dev-sa (the cluster's security.service_account) is not in namespace team"
    )
    assert "→ kubectl create serviceaccount ml-dev-sa -n team" in done.output


def test_what_would_wait_has_exit_code_3(stub: ApiStub, tmp_path: Path) -> None:
    done = plan(job_file(tmp_path, nodes=3))
    assert (done.exit_code, "would wait for 1 more node that can take a pod" in done.output) == (3, True)


def test_without_any_right_everything_is_unknown_and_nothing_fails(stub: ApiStub, tmp_path: Path) -> None:
    stub.forbidden.add("*")
    done = plan(job_file(tmp_path))
    assert (done.exit_code, done.output.splitlines()[-1]) == (
        3, "may wait; not known: cluster and nodes and quota and claims and admission and needs (--context NAME, of an account with more"
           " rights)",
    ), done.output  # fmt: skip
    assert 'your account may not create one: pods is forbidden: User "someone" cannot create resource "pods"' in done.output


DENIED = 'pods "x-0" is forbidden: violates PodSecurity "restricted:latest": unrestricted capabilities'
WEBHOOK = 'admission webhook "inject.example.com" does not support dry run'


@pytest.mark.parametrize(
    ("status", "reason", "said", "code", "last"),
    [
        (403, "Forbidden", DENIED, 1, f"refused: the API server refuses the Pod: {DENIED}"),
        (400, "BadRequest", WEBHOOK, 3, "may wait; not known: admission (lockstep run, whose start shows it)"),
    ],
    ids=["a refusal is no lack of rights", "a webhook that takes no dry runs refuses nothing"],
)
def test_what_the_server_says_of_a_pod(stub: ApiStub, tmp_path: Path, status: int, reason: str, said: str, code: int, last: str) -> None:
    answer = stub.answer

    def refuse(method: str, path: str, body: Object | None) -> tuple[int, Object]:
        return (status, {"reason": reason, "message": said}) if (method, path) == ("POST", f"{TEAM}/pods") else answer(method, path, body)

    stub.answer = refuse  # type: ignore[method-assign]
    done = plan(job_file(tmp_path))
    assert (done.exit_code, done.output.splitlines()[-1]) == (code, last)
    assert code == 1 or f"whether a Pod would be admitted: the API server can't try one out: {said}" in done.output


def test_a_cluster_without_the_crds_is_told_with_what_does_without(stub: ApiStub, tmp_path: Path) -> None:
    answer = stub.answer

    def without(method: str, path: str, body: Object | None) -> tuple[int, Object]:
        unknown = {"reason": "NotFound", "message": "the server could not find the requested resource"}
        return (404, unknown) if "lockstep.dev" in path else answer(method, path, body)

    stub.answer = without  # type: ignore[method-assign]
    done = plan(job_file(tmp_path))
    assert (done.exit_code, "lockstep run --in-namespace does without" in done.output) == (3, True), done.output


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"status": {"allowedServiceAccounts": [{"name": "ml-dev-sa", "allowedBy": {"name": "restricted-v2"}}]}},
            "ml-dev-sa may run such pods (SCC restricted-v2)"),
        ({"status": {"allowedServiceAccounts": []}}, "no SCC of service account ml-dev-sa admits the job's pods"),
        (None, "the cluster has no PodSecurityPolicyReview; is it OpenShift, as its file says?"),
    ],
)  # fmt: skip
def test_openshift_is_asked_which_sccs_the_service_account_has(stub: ApiStub, tmp_path: Path, answer: Object | None, said: str) -> None:
    text = (CHECKOUT / "clusters" / "local.yaml").read_text().replace("platform: kubernetes", "platform: openshift")
    cluster = tmp_path / "local.yaml"
    cluster.write_text(text)
    path = "/apis/security.openshift.io/v1/namespaces/team/podsecuritypolicyreviews"
    real = stub.answer

    def reviewed(method: str, asked: str, body: Object | None) -> tuple[int, Object]:
        if asked != path:
            return real(method, asked, body)
        assert body["spec"]["serviceAccountNames"] == ["ml-dev-sa"]
        return (404, {"reason": "NotFound", "message": "no such kind"}) if answer is None else (201, answer)

    stub.answer = reviewed  # type: ignore[method-assign]
    done = CliRunner().invoke(app, ["plan", "-f", str(job_file(tmp_path)), "--cluster", str(cluster), "-n", "team"])
    assert said in done.output, done.output


def test_offline_asks_nobody(stub: ApiStub, tmp_path: Path) -> None:
    done = plan(job_file(tmp_path), "--offline")
    assert (done.exit_code, stub.asked) == (0, [])
    assert done.output.splitlines()[-1] == "fits as far as can be seen; not known: cluster (leave out --offline)"


def test_without_a_kubeconfig_the_way_without_a_cluster_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    done = CliRunner().invoke(app, ["plan", "-f", str(job_file(tmp_path)), "--cluster", "nerc-production"])
    assert "is not there; set KUBECONFIG" in str(done.exception) and "--offline, which plans by the files alone" in str(done.exception)


def test_the_wrong_cluster_is_refused(stub: ApiStub, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["plan", "-f", str(job_file(tmp_path, gpusPerNode=0)), "--cluster", "barcelona", "-n", "team"])
    assert "cluster barcelona is at barcelona.nerc.mghpcc.org" in str(done.exception)
    assert stub.asked == []


OPERATOR = "/apis/apps/v1/namespaces/lockstep-system/deployments/lockstep-operator"
BARE = """cluster: {name: local, namespace: team, platform: kubernetes}
storage: {mode: rwx, class_rwx: local-rwx}
"""


def deployed(image: str) -> Object:
    pod = {"containers": [{"image": image}]}
    return {"metadata": {"name": "lockstep-operator", "namespace": "lockstep-system"}, "spec": {"template": {"spec": pod}}}


def test_a_missing_image_is_judged_as_the_operator_will(stub: ApiStub, tmp_path: Path) -> None:
    bare, job = tmp_path / "local.yaml", job_file(tmp_path)
    bare.write_text(BARE)
    words = ["plan", "-f", str(job), "--cluster", str(bare)]
    stub.objects[OPERATOR] = deployed("r.example.com/mine:1")
    done = CliRunner().invoke(app, words)
    assert (
        done.exit_code == 1 and "refused  image      neither the job nor its cluster sets one, and the operator's image r.ex" in done.output
    )
    stub.objects[OPERATOR] = deployed("r.example.com/lockstep-operator:1")
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0 and "ok       image      r.example.com/lockstep-trainer:1, from the operator's registry" in done.output
    del stub.objects[OPERATOR]
    assert "unknown  image      neither the job nor its cluster sets one: the operator uses" in CliRunner().invoke(app, words).output
    said = CliRunner().invoke(app, ["validate", "-f", str(job), "--cluster", str(bare)])
    assert (said.exit_code, said.stdout) == (
        0,
        "ok\n",
    ) and "image: neither the job nor its cluster sets one: the operator uses" in said.stderr
    job_file(tmp_path, image="mine:1")
    assert CliRunner().invoke(app, ["validate", "-f", str(job), "--cluster", str(bare)]).stderr == ""


def test_gpus_on_a_cluster_that_has_none_are_refused_as_the_operator_does(stub: ApiStub, tmp_path: Path) -> None:
    done = plan(job_file(tmp_path, gpusPerNode=4), "--offline")
    assert (done.exit_code, done.output.splitlines()[-1].startswith("refused: gpusPerNode is 4, but the cluster local has no GPUs")) == (
        1,
        True,
    )
