"""One job file is the same job in every place: what a rank gets on hosts, by a launch and with --local is compared with what it gets in a
pod.

Every difference has its reason in DIFFERENCES. Folders of the volumes are compared by the names that a job gives them. All that a rank gets
stands in tests/golden/places; after a meant change: UPDATE_GOLDEN=1 pytest tests/unit/platforms/test_same_job.py, and read the diff.
"""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from golden.plan_cases import CONTEXT, trainer_of
from lockstep.api.files.clusterfile import parse_cluster_file
from lockstep.api.files.jobfile import parse_job_file
from lockstep.api.quantity import number
from lockstep.plan.render import objects
from lockstep.plan.render.pod import pod_variables
from lockstep.plan.render.resolve import resolve
from lockstep.plan.render.resolved import PlatformDefaults, Resolved
from lockstep.plan.render.run import build_run, pod_placement
from lockstep.platforms.kubernetes.objects import prepare
from lockstep.platforms.local.joined.machine import NodeMachine
from lockstep.platforms.local.joined.seats import Launched, run_there
from lockstep.platforms.local.placement import local_defaults, local_run, node_devices
from lockstep_gang.agent.ranks import environment as environment_module
from lockstep_gang.agent.ranks.environment import RankPlace, rank_environment
from lockstep_gang.contract.messages import Start
from lockstep_gang.contract.run import Run, parse_run
from lockstep_spec.codec import to_json
from support.checkout import ROOT as CHECKOUT
from support.hosts_told import facts, gpu, placed

GANG = {"nodes": 2, "gpusPerNode": 2}
ON_CPUS = {"nodes": 2, "gpusPerNode": 0, "ranksPerNode": 2}
SCRIPT = {"path": "src/train.py", "args": ["--config=/workspace/ds.json", "--epochs", "3"]}
TRAINING = {"model": {"name": "/workspace/models/tiny"}, "data": {"path": "/datasets/all.jsonl"}}
STATED = [{"name": "NCCL_ALGO", "value": "Tree"}, {"name": "NCCL_SOCKET_IFNAME", "value": "eth7"}]
JOBS: dict[str, dict[str, Any]] = {
    "a script on GPUs": {**GANG, "script": SCRIPT},
    "a script on CPUs": {**ON_CPUS, "script": SCRIPT},
    "one rank a node": {"nodes": 2, "gpusPerNode": 0, "script": SCRIPT},
    "a module": {**GANG, "script": {"module": "tool.train", "folder": "/workspace/src", "args": ["-v"]}},
    "a program": {**ON_CPUS, "script": {"command": ["accelerate", "launch"], "args": ["/workspace/a.py"]}},
    "the trainer on GPUs": {**GANG, "training": TRAINING},
    "the trainer on CPUs": {**ON_CPUS, "training": TRAINING, "restart": {"maxRestarts": 1, "backoffSeconds": 7}},
    "NCCL's variables on GPUs": {**GANG, "script": SCRIPT, "env": STATED},
    "NCCL's variables on CPUs": {**ON_CPUS, "script": SCRIPT, "env": [*STATED, {"name": "MODE", "value": "/datasets/a"}]},
    "threads, and no preflight": {
        **ON_CPUS, "script": SCRIPT, "env": [{"name": "OMP_NUM_THREADS", "value": "3"}, {"name": "X", "value": "$(HOME)"}],
        "preflight": "None", "hangTimeouts": {"stepSeconds": 900}, "startTimeoutSeconds": 77,
    },
    "CPU and memory of its own": {**ON_CPUS, "script": SCRIPT, "resources": {"cpu": "1500m", "memory": "4Gi"}},
}  # fmt: skip
NCCL_OF_CLUSTER = """
nccl: {debug: INFO, env: [{name: NCCL_ALGO, value: CollnetDirect}, {name: NCCL_BUFFSIZE, value: "1048576"}]}
"""
CLUSTER = parse_cluster_file(
    f"""
cluster: {{name: mine, api: api.mine.example.com, namespace: ml}}
image: i
gpus: {{per_node: 2}}
pod: {{env: [{{name: HF_HOME, value: /workspace/hf}}]}}
{NCCL_OF_CLUSTER}""",
    "mine.yaml",
)
HOSTS = parse_cluster_file(
    f"""
cluster: {{name: lab, platform: hosts}}
defaults: {{python: /py/bin/python3}}
hosts: [{{name: lab0, address: 10.0.0.1, env: [{{name: HF_HOME, value: /workspace/hf}}]}}, {{name: lab1}}]
{NCCL_OF_CLUSTER}""",
    "lab.yaml",
)
ROOT = Path("/home/ada/lockstep")
EVERYWHERE, OF_ONE_NETWORK, OF_NO_CLUSTER = ("hosts", "launch", "local"), ("hosts", "launch"), ("launch", "local")
IDENTITY, PORTS = "its namespace is a cluster's", "a machine's ports are shared with other jobs, so a free block is taken"
ADDRESSES = "pods have names in DNS, machines have numbers"
CLUSTERS_NETWORK = "the cluster file speaks of its own network, and with --local all ranks are on one machine"
UNLIMITED = "ranks that are started by hand have neither a pod nor a unit that could keep it: a line at the start says so"
DIFFERENCES = {
    "run addresses": (EVERYWHERE, ADDRESSES),
    "run attemptsBefore": (("hosts",), "each host has its own volume, and any may have been node 0 before"),
    "run python": (EVERYWHERE, "the Python of the machine in place of the image's"),
    "run coordinatorPort": (OF_NO_CLUSTER, PORTS),
    "run host": (EVERYWHERE, "the agent of a machine has duties there that the kubelet has for a pod"),
    "run job": (EVERYWHERE, IDENTITY),
    "run keyFile": (EVERYWHERE, "it is mounted in pods, and a private file on machines"),
    "run masterPort": (EVERYWHERE, PORTS),
    "run report": (EVERYWHERE, "there is no operator to report to"),
    "run storage": (OF_ONE_NETWORK, "hosts have a folder each unless their file says otherwise, and launched machines find out"),
    "run timeouts": (("hosts",), "a host that is off for a while comes back; a lost pod is replaced"),
    "run whenDone": (EVERYWHERE, "pods stay until the operator lets them go, an agent on a machine ends"),
    "limit cpu": (OF_NO_CLUSTER, UNLIMITED),
    "limit memory": (OF_NO_CLUSTER, UNLIMITED),
    "preflight ownVariables": (("launch",), "each person at a machine may state its interface, its GPUs and its threads"),
    "preflight shmBytes": (EVERYWHERE, "the size of a pod's /dev/shm is stated by the cluster file, a machine's isn't"),
    "variable CUDA_VISIBLE_DEVICES": (EVERYWHERE, "a pod sees its own GPUs alone"),
    "variable GLOO_SOCKET_IFNAME": (
        OF_ONE_NETWORK,
        "machines have several networks, a pod without rails has one, and --local uses the loopback",
    ),
    "variable HF_HOME": (OF_NO_CLUSTER, "pod.env is about the image; the shells of these machines have their own"),
    "variable HOME": (EVERYWHERE, "the user of a pod may have no home"),
    "variable LOCKSTEP_DEFAULT_THREADS": (("local",), "all nodes share the cores of one machine"),
    "variable LOCKSTEP_POD_IPS": (EVERYWHERE, ADDRESSES),
    "variable MASTER_ADDR": (EVERYWHERE, ADDRESSES),
    "variable MASTER_PORT": (EVERYWHERE, PORTS),
    "variable NCCL_ALGO": (("local",), CLUSTERS_NETWORK),
    "variable NCCL_BUFFSIZE": (("local",), CLUSTERS_NETWORK),
    "variable NCCL_DEBUG": (("local",), CLUSTERS_NETWORK),
    "variable NCCL_IB_DISABLE": (("local",), CLUSTERS_NETWORK),
    "variable NCCL_SOCKET_IFNAME": (
        EVERYWHERE,
        "machines state the interface on the way to the others; with --local no other than the job's is stated",
    ),
    "variable OMP_NUM_THREADS": (("local",), "all nodes share the cores of one machine"),
    "variable PATH": (EVERYWHERE, "the programs of the machine's Python, as those of an image are on its PATH"),
    "variable USER": (EVERYWHERE, "the user of a pod may have no name"),
}
"""Name of what differs from a pod's in some job: the places, and the reason."""


def of_rank(run: Run, inherited: dict[str, str], roots: dict[str, str], node: int = 0) -> dict[str, str]:
    """Return the variables, command, folder and settings of the second rank of a node, as text by their names."""
    place = RankPlace(node, node, run.ranks_per_node * node + 1, 1, "/run.json", "/socket", "/error")
    variables = rank_environment(run, Start(1, 0, run.addresses[0], run.master_port), place, inherited)
    told = to_json(replace(run, environment={}, build=""))
    told["python"], told["arguments"] = run.command[0], told.pop("command")[1:]
    training, preflight = told.pop("training") or {}, told.pop("preflight") or {}
    parts = {"run": told, "training": training, "preflight": preflight, "variable": variables}
    values = {f"{part} {name}": json.dumps(value, sort_keys=True) for part, named in parts.items() for name, value in named.items()}
    for folder, name in roots.items():
        values = {key: value.replace(folder, name) for key, value in values.items()}
    return values


def job_text(spec: dict[str, Any]) -> str:
    return yaml.safe_dump({"apiVersion": "lockstep.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "x"}, "spec": spec})


def in_pods(text: str, node: int = 0) -> dict[str, str]:
    resolved = resolve(parse_job_file(text, "job.yaml"), CLUSTER.profile, PlatformDefaults(namespace="ml", uid="uid-1", image="i"))
    return of_pod(resolved, build_run(resolved, pod_placement(resolved, CONTEXT.report)), node)


def without_operator(text: str, node: int = 0) -> dict[str, str]:
    run = prepare(parse_job_file(text, "job.yaml"), CLUSTER.profile, "ml")
    told = of_pod(run.resolved, parse_run(run.frozen.run), node)
    return {name: value.replace(run.resolved.uid, "uid-1") for name, value in told.items()}


def of_pod(resolved: Resolved, run: Run, node: int) -> dict[str, str]:
    container = {one["name"]: str(one.get("value", "from the pod")).replace("$$", "$") for one in pod_variables(resolved)}
    limits = trainer_of(objects.render(resolved, CONTEXT)).get("resources", {}).get("limits", {})
    kept = {f"limit {name}": str(float(number(limits[name]))) for name in ("cpu", "memory") if name in limits}
    return of_rank(run, container, {}, node) | kept


def on_hosts(text: str, node: int = 0) -> dict[str, str]:
    gpus = (gpu(0), gpu(1))
    seat = placed(facts("lab0", "10.0.0.1", *gpus), facts("lab1", "10.0.0.2", *gpus), job=text, file=HOSTS)[node]
    quota, memory = (re.search(rf"(?m)^{name}=(\d+)", seat.record.unit) for name in ("CPUQuota", "MemoryMax"))
    kept = {"limit cpu": str(float(quota[1]) / 100)} if quota else {}
    kept |= {"limit memory": str(float(memory[1]))} if memory else {}
    return of_rank(seat.run, dict(seat.record.environment), roots_of(f"/home/lab{node}/lockstep"), node) | kept


def by_launch(text: str, node: int = 0) -> dict[str, str]:
    machines = [
        NodeMachine(f"lab{node}", "1.0", "/py/bin/python3", str(ROOT), f"10.0.0.{node + 1}", "eth0", ("0", "1")) for node in range(2)
    ]
    launched = Launched(parse_job_file(text, "job.yaml"), CLUSTER.profile, 2, "uid-1", 29600)
    return of_rank(run_there(launched, machines, node), {}, roots_of(str(ROOT)), node)


def with_local(text: str, node: int = 0) -> dict[str, str]:
    resolved = resolve(parse_job_file(text, "job.yaml"), CLUSTER.profile, local_defaults(ROOT, "uid-1"))
    shell = {"CUDA_VISIBLE_DEVICES": node_devices(resolved, {}, 4)[node]}
    return of_rank(local_run(resolved, Path("/key"), (29600, 29601), {}), shell, roots_of(str(ROOT)), node)


def roots_of(folder: str) -> dict[str, str]:
    return {f"{folder}/workspace": "/workspace", f"{folder}/datasets": "/datasets"}


PLACES = {"hosts": on_hosts, "launch": by_launch, "local": with_local}
ALL = {"operator": in_pods, "without an operator": without_operator, **PLACES}
EVERY_NODE = ", ".join(f"{place} {node}" for place in ALL for node in range(2))
GOLDEN = CHECKOUT / "tests/golden/places"


@pytest.fixture(autouse=True)
def machine_of_16_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment_module, "usable_cores", lambda: 16.0)


@pytest.mark.parametrize("job", JOBS)
def test_run_variables_and_seats_are_those_of_the_golden_file(job: str) -> None:
    """A line each, with the places and nodes where it is so."""
    places: dict[str, list[str]] = {}
    for place, render in ALL.items():
        for node in range(2):
            for name, value in render(job_text(JOBS[job]), node).items():
                places.setdefault(f"{name}: {value}", []).append(f"{place} {node}")
    told = (f"{line}  # {', '.join(where)}\n".replace(EVERY_NODE, "everywhere") for line, where in places.items())
    named = (line.replace(sys.executable, "/here/bin/python3").replace(str(Path(sys.executable).parent), "/here/bin") for line in told)
    text = "".join(sorted(named))  # Sorted after it is named: the checkout's path has no place in the order.
    path = GOLDEN / f"{job.replace(' ', '-')}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def test_what_a_rank_gets_differs_between_places_where_a_reason_is_stated_and_nowhere_else() -> None:
    differing = set()
    for spec in JOBS.values():
        text = job_text(spec)
        pods = in_pods(text)
        for place, render in PLACES.items():
            there = render(text)
            differing |= {(name, place) for name in pods.keys() | there.keys() if pods.get(name) != there.get(name)}
    stated = {(name, place) for name, (places, _) in DIFFERENCES.items() for place in places}
    assert (differing - stated, stated - differing) == (set(), set()), "without a stated reason; stated, and no difference"


@pytest.mark.parametrize(
    ("job", "gpus", "expected"),
    [
        ([{"name": "OMP_NUM_THREADS", "value": "3"}], 2, {"OMP_NUM_THREADS": "3", "LOCKSTEP_DEFAULT_THREADS": None}),
        ([{"name": "NCCL_ALGO", "value": "Ring"}], 2, {"NCCL_ALGO": "Ring"}),
        ([{"name": "NCCL_ALGO", "value": "Ring"}], 0, {"NCCL_ALGO": "Ring"}),
    ],
)
def test_the_job_wins_over_the_cluster_in_every_place(job: list[dict[str, str]], gpus: int, expected: dict[str, str | None]) -> None:
    text = job_text({"nodes": 2, "gpusPerNode": gpus, "script": SCRIPT, "env": job})
    for render in (in_pods, *PLACES.values()):
        values = render(text)
        assert {name: values.get(f"variable {name}") for name in expected} == {
            name: value and json.dumps(value) for name, value in expected.items()
        }
