"""--mode rdma where nodes have rails: Multus puts net1 to net4 into the pods, on nodes with the devices only, and gloo's bytes go over
net1.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from lockstep.api.files.clusterfile import parse_cluster_file
from lockstep.cli.clusters.devcluster import bring_up
from lockstep.devcluster import binary, server
from lockstep.devcluster.host.layout import default_layout
from lockstep.devcluster.provisioner import administrator
from lockstep.devcluster.rails import attachment, network_name, resource, resources
from lockstep.environments import cache_root
from support.checkout import ROOT
from support.clusters.cluster_jobs import API, Jobs, until
from support.in_process import lockstep

RAILS = 4
PROFILE = "rails-of-a-test"
INTERFACES = [f"net{number}" for number in range(1, RAILS + 1)]
REDUCED_BYTES = 16 * 2**20
TRAFFIC = f"""
import json, torch, torch.distributed as dist
from pathlib import Path

def sent():
    return {{path.name: int((path / "statistics/tx_bytes").read_text()) for path in Path("/sys/class/net").iterdir()}}

dist.init_process_group("gloo")
dist.barrier()
before = sent()
dist.all_reduce(torch.ones({REDUCED_BYTES // 4}))
dist.barrier()
print("sent " + json.dumps({{name: sent()[name] - count for name, count in before.items()}}), flush=True)
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def rails(jobs: Jobs) -> Iterator[Jobs]:
    """The cluster with four rails, their networks in the jobs' namespace, and a TrainingCluster that names them; taken away afterwards."""
    layout = default_layout()
    try:
        bring_up(rails=RAILS)
        for rail in range(1, RAILS + 1):
            jobs.create(attachment(layout, rail, jobs.namespace))
        jobs.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "traffic"}, "data": {"traffic.py": TRAFFIC}})
        jobs.kind("TrainingCluster", API).create(body=profile())
        yield jobs
    finally:
        jobs.kind("TrainingCluster", API).delete(name=PROFILE)
        bring_up(rails=0)


def described(**cluster: str) -> str:
    """The file of `local` with the rails."""
    stated = yaml.safe_load((ROOT / "clusters" / "local.yaml").read_text())
    stated["cluster"] |= cluster
    named = [{"network": network_name(rail), "resource": resource(rail)} for rail in range(1, RAILS + 1)]
    stated["network"] |= {"mtu": 9000, "rdma": {"enabled": True, "interfaces": INTERFACES, "rails": named, "memlock": "unlimited"}}
    return yaml.safe_dump(stated)


def profile() -> dict[str, Any]:
    found = parse_cluster_file(described(name=PROFILE), PROFILE).profile
    return {"apiVersion": API, "kind": "TrainingCluster", "metadata": {"name": PROFILE}, "spec": found.spec.to_dict()}


def start(jobs: Jobs, name: str, nodes: int, preflight: str) -> None:
    volume = {"name": "scripts", "mountPath": "/scripts", "configMap": {"name": "traffic"}}
    spec = {
        "cluster": PROFILE, "nodes": nodes, "script": {"path": "/scripts/traffic.py"}, "fabric": {"mode": "RDMA"},
        "preflight": preflight, "podTemplate": {"volumes": [volume]}, "restart": {"maxRestarts": 0, "holdOnFailureSeconds": 60},
    }  # fmt: skip
    jobs.create({"apiVersion": API, "kind": "TrainingJob", "metadata": {"name": name}, "spec": spec})


def networks_of(pod: dict[str, Any]) -> list[str]:
    """The interfaces that Multus says it has attached, but for the pod network's own."""
    text = (pod["metadata"].get("annotations") or {}).get("k8s.v1.cni.cncf.io/network-status", "[]")
    return [network["interface"] for network in json.loads(text) if not network.get("default")]


def sent_by(jobs: Jobs, name: str) -> list[dict[str, int]]:
    text = ((jobs.get("ConfigMap", f"{name}-log") or {}).get("data") or {}).values()
    return [json.loads(line.partition("sent ")[2]) for line in "\n".join(text).splitlines() if 'sent {"' in line]


def test_pods_get_every_rail_and_gloos_bytes_take_the_first(rails: Jobs) -> None:
    start(rails, "traffic", 2, "None")
    seen: dict[str, list[str]] = {}

    def ended() -> bool:
        for pod in rails.pods("traffic"):
            seen[pod["metadata"]["name"]] = networks_of(pod) or seen.get(pod["metadata"]["name"], [])
        return bool(
            rails.condition("traffic", "Complete").get("status") == "True" or rails.condition("traffic", "Failed").get("status") == "True"
        )

    until("the job's end", ended, 240)
    assert rails.condition("traffic", "Complete").get("status") == "True", rails.job("traffic").get("status")
    assert seen == {"traffic-0": INTERFACES, "traffic-1": INTERFACES}
    (sent,) = sent_by(rails, "traffic")  # of node 0, whose log is kept
    assert sent["net1"] > REDUCED_BYTES * 0.9, sent
    assert max(count for name, count in sent.items() if name != "net1") < REDUCED_BYTES / 10, sent
    fabric = rails.condition("traffic", "FabricVerified")
    assert fabric["reason"] == "Gloo" and "over net1" in fabric["message"] and "RDMA was asked for" in fabric["message"]
    rails.end("traffic")


def test_the_rates_between_pods_name_the_rail_that_is_slow(rails: Jobs, tmp_path: Path) -> None:
    """All cables are limited to far less than this machine carries, so that its load changes no measurement."""
    path = tmp_path / "pairs.yaml"
    path.write_text(described(name="pairs", namespace=rails.namespace))
    cables = [(node.namespace, f"cable{rail}") for node in map(default_layout().node, (0, 1)) for rail in range(1, RAILS + 1)]
    measured = ("cluster", "calibrate", str(path), "--pairs", "--mode", "rdma", "--line-rate", "0.4")
    try:
        for namespace, cable in cables:
            limit(namespace, cable, 40 if cable == "cable2" else 400)
        done = lockstep(*measured, "--fail-below", "0.7")
        assert done.returncode == 1
        rows = re.findall(r"^(?:warning|failed) +net\d.*", done.stdout, re.MULTILINE)  # (eth0, the pod network, is as fast as this machine)
        assert len(rows) == 1 and rows[0].startswith("warning  net2: the rail is slow everywhere: ")
        assert f"2 of {2 * (RAILS + 1)} measurements are below 70% of the line rate" in done.stdout
        assert "measures by sockets, not by RDMA: " in done.stderr
    finally:
        for namespace, cable in cables:
            subprocess.run(["tc", "-n", namespace, "qdisc", "del", "dev", cable, "root"], capture_output=True, check=False)
    until("its pods gone", lambda: not rails.pods("lockstep-calibrate"))


def limit(namespace: str, link: str, megabits: int) -> None:
    rate = ["rate", f"{megabits}mbit", "burst", "64kb", "latency", "20ms"]
    subprocess.run(["tc", "-n", namespace, "qdisc", "replace", "dev", link, "root", "tbf", *rate], check=True, capture_output=True)


def test_a_pod_lands_where_the_devices_are_and_the_agent_says_what_it_lacks(rails: Jobs) -> None:
    layout = default_layout()
    without, place = layout.node(0).name, layout.node(1).name
    client = administrator(layout)
    server.set_resources(client, without, {})
    server.set_resources(client, place, resources(RAILS))
    start(rails, "placed", 1, "Basic")

    def found() -> list[dict[str, Any]]:
        return list((rails.job("placed").get("status") or {}).get("preflight", {}).get("findings", []))

    findings = {finding["check"]: finding for finding in until("what preflight found", found, 120)}
    assert [pod["spec"]["nodeName"] for pod in rails.pods("placed")] == [place]
    assert findings["hcas"]["severity"] == "Error" and findings["hcas"]["nodeName"] == place  # pretended devices are no NICs
    assert "mtu" not in findings  # the interfaces have the 9000 that the cluster states
    assert [networks_of(pod) for pod in rails.pods("placed")] == [INTERFACES]
    rails.end("placed")


def test_the_rails_are_discovered_and_lint_finds_them_isolated_as_they_are(rails: Jobs, tmp_path: Path) -> None:
    path = tmp_path / "rails.yaml"
    assert lockstep("cluster", "discover", "rails", "-o", str(path), "-n", rails.namespace).returncode == 0
    rdma = parse_cluster_file(path.read_text(), str(path)).profile.spec.network.rdma
    assert [(rail.network, rail.resource) for rail in rdma.rails] == [(network_name(n), resource(n)) for n in range(1, RAILS + 1)]
    assert (rdma.enabled, rdma.interfaces, rdma.cross_nic) == (True, INTERFACES, 0)
    path.write_text(path.read_text().replace("cross_nic: 0", "cross_nic: 2"))
    linted = lockstep("cluster", "lint", str(path))
    assert linted.returncode == 0 and "the rails are isolated" in linted.stdout


def test_a_deployment_over_rdma_names_the_networks_that_are_missing_and_the_commands_that_bring_them(
    rails: Jobs, other: Jobs, tmp_path: Path
) -> None:
    (tmp_path / "kubectl").write_text(f'#!/bin/sh\nexec {binary.folder(cache_root()) / binary.MULTI_CALL} kubectl "$@"\n')
    (tmp_path / "kubectl").chmod(0o755)
    (tmp_path / "mine.yaml").write_text(described(name="mine", namespace=other.namespace))
    deploy = ("deploy", str(tmp_path / "mine.yaml"), "--mode", "rdma", "--no-dev")
    try:
        refused = lockstep(*deploy)
        assert refused.returncode == 1
        commands = [line.partition("→ ")[2] for line in refused.stdout.splitlines() if "→ kubectl get net-attach-def" in line]
        assert len(commands) == RAILS
        for command in commands:
            done = subprocess.run(["bash", "-c", f"PATH={tmp_path}:$PATH; {command}"], capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
        deployed = lockstep(*deploy)
        assert deployed.returncode == 0 and f"namespace {other.namespace}, --mode rdma" in deployed.stdout, deployed
    finally:
        rails.kind("TrainingCluster", API).delete(name="mine")
        assert lockstep("deploy", "local", "--no-dev").returncode == 0
