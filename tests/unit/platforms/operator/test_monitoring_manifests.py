"""Objects of `deploy --monitoring`: who may read what, and that alert rules and dashboard ask for metrics that exist.

tests/faults/test_alerts.py and test_dashboard.py run their expressions in Prometheus.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
import yaml

from golden.plan_cases import Case
from lockstep.plan.render.pod import pod_labels
from lockstep.platforms.clusters.install import kustomized
from lockstep.platforms.operator.certificate import make_certificates
from lockstep.platforms.operator.metrics import Jobs, Metrics
from lockstep.platforms.operator.secrets import AUTHORITY, publish_authority
from support.checkout import ROOT
from unit.plan.reconcile.status.test_metrics import MEASURED, job, status

MONITORING = ROOT / "manifests" / "monitoring"
BASE = kustomized(MONITORING.parent / "operator" / "base")
OBJECTS = {item["kind"]: item for item in kustomized(MONITORING)}


def rules() -> list[dict[str, object]]:
    return [rule for group in OBJECTS["PrometheusRule"]["spec"]["groups"] for rule in group["rules"]]


def dashboard() -> dict[str, object]:
    return json.loads(OBJECTS["ConfigMap"]["data"]["lockstep.json"])


def expressions() -> Iterator[str]:
    yield from (str(rule["expr"]) for rule in rules())
    for panel in dashboard()["panels"]:  # type: ignore[attr-defined]
        yield from (target["expr"] for target in panel["targets"])
    for variable in dashboard()["templating"]["list"]:  # type: ignore[index]
        yield from [variable["query"]] if variable["type"] == "query" else []


def labels_by_metric() -> dict[str, set[str]]:
    """Every sample name that the operator can show, with its labels."""
    metrics = Metrics()
    full = status(
        trainer={"step": 1, "totalSteps": 2, "estimatedRemainingSeconds": 3,
            "metrics": [{"name": name, "value": "1"} for name in MEASURED]}, restarts=[],
        checkpoint={"lastCommittedStep": 1, "lastCommitTime": "2027-01-01T00:00:00Z"}, preflight={"ok": True},
    )  # fmt: skip
    reasons = {"FabricVerified": "FabricVerified", "Straggling": "SlowRank", "Progressing": "Running"}
    full["conditions"] = [{"type": kind, "status": "True", "reason": reason} for kind, reason in reasons.items()]
    full |= {"restarts": 0}
    metrics.count(job(found=full), full)
    metrics.requested("GET", "/", 200)
    metrics.registry.register(Jobs(lambda: True, lambda: [job(found=full).job], lambda uid: 0.0, lambda: 0))
    return {sample.name: set(sample.labels) for family in metrics.registry.collect() for sample in family.samples}


KNOWN = labels_by_metric()


@pytest.mark.parametrize("expression", list(expressions()))
def test_an_expression_asks_for_metrics_and_labels_that_there_are(expression: str) -> None:
    metrics = set(re.findall(r"\blockstep_\w+", expression))
    assert metrics
    assert metrics <= KNOWN.keys()
    for name, selector in re.findall(r"\b(lockstep_\w+)\{([^}]*)\}", expression):
        assert set(re.findall(r"(\w+)\s*(?:=~|!=|!~|=)", selector)) <= KNOWN[name], f"{name} has {KNOWN[name]}"


def test_every_gauge_and_counter_is_looked_at_or_documented() -> None:
    page = (MONITORING.parents[1] / "docs" / "reference" / "metrics.md").read_text()
    families = {name for name in KNOWN if not name.endswith(("_created", "_bucket", "_sum", "_count")) and name.startswith("lockstep_")}
    assert [name for name in sorted(families) if f"`{name}`" not in page] == []


def test_every_alert_says_who_and_what_to_do() -> None:
    names = [str(rule["alert"]) for rule in rules()]
    assert len(names) == len(set(names))
    for rule in rules():
        assert set(rule["annotations"]) == {"summary", "description"}  # type: ignore[call-overload]
        assert rule["labels"]["severity"] in ("warning", "critical")  # type: ignore[index]


def test_the_scraper_s_account_may_read_metrics_and_nothing_else() -> None:
    assert OBJECTS["ClusterRole"]["rules"] == [{"nonResourceURLs": ["/metrics"], "verbs": ["get"]}]
    assert OBJECTS["ServiceAccount"]["automountServiceAccountToken"] is False


def test_nobody_has_to_read_a_secret_with_a_key_to_scrape() -> None:
    """The one that Prometheus reads holds its own token."""
    assert "lockstep-operator-tls" not in json.dumps(OBJECTS)
    assert AUTHORITY in [item["metadata"]["name"] for item in BASE if item["kind"] == "ConfigMap"]


class Applied:
    """Takes what is applied."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []

    async def apply(self, item: dict[str, Any]) -> None:
        self.items.append(item)


def test_the_operator_publishes_the_authority_s_certificate_and_no_key() -> None:
    made, cluster = make_certificates(("localhost",), datetime.now(UTC)), Applied()
    asyncio.run(publish_authority(cluster, "lockstep-system", made.ca_cert))  # type: ignore[arg-type]
    [item] = cluster.items
    assert (item["kind"], item["metadata"]["name"], item["data"]) == ("ConfigMap", AUTHORITY, {"ca.crt": made.ca_cert})
    role = next(item for item in BASE if item["kind"] == "Role")
    assert {"apiGroups": [""], "resources": ["configmaps"], "resourceNames": [AUTHORITY], "verbs": ["patch"]} in role["rules"]


def admits(policy: dict[str, Any], sender: dict[str, str], port: str) -> bool:
    """Whether a NetworkPolicy of this form (senders of all namespaces, by their labels) lets a pod with these labels reach a named port."""
    for rule in policy["spec"]["ingress"]:
        for peer in rule["from"]:
            assert set(peer) == {"namespaceSelector", "podSelector"}
            assert peer["namespaceSelector"] == {}
            wanted = peer["podSelector"]
            exist = [expression["key"] for expression in wanted.get("matchExpressions", ())]
            assert all(expression["operator"] == "Exists" for expression in wanted.get("matchExpressions", ()))
            if wanted["matchLabels"].items() <= sender.items() and set(exist) <= set(sender) and port in [p["port"] for p in rule["ports"]]:
                return True
    return False


def test_pods_of_jobs_and_prometheus_reach_the_operator_and_nobody_else() -> None:
    policy = next(item for item in BASE if item["kind"] == "NetworkPolicy")
    deployment = next(item for item in BASE if item["kind"] == "Deployment")["spec"]["template"]
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= deployment["metadata"]["labels"].items()
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    ports = {port["name"] for port in deployment["spec"]["containers"][0]["ports"]}
    assert ports == {"report", "metrics", "health"}
    gang = pod_labels(Case("local", "TCP", "Shared").resolved())
    prometheus = {"app.kubernetes.io/name": "prometheus"}
    senders = (gang, prometheus, {}, {"app.kubernetes.io/managed-by": "lockstep"}, {"lockstep.dev/job": "x"})
    assert [[admits(policy, sender, port) for port in ("report", "metrics", "health")] for sender in senders] == [
        [True, False, False], [False, True, False], [False, False, False], [False, False, False], [False, False, False],
    ]  # fmt: skip


def test_the_monitor_finds_the_service_and_trusts_the_operator_s_own_authority() -> None:
    monitor, service = OBJECTS["ServiceMonitor"]["spec"], OBJECTS["Service"]
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    endpoint = monitor["endpoints"][0]
    assert endpoint["port"] == service["spec"]["ports"][0]["name"]
    assert endpoint["tlsConfig"]["ca"] == {"configMap": {"name": AUTHORITY, "key": "ca.crt"}}
    deployment = yaml.safe_load((MONITORING.parent / "operator" / "base" / "deployment.yaml").read_text())
    ports = {p["name"]: p["containerPort"] for p in deployment["spec"]["template"]["spec"]["containers"][0]["ports"]}
    assert ports["metrics"] == service["spec"]["ports"][0]["port"] == 8444
