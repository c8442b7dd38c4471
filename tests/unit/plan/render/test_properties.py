"""Any valid job on any valid cluster: objects or a refusal, with valid names, and always the same bytes."""

from __future__ import annotations

import json
import re

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from golden.plan_cases import CONTEXT
from golden.plan_strategies import jobs, profiles
from lockstep.api.cluster import TrainingCluster
from lockstep.api.files.yamltext import dump_all_yaml
from lockstep.api.job import TrainingJob
from lockstep.api.model import DNS_NAME_MAX
from lockstep.api.names import NODES_MAX
from lockstep.plan.diff import changes
from lockstep.plan.render.objects import render
from lockstep.plan.render.resolve import resolve
from lockstep.plan.render.resolved import PlatformDefaults, Refused
from lockstep_gang.contract.run import parse_run

JOB_NAME_MAX = 52

SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
HERE = PlatformDefaults(image="trainer:1", namespace="team")


def some(examples: int) -> settings:
    # The strategies are deep, so that a first example may take long.
    return settings(max_examples=examples, suppress_health_check=list(HealthCheck))


@some(30)
@given(some_job=jobs(), some_profile=profiles())
def test_whatever_is_valid_renders_the_same_bytes_or_is_refused_with_a_reason(some_job: TrainingJob, some_profile: TrainingCluster) -> None:
    try:
        resolved = resolve(some_job, some_profile, HERE)
    except Refused as refused:
        assert all(re.fullmatch(r"[A-Z][A-Za-z]+", refusal.reason) and refusal.message for refusal in refused.refusals)
        return
    objects = render(resolved, CONTEXT)
    again = resolve(
        TrainingJob.model_validate(json.loads(json.dumps(some_job.to_dict(), sort_keys=True))),
        TrainingCluster.model_validate(json.loads(json.dumps(some_profile.to_dict(), sort_keys=True))),
        HERE,
    )
    assert json.dumps(render(again, CONTEXT)) == json.dumps(objects)
    assert list(yaml.load_all(dump_all_yaml(objects), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))) == objects
    assert all(changes(item, item) == [] for item in objects)


@some(60)
@given(name=st.from_regex(r"[a-z]([-a-z0-9]{0,50}[a-z0-9])?", fullmatch=True), nodes=st.integers(1, 1024))
def test_names_are_valid_and_bounded(name: str, nodes: int) -> None:
    some_job = TrainingJob.model_validate({"metadata": {"name": name}, "spec": {"nodes": nodes, "script": {"path": "a.py"}}})
    objects = render(resolve(some_job, TrainingCluster.model_validate({"metadata": {"name": "p"}, "spec": {}}), HERE), CONTEXT)
    for item in objects:
        assert SUBDOMAIN.fullmatch(item["metadata"]["name"])
        assert len(item["metadata"]["name"]) <= 253
        assert all(len(value) <= 63 for value in item["metadata"]["labels"].values())
    by_kind = {item["kind"]: item for item in objects}
    run = parse_run(by_kind["ConfigMap"]["data"]["run.json"])
    services = [by_kind["Service"]["metadata"]["name"], *run.addresses[-1].split(".")]
    assert all(LABEL.fullmatch(label) and len(label) <= 63 for label in services)


@pytest.mark.parametrize("length", [JOB_NAME_MAX, JOB_NAME_MAX + 1])
def test_the_longest_name_leaves_room_for_what_kubernetes_appends(length: int) -> None:
    revision = f"{'x' * length}-{'0' * 10}"  # the pod label controller-revision-hash of a StatefulSet
    assert (len(revision) <= 63) is (length <= JOB_NAME_MAX)


def test_a_node_s_address_fits_into_a_dns_name_with_the_search_domain_of_the_longest_namespace() -> None:
    longest = TrainingJob.model_validate(
        {"metadata": {"name": "x" * JOB_NAME_MAX}, "spec": {"nodes": NODES_MAX, "script": {"path": "a.py"}}}
    )
    namespace = "n" * 63
    here = PlatformDefaults(image="trainer:1", namespace=namespace)
    objects = render(resolve(longest, TrainingCluster.model_validate({"metadata": {"name": "p"}, "spec": {}}), here), CONTEXT)
    run = parse_run(next(item["data"]["run.json"] for item in objects if item["kind"] == "ConfigMap"))
    assert max(len(f"{address}.{namespace}.svc.cluster.local") for address in run.addresses) <= DNS_NAME_MAX
