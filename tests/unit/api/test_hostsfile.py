"""A cluster file with `platform: hosts`: read strictly, and resolved like any cluster."""

from __future__ import annotations

import pytest

from lockstep.api.errors import ConfigError
from lockstep.api.files.clusterfile import ClusterFile, parse_cluster_file
from lockstep.api.files.clusterkeys import MEANINGLESS, ON_HOSTS
from lockstep.api.files.jobfile import parse_job_file
from lockstep.plan.render.fabric import Transport
from lockstep.plan.render.resolve import refuse_missing_gpus, resolve
from lockstep.plan.render.resolved import PlatformDefaults
from lockstep_spec.choices import StorageMode

HEAD = "cluster: {name: lab, platform: hosts}\n"
KEY = "ssh-ed25519 " + "A" * 68
FULL = f"""
cluster: {{name: lab, platform: hosts, description: Three unlike machines}}
hosts:
  - name: lab0
    address: 192.168.1.100
    user: ada
    port: 2222
    jump: ada@bastion:22,inner
    identity: ~/.ssh/lab
    host_key: {KEY}
    gpus: [0, GPU-01234567-89ab-cdef-0123-456789abcdef]
    interface: enp5s0
    python: ~/miniconda3/envs/ft/bin/python
    workspace: /srv/work
    datasets: /data/sets
    micro_batch: 6
    env: [{{name: HF_HOME, value: /data/hf}}]
  - {{name: lab1, gpus: 1}}
  - {{name: Lab_2.home, address: "fe80::1%eth0", gpus: "0,1,2"}}
defaults: {{user: bob, workspace: ~/work, interface: eth0}}
ports: 29400-29499
storage: {{mode: rwx}}
network: {{mtu: 9000, minimum_busbw: 1.5, tcp: {{interface_exclude: "^lo,docker0,virbr0"}}}}
nccl: {{debug: INFO, env: [{{name: NCCL_IB_TC, value: "106"}}]}}
environment: {{lock: requirements/train.lock, python: 3.10, index: https://pypi.example.com/simple, wheelhouse: ./wheels}}
away_seconds: 3600
notes: Ask Ada.
"""
JOB = "apiVersion: lockstep.dev/v1alpha1\nkind: TrainingJob\nmetadata: {name: x}\nspec: {script: {path: a.py}%s}\n"


def read(text: str) -> ClusterFile:
    return parse_cluster_file(text, "lab.yaml")


def problems(text: str) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        read(text)
    return list(map(str, refused.value.args))


def test_every_key_reaches_its_field() -> None:
    file = read(FULL)
    first, second, third = file.hosts.hosts
    assert (first.name, first.address, first.user, first.port, first.jump) == ("lab0", "192.168.1.100", "ada", 2222, "ada@bastion:22,inner")
    assert (first.identity, first.host_key, first.interface) == ("~/.ssh/lab", KEY, "enp5s0")
    assert first.gpus == ["0", "GPU-01234567-89ab-cdef-0123-456789abcdef"]
    assert (first.python, first.workspace, first.datasets) == ("~/miniconda3/envs/ft/bin/python", "/srv/work", "/data/sets")
    assert (first.micro_batch, [(one.name, one.value) for one in first.env]) == (6, [("HF_HOME", "/data/hf")])
    assert (second.user, second.workspace, second.datasets, second.interface) == ("bob", "~/work", "~/lockstep/datasets", "eth0")
    assert (second.gpus, third.gpus, third.address) == (1, ["0", "1", "2"], "fe80::1%eth0")
    assert (file.hosts.port_range, file.hosts.away_seconds, file.hosts.names) == ((29400, 29499), 3600, ["lab0", "lab1", "Lab_2.home"])
    environment = file.hosts.environment
    assert (environment.python, environment.index, environment.wheelhouse) == ("3.10", "https://pypi.example.com/simple", "./wheels")
    spec = file.profile.spec
    assert (spec.network.mtu, spec.network.tcp.interface_exclude) == (9000, "^lo,docker0,virbr0")
    assert (spec.nccl.env[0].name, spec.notes, file.cluster.description) == ("NCCL_IB_TC", "Ask Ada.", "Three unlike machines")
    assert file.lines["hosts[0].gpus"] == 11


def test_the_least_file_is_one_host() -> None:
    file = read(HEAD + "hosts: [{name: lab0}]\n")
    assert (file.hosts.hosts[0].gpus, file.hosts.port_range, file.hosts.away_seconds) == (None, (29400, 29499), 86400)


@pytest.mark.parametrize(
    ("hosts", "job", "nodes", "gpus"),
    [
        ("[{name: a}, {name: b}, {name: c}]", "", 3, 0),
        ("[{name: a, gpus: 2}, {name: b, gpus: [0]}]", "", 2, 1),
        ("[{name: a, gpus: 2}, {name: b}]", ", gpusPerNode: 2", 2, 2),
        ("[{name: a, gpus: 2}, {name: b, gpus: 2}]", ", nodes: 1, gpusPerNode: 1", 1, 1),
    ],
)
def test_a_job_resolves_to_a_node_a_host_and_the_gpus_that_each_of_them_has(hosts: str, job: str, nodes: int, gpus: int) -> None:
    resolved = resolve(parse_job_file(JOB % job, "job.yaml"), read(HEAD + f"hosts: {hosts}\n").profile, PlatformDefaults(image="hosts"))
    refuse_missing_gpus(resolved)
    assert (resolved.nodes, resolved.gpus_per_node, resolved.storage_mode) == (nodes, gpus, StorageMode.PER_POD)
    assert not resolved.warnings


def test_storage_is_shared_where_the_file_says_so() -> None:
    assert read(HEAD + "hosts: [{name: a}]\nstorage: {mode: rwx}\n").profile.spec.storage.mode is StorageMode.SHARED


def test_rdma_between_hosts_needs_no_rails_and_no_right_of_a_pod() -> None:
    file = read(
        HEAD + "hosts: [{name: a, gpus: 1}, {name: b, gpus: 1}]\nnetwork: {rdma: {enabled: true, devices: [mlx5_0], gid_index: 3}}\n"
    )
    resolved = resolve(parse_job_file(JOB % "", "job.yaml"), file.profile, PlatformDefaults(image="hosts"))
    assert (resolved.transport, resolved.nccl["NCCL_IB_HCA"].value) == (Transport.RDMA, "=mlx5_0")


ONE = "hosts: [{name: a}]\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (HEAD, ["lab.yaml:1: hosts: is required"]),
        (HEAD + "hosts:\n", ["lab.yaml:2: hosts: is required"]),
        (HEAD + "hosts: []\n", ["lab.yaml:2: hosts: must have at least 1 entry"]),
        (HEAD + "hosts: [a, b]\n", ["lab.yaml:2: hosts[0]: must be a mapping with the keys name, user, port",
            "lab.yaml:2: hosts[1]: must be"]),
        (HEAD + "hosts:\n  - {name: a}\n  - {nam: b}\n",
            ["lab.yaml:4: hosts[1].nam: unknown key; did you mean name?", "lab.yaml:4: hosts[1].name: is required"]),
        (HEAD + "hosts: [{name: a, host-key: x}]\n", ["lab.yaml:2: hosts[0].host-key: unknown key; did you mean host_key?"]),
        (HEAD + "hosts: [{name: a}, {name: a}]\n", ["lab.yaml:2: hosts: hosts holds 'a' twice"]),
        (HEAD + "hosts: [{name: -oProxyCommand=x}]\n",
            ["lab.yaml:2: hosts[0].name: '-oProxyCommand=x' is not valid: must be a name that ssh takes"]),
        (HEAD + "hosts: [{name: ada@lab0}]\n", ["lab.yaml:2: hosts[0].name: 'ada@lab0' is not valid"]),
        (HEAD + "hosts: [{name: a, address: lab0}]\n", ["lab.yaml:2: hosts[0].address: must be a numeric address such as 192.168.1.100"]),
        (HEAD + "hosts: [{name: a, address: 'fe80::1%eth0;x'}]\n",
            ["lab.yaml:2: hosts[0].address: must be a numeric address such as 192.168.1.100"]),
        (HEAD + "hosts: [{name: a, address: 0.0.0.0}]\n", ["lab.yaml:2: hosts[0].address: must be an address of the host itself"]),
        (
            HEAD + "hosts: [{name: a, address: 10.0.0.1}, {name: b, address: 10.0.0.1}]\n",
            ["lab.yaml:2: hosts: hosts a and b have the same address 10.0.0.1"],
        ),
        (
            HEAD + "hosts: [{name: a, address: 127.0.1.1}, {name: b, address: 10.0.0.1}]\n",
            ["lab.yaml:2: hosts: the address of a is the loopback, which the other hosts can't reach"],
        ),
        (HEAD + "hosts: [{name: a, jump: '-oX'}]\n",
            ["lab.yaml:2: hosts[0].jump: '-oX' is not valid: must be hosts as ssh's ProxyJump takes them"]),
        (HEAD + "hosts: [{name: a, identity: id_rsa}]\n",
            ["lab.yaml:2: hosts[0].identity: 'id_rsa' is not valid: must be a path that begins with / or ~/"]),
        (HEAD + "hosts: [{name: a, host_key: AAAA}]\n", ["lab.yaml:2: hosts[0].host_key: 'AAAA' is not valid: must be a public host key"]),
        (HEAD + "hosts: [{name: a, gpus: cuda}]\n", ["lab.yaml:2: hosts[0].gpus: must be a number of GPUs, or a list of their indexes"]),
        (HEAD + "hosts: [{name: a, gpus: 65}]\n", ["lab.yaml:2: hosts[0].gpus: must be a number of GPUs"]),
        (HEAD + "hosts: [{name: a, gpus: [0, 0]}]\n", ["lab.yaml:2: hosts[0].gpus: must name each GPU once"]),
        (HEAD + "hosts: [{name: a, gpus: {}}]\n", ["lab.yaml:2: hosts[0].gpus: must be a list, or names"]),
        (HEAD + "hosts: [{name: a, micro_batch: 0}]\n", ["lab.yaml:2: hosts[0].micro_batch: must be greater than or equal to 1"]),
        (HEAD + "hosts: [{name: a, port: x}]\n", ["lab.yaml:2: hosts[0].port: 'x' is not valid: must be a whole number"]),
        (
            HEAD + "hosts: [{name: a, env: [{name: LOCKSTEP_X, value: y}]}]\n",
            ["lab.yaml:2: hosts[0].env: env may not set variables that begin with LOCKSTEP_"],
        ),
        (HEAD + ONE + "defaults: {user: A B, name: a}\n",
            ["lab.yaml:3: defaults.name: unknown key", "lab.yaml:3: defaults.user: 'A B' is not valid: must be a login name"]),
        (HEAD + ONE + "ports: 29400\n", ["lab.yaml:3: ports: '29400' is not valid: must be first and last port, such as 29400-29499"]),
        (HEAD + ONE + "ports: 29400-29410\n", ["lab.yaml:3: ports: ports must be FIRST-LAST with at least 16 ports from 1024 to 65535"]),
        (HEAD + ONE + "ports: 80-200\n", ["lab.yaml:3: ports: ports must be FIRST-LAST"]),
        (HEAD + ONE + "ports: 65530-65600\n", ["lab.yaml:3: ports: ports must be FIRST-LAST"]),
        (HEAD + ONE + "environment: {python: 3.9}\n", ["lab.yaml:3: environment.python: '3.9' is not valid: must be a version from 3.10"]),
        (HEAD + ONE + "environment: {index: 'https://me:pw@x/'}\n",
            ["lab.yaml:3: environment.index: an address with a password or a port is not valid: must be an https address without a login"]),
        (HEAD + ONE + "away_seconds: -1\n", ["lab.yaml:3: away_seconds: must be greater than or equal to 0"]),
        (HEAD + ONE + "awayseconds: 1\n", ["lab.yaml:3: awayseconds: unknown key; did you mean away_seconds?"]),
        (HEAD + ONE + "interface: eth0\n", ["lab.yaml:3: interface: unknown key here; it belongs to hosts[].interface"]),
        ("cluster: {name: lab, platform: Hosts}\n" + ONE,
            ["lab.yaml:1: cluster.namespace: is required",
                "lab.yaml:1: cluster.platform: 'Hosts' is not valid; did you mean hosts? (valid: hosts, kubernetes, openshift)",
                    "lab.yaml:2: hosts: is for a file of hosts: write platform: hosts in section cluster"]),
        ("cluster: {name: lab, namespace: n}\naway_seconds: 3\n",
            ["lab.yaml:2: away_seconds: is for a file of hosts: write platform: hosts in section cluster"]),
    ],
)  # fmt: skip
def test_a_mistake_names_its_line_its_key_and_what_is_valid(text: str, expected: list[str]) -> None:
    messages = problems(text)
    assert len(messages) == len(expected), messages
    assert all(message.startswith(start) for message, start in zip(messages, expected, strict=True)), messages


MEANINGLESS_VALUES = {
    "cluster.api": "cluster: {name: lab, platform: hosts, api: x.example.com}\n",
    "cluster.namespace": "cluster: {name: lab, platform: hosts, namespace: n}\n",
    "storage": HEAD + "storage: {class_rwo: fast}\n",
    "network.rdma.rails": HEAD + "network: {rdma: {rails: []}}\n",
    "network.rdma.memlock": HEAD + "network: {rdma: {memlock: unlimited}}\n",
} | {key: HEAD + f"{key}: {{a: b}}\n" for key in ("nodes", "security", "gpus", "resources", "image", "shm_size", "pod")}


@pytest.mark.parametrize("key", MEANINGLESS)
def test_a_key_that_means_nothing_on_hosts_is_refused_by_name_with_what_counts_there(key: str) -> None:
    (message,) = problems(MEANINGLESS_VALUES[key] + ONE)
    name = "storage.class_rwo" if key == "storage" else key
    assert f": {name}: has no meaning with platform: hosts: {MEANINGLESS[key]}" in message


def test_no_key_of_a_file_of_hosts_is_called_meaningless() -> None:
    assert not set(ON_HOSTS.keys) & set(MEANINGLESS)


def test_several_mistakes_are_all_reported() -> None:
    assert len(problems(HEAD + "hosts: [{name: a, gpus: x, port: 0}, {name: b, user: '!'}]\nimage: x\naway: 3\n")) == 5
