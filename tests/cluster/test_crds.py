"""The CRDs at a real API server: accepted, every rule enforced with its message, read well by kubectl."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kubernetes import client, dynamic
from pydantic import ValidationError

from golden.plan_strategies import jobs, profiles
from lockstep.api.cluster import TrainingCluster
from lockstep.api.crd import training_cluster_crd, training_job_crd
from lockstep.api.files.yamlnodes import plain_value
from lockstep.api.job import TrainingJob
from lockstep.api.names import GROUP
from lockstep.plan.ship.deploy import lost_fields
from support.clusters.crd_server import Server, stored, told
from support.crd_rule_cases import AMOUNTS, CASES, NO_AMOUNTS, NUMBERS, WrittenRule, job, profile, training, written_rules

CRDS = [training_job_crd(), training_cluster_crd()]
RULES = pytest.mark.parametrize("rule", list(CASES), ids=lambda rule: rule.message[:40])
TABLE = "application/json;as=Table;v=v1;g=meta.k8s.io"


@pytest.fixture(scope="module")
def namespace_of_all(api: dynamic.DynamicClient) -> Iterator[str]:
    core = client.CoreV1Api(api.client)
    name = core.create_namespace({"metadata": {"generateName": "lockstep-crds-"}}).metadata.name
    try:
        yield name
    finally:
        core.delete_namespace(name)


@pytest.fixture(scope="module")
def server(api: dynamic.DynamicClient, namespace_of_all: str) -> Iterator[Server]:
    """The same schemas in a group of their own: an operator that runs in the cluster doesn't write to these objects."""
    found = Server(api.client, namespace_of_all, f"{namespace_of_all}.{GROUP}")
    names: list[str] = []
    try:
        names.extend(found.apply_crd(crd) for crd in CRDS)
        yield found
    finally:
        for name in names:
            client.ApiextensionsV1Api(api.client).delete_custom_resource_definition(name)


@pytest.fixture(scope="module")
def installed(api: dynamic.DynamicClient, namespace_of_all: str) -> Server:
    """The CRDs as they ship. They are left: others in the cluster may use them."""
    found = Server(api.client, namespace_of_all)
    for crd in CRDS:
        found.apply_crd(crd)
    return found


@pytest.fixture
def before(server: Server, rule: WrittenRule) -> Iterator[dict[str, Any] | None]:
    """The object that a transition rule compares with; None for rules about one object alone."""
    item = CASES[rule].before
    if item is None:
        yield None
        return
    made = stored(server.create(item, keep=True))
    yield made
    server.send("DELETE", server.path(rule.kind, made["metadata"]["name"]))


def test_the_api_server_finds_nothing_wrong_with_the_schemas(installed: Server) -> None:
    for crd in CRDS:
        found = installed.send("GET", f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{crd['metadata']['name']}")
        conditions = {c["type"]: c["status"] for c in found["status"]["conditions"]}
        assert conditions == {"NamesAccepted": "True", "Established": "True"}  # no NonStructuralSchema


def test_every_rule_has_a_case() -> None:
    assert set(CASES) == set(written_rules())


@RULES
def test_what_keeps_a_rule_is_accepted(server: Server, rule: WrittenRule, before: dict[str, Any] | None) -> None:
    item = CASES[rule].accepted
    stored(server.create(item) if before is None else server.replace(item, before))


@RULES
def test_what_breaks_a_rule_is_refused_with_its_message(server: Server, rule: WrittenRule, before: dict[str, Any] | None) -> None:
    case = CASES[rule]
    ((field, message),) = told(server.create(case.refused) if before is None else server.replace(case.refused, before))
    assert (field, message.split(": ", 2)[2]) == (case.field or "<nil>", rule.message)


@pytest.mark.parametrize(("section", "field", "valid", "wrong"), NUMBERS)
def test_a_number_may_be_text_and_is_bounded_in_both_forms(
    server: Server, section: str, field: str, valid: list[Any], wrong: list[Any]
) -> None:
    for value in valid:
        assert stored(server.create(training(**{section: {field: value}})))["spec"]["training"][section][field] == value
    for value in wrong:
        assert server.create(training(**{section: {field: value}}))["kind"] == "Status", value


def test_an_amount_is_a_quantity_or_a_number(server: Server) -> None:
    for value in AMOUNTS:
        assert stored(server.create(job(resources={"cpu": value})))["spec"]["resources"]["cpu"] == value
    for value in NO_AMOUNTS:
        assert server.create(job(resources={"cpu": value}))["kind"] == "Status", value


def test_a_dropout_that_target_parameters_exclude_is_refused_in_both_forms(server: Server) -> None:
    lora = {"targetParameters": ["mlp.experts.gate_up_proj"]}
    for zero in (0, 0.0, "0", "0.0"):
        stored(server.create(training(lora={**lora, "dropout": zero})))
    for dropout in (0.1, "0.1", 1):
        assert server.create(training(lora={**lora, "dropout": dropout}))["reason"] == "Invalid", dropout


AWKWARD = [
    "y", "Y", "n", "N", "yes", "Yes", "YES", "yEs", "no", "on", "On", "off", "OFF", "true", "True", "tRue", "null", "Null", "nULL", "~",
        "1e-4", "1E5", "08", "010",
    "-010", "0o17", "0O7", "0o8", "1:30", "1_000", "1_", "_1", "2020-01-01", "2001-12-14t21:59:43.10-05:00", "+1", "-0", ".5", "+.5", "5.",
        "1_0.5", ".5_0", ".5_", "._5",
    ".5__0", ".5e_1", ".5e1_0", "+.5_", "0x_1", "0xG", "0b11", "-0b1", "0b2", "1e", "=", ".", "1e400", "9223372036854775808",
        "-9223372036854775809", "18446744073709551616", "1.0", "0.30000000000000004",
]  # fmt: skip
SCALARS = st.text(st.sampled_from("+-.012789eExXoObB_yYnN:"), min_size=1, max_size=7).filter(
    lambda text: text[0] not in "-:" or text[1:2].strip(":-")
)


def read_by_the_api_server(server: Server, scalars: list[str]) -> list[Any]:
    """What stands in an object that is sent as YAML text, as kubectl reads it."""
    lines = "\n".join(f"      k{number}: {text}" for number, text in enumerate(scalars))
    body = (
        f"apiVersion: {server.group}/v1alpha1\nkind: TrainingJob\nmetadata: {{name: yaml}}\nspec:\n  training:\n    model: {{name: /m}}\n"
        f"    data: {{path: /d}}\n    deepspeed:\n{lines}\n"
    )
    reply = stored(server.send("POST", f"{server.path('TrainingJob')}?dryRun=All", body, form="application/yaml"))
    settings = reply["spec"]["training"]["deepspeed"]
    values = [settings.get(f"k{number}") for number in range(len(scalars))]
    return [float(value) if isinstance(value, int) and abs(value) >= 2**63 else value for value in values]


def readable(text: str) -> bool:
    """Whether PyYAML takes it for one scalar without quotes, and it is a number that JSON has."""
    try:
        found = list(yaml.parse(f"k: {text}"))[4]
        return isinstance(found, yaml.ScalarEvent) and found.value == text and (plain_value(text), True)[1]
    except (yaml.YAMLError, ValueError, IndexError):
        return False


def test_words_and_numbers_without_quotes_are_read_as_the_api_server_reads_them(server: Server) -> None:
    assert dict(zip(AWKWARD, map(plain_value, AWKWARD), strict=True)) == dict(
        zip(AWKWARD, read_by_the_api_server(server, AWKWARD), strict=True)
    )


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(SCALARS.filter(readable), min_size=20, max_size=60))
def test_any_scalar_is_read_as_the_api_server_reads_it(server: Server, scalars: list[str]) -> None:
    assert [(text, plain_value(text)) for text in scalars] == list(zip(scalars, read_by_the_api_server(server, scalars), strict=True))


def test_a_job_shows_its_defaults(server: Server) -> None:
    spec = stored(server.create(training()))["spec"]
    assert spec == {
        "type": "Batch",
        "fabric": {"mode": "Auto", "degradedPolicy": "Warn"},
        "preflight": "Auto",
        "startTimeoutSeconds": 1800,
        "restart": {"maxRestarts": 3, "backoffSeconds": 10, "holdOnFailureSeconds": 0, "retry": 0},
        "suspend": False,
        "training": {
            "model": {"name": "/m", "quantization": "None"},
            "method": "LoRA",
            "lora": {
                "rank": 16,
                "alpha": 32,
                "dropout": "0",
                "targetModules": ["q_proj", "k_proj", "v_proj", "o_proj"],
                "rankStabilized": False,
                "dora": False,
            },
            "zeroStage": "Stage2",
            "hierarchicalPartition": "Auto",
            "precision": "BF16",
            "seed": 42,
            "data": {
                "path": "/d",
                "split": "train",
                "format": "Auto",
                "maxLength": 2048,
                "overlong": "Truncate",
                "trainOn": "Assistant",
                "onBroken": "Fail",
                "packing": False,
            },
            "optimization": {
                "epochs": 1,
                "learningRate": "2e-4",
                "microBatchSize": 1,
                "balance": "Equal",
                "warmupSteps": "0",
                "schedule": "Cosine",
                "minLearningRateRatio": "0",
                "offload": "None",
                "nonFinite": "Stop",
                "batches": "Tokens",
                "recompute": "Auto",
                "maxGradientNorm": "1",
                "weightDecay": "0",
                "beta1": "0.9",
                "beta2": "0.999",
                "epsilon": "1e-8",
            },
            "checkpoint": {
                "everySteps": 100,
                "keep": 3,
                "resumeFrom": "Auto",
                "content": "Full",
                "replicas": 1,
            },
            "reportTo": ["TensorBoard"],
        },
    }


@pytest.mark.parametrize(
    "item", [training(evaluation={}), training(), job(), profile()], ids=["evaluation", "training", "script", "cluster"]
)
def test_defaults_of_the_api_server_are_those_of_the_models(server: Server, item: dict[str, Any]) -> None:
    model = MODELS[item["kind"]]
    assert model.model_validate(stored(server.create(item))).spec == model.model_validate(item).spec


def test_an_update_that_leaves_defaults_out_again_is_accepted(server: Server) -> None:
    made = stored(server.create(training(), keep=True))
    try:
        stored(server.replace(training(), made))
    finally:
        server.send("DELETE", server.path("TrainingJob", "x"))


def test_a_cluster_is_set_once_where_it_was_unset_and_neither_changed_nor_removed_then(server: Server) -> None:
    stored(server.create(job(), keep=True))
    path = server.path("TrainingJob", "x")

    def set_to(cluster: str | None) -> Any:
        return server.send("PATCH", path, {"spec": {"cluster": cluster}}, form="application/merge-patch+json")

    try:
        assert stored(set_to("a"))["spec"]["cluster"] == "a"
        for other in ("b", None):
            ((field, _),) = told(set_to(other))
            assert field == "spec.cluster"
        assert stored(set_to("a"))["spec"]["cluster"] == "a"
    finally:
        server.send("DELETE", path)


def test_an_unknown_field_is_refused_with_its_path(server: Server) -> None:
    reply = server.create(training(loar={"rank": 8}))
    assert reply["code"] == 400
    assert 'unknown field "spec.training.loar"' in reply["message"]


def test_the_api_server_drops_those_fields_that_a_deployment_would_name(server: Server) -> None:
    def made(**more: Any) -> dict[str, Any]:
        env, labels = [{"name": "A", "value": "1", **more}], {"any": "label"}
        item = training(deepspeed={"any": {"thing": 1}}, **more)
        return item | {"spec": item["spec"] | {"env": env, "podTemplate": {"labels": labels}} | more}

    schema = CRDS[0]["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    old = made(former={"a": [1]})
    assert lost_fields(old, schema) == ["spec.training.former", "spec.env[].former", "spec.former"]
    path = f"{server.path('TrainingJob')}?dryRun=All&fieldValidation=Ignore"
    read, plain = (stored(server.send("POST", path, item)) for item in (old, made()))
    assert read["spec"] == plain["spec"] and "former" not in str(read) and lost_fields(read, schema) == []
    assert read["spec"]["training"]["deepspeed"] == {"any": {"thing": 1}} and read["spec"]["podTemplate"]["labels"] == {"any": "label"}


PLACES = {
    "image": lambda text: job(image=text),
    "path": lambda text: training(data={"path": text}),
    "claim": lambda text: job(storage={"workspaceClaimName": text}),
    "variable": lambda text: job(env=[{"name": text}]),
    "field": lambda text: job(env=[{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": text}}}]),
    "label": lambda text: job(podTemplate={"labels": {"a": text}}),
    "key": lambda text: job(podTemplate={"annotations": {text: "a"}}),
    "rate": lambda text: training(optimization={"learningRate": text}),
    "size": lambda text: job(resources={"memory": text}),
    "resume": lambda text: training(checkpoint={"resumeFrom": text}),
    "argument": lambda text: job(script={"path": "a.py", "args": [text]}),
    "name": lambda text: job(name=text),
    "resource": lambda text: profile(
        network={"rdma": {"enabled": True, "memlock": "Unlimited", "rails": [{"network": "n", "resource": text}]}}
    ),
    "network": lambda text: profile(network={"rdma": {"enabled": True, "memlock": "Unlimited", "rails": [{"network": text}]}}),
    "exclusion": lambda text: profile(network={"tcp": {"interfaceExclude": text}}),
}
MODELS = {"TrainingJob": TrainingJob, "TrainingCluster": TrainingCluster}
TEXTS = st.one_of(
    st.text(st.sampled_from("aZ09-._/ :e\nGim€"), max_size=6),
    st.sampled_from(["Auto", "/a\nb", "1Gi", "2e-4", "a.b/c", "A_B", "a\n", "x" * 64]),
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.sampled_from(sorted(PLACES)), text=TEXTS)
def test_models_and_api_server_accept_the_same_text(server: Server, place: str, text: str) -> None:
    item = PLACES[place](text)
    try:
        MODELS[item["kind"]].model_validate(item)
        accepted = True
    except ValidationError:
        accepted = False
    assert (server.create(item)["kind"] == item["kind"]) is accepted


@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(jobs() | profiles())
def test_what_the_models_accept_the_api_server_accepts_and_gives_back(server: Server, item: TrainingJob | TrainingCluster) -> None:
    written = item.to_dict()
    written["metadata"] = {"name": item.metadata.name}  # the rest of metadata is the API server's to judge
    reply = stored(server.create(written))
    assert type(item).model_validate(reply).spec == item.spec


def test_the_columns_show_what_a_person_looks_for(server: Server) -> None:
    made = stored(server.create(training(), keep=True))
    status = {
        "ranks": {"desired": 8, "ready": 7},
        "trainer": {"step": 12, "progressPercentage": 10},
        "restarts": 1,
        "cluster": {"name": "barcelona", "hash": "h", "transport": "RDMA"},
        "checkpoint": {"lastCommittedStep": 10, "lastCommitTime": "2026-01-01T00:00:00Z"},
        "conditions": [condition("Accepted", "SpecValid"), condition("Progressing", "Step")],
    }
    try:
        stored(server.send("PUT", server.path("TrainingJob", "x") + "/status", made | {"status": status}))
        table = server.send("GET", server.path("TrainingJob"), accept=TABLE)
    finally:
        server.send("DELETE", server.path("TrainingJob", "x"))
    columns = {c["name"]: (c["priority"], cell) for c, cell in zip(table["columnDefinitions"], table["rows"][0]["cells"], strict=True)}
    age = columns.pop("Age")
    assert age[1].endswith("s")
    assert columns == {
        "Name": (0, "x"), "Ready": (0, 7), "Step": (0, 12), "Progress": (0, 10), "Restarts": (0, 1), "Reason": (0, "Step"),
        "Cluster": (1, "barcelona"), "Fabric": (1, "RDMA"), "Checkpoint": (1, 10),
    }  # fmt: skip


def condition(name: str, reason: str) -> dict[str, Any]:
    return {
        "type": name,
        "status": "True",
        "reason": reason,
        "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
        "observedGeneration": 1,
    }


def test_scaling_changes_the_nodes_and_shows_those_that_exist(server: Server) -> None:
    made = stored(server.create(job(nodes=2), keep=True))
    path = server.path("TrainingJob", "x")
    try:
        stored(server.send("PUT", f"{path}/status", made | {"status": {"nodes": 1, "selector": "lockstep.dev/job=x"}}))
        patched = server.send("PATCH", f"{path}/scale", {"spec": {"replicas": 3}}, form="application/merge-patch+json")
        assert (patched["spec"], patched["status"]) == ({"replicas": 3}, {"replicas": 1, "selector": "lockstep.dev/job=x"})
        assert server.send("GET", path)["spec"]["nodes"] == 3
    finally:
        server.send("DELETE", path)


def test_status_is_written_apart_from_the_spec(server: Server) -> None:
    made = stored(server.create(job(nodes=2) | {"status": {"nodes": 9}}, keep=True))
    try:
        assert "status" not in made
        changed = made | {"spec": made["spec"] | {"nodes": 5}, "status": {"nodes": 2}}
        reply = stored(server.send("PUT", server.path("TrainingJob", "x") + "/status", changed))
        assert (reply["spec"]["nodes"], reply["status"]["nodes"]) == (2, 2)
    finally:
        server.send("DELETE", server.path("TrainingJob", "x"))


Kubectl = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def fresh(kubectl: Kubectl, tmp_path: Path) -> Kubectl:
    """kubectl without what it remembers of a cluster: it may have looked before the CRDs were there."""
    return partial(kubectl, "--cache-dir", str(tmp_path))


def test_kubectl_explain_says_what_a_field_is(installed: Server, fresh: Kubectl) -> None:
    installed.wait_until_published("TrainingJob")
    text = " ".join(fresh("explain", "tj.spec.training.lora").stdout.split())
    assert "DESCRIPTION: The adapter to train." in text
    assert "rank <integer> The adapter's rank, r." in text
    assert "targetModules <[]string> Names of the layers that get an adapter." in text


def test_kubectl_knows_the_short_names(installed: Server, fresh: Kubectl) -> None:
    found = [fresh("get", name, "-n", installed.namespace, "--ignore-not-found") for name in ("tj", "tc")]
    assert [(done.returncode, "doesn't have a resource type" in done.stderr) for done in found] == [(0, False)] * 2
