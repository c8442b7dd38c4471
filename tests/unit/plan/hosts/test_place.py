"""Seats of a job on hosts: addresses, ports, GPUs, folders, variables and units, from what the hosts say."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lockstep.api.errors import ConfigError
from lockstep.api.files.clusterfile import parse_cluster_file
from lockstep.plan.hosts.facts import BadAnswer, JobOnHost, Route, read_host
from lockstep.plan.hosts.place import addresses_of, chosen, free_block, path_of_job, why_unkept
from lockstep.plan.hosts.record import read_record, record_text
from lockstep.plan.hosts.unit import quoted, unit_text
from support.hosts_told import CLUSTER, JOB, facts, gpu, placed


def test_each_host_has_a_run_of_its_own_that_differs_in_places_alone() -> None:
    first, second = placed(facts("lab0", "10.0.0.1"), facts("lab1", "10.0.0.2"))
    assert first.run.addresses == second.run.addresses == ("10.0.0.1", "10.0.0.2"), "stated, and by the route to the stated one"
    assert (first.run.coordinator_port, first.run.master_port) == (29400, 29401)
    assert [seat.run.run_dir for seat in (first, second)] == ["/home/lab0/lockstep/workspace/runs/x", "/data/ws/runs/x"]
    assert first.run.command == ("/home/lab0/env/bin/python", "rank.py")
    assert first.run.attempts_before == second.run.attempts_before == 2, "the highest on any volume"
    assert second.record.environment["HF_HOME"] == "/data/hf" and "HF_HOME" not in first.record.environment
    assert first.record.environment["NCCL_SOCKET_IFNAME"] == "=eth0" and first.record.environment["A"] == "1"
    assert first.run.host is not None and first.run.host.unit == "lockstep-x.service"
    assert "\nTimeoutStopSec=180\n" in first.record.unit and first.run.save_grace_seconds == 150
    assert read_record(json.loads(record_text(second.record))) == second.record


def test_a_host_without_linger_keeps_its_agent_in_a_session() -> None:
    (only,) = placed(facts("lab0", "10.0.0.1", lingers=False), job=JOB.replace("nodes: 2", "nodes: 1"))
    assert only.record.supervised and not only.record.unit and only.run.host is not None and only.run.host.unit == ""
    assert only.record.unkept == "ada has no linger there: as root on it: loginctl enable-linger ada"


@pytest.mark.parametrize(
    ("keeping", "expected"),
    [
        ({}, ""),
        ({"kills_processes": True}, ""),
        ({"has_units": False}, "there is no systemd for the units of ada: as root on it: install dbus-user-session and libpam-systemd, then"
                               " loginctl enable-linger ada"),
        ({"lingers": False, "kills_processes": True},
            "host lab0: it ends all that ada runs at the end of the login.*: as root on it: loginctl enable-linger ada"),
        ({"has_units": False, "kills_processes": True}, "no systemd for the units of ada: as root on it: set KillUserProcesses=no"),
    ],
)  # fmt: skip
def test_a_reboot_is_survived_or_the_reason_told_and_a_session_that_would_end_with_the_login_refused(
    keeping: dict[str, bool], expected: str
) -> None:
    host, there = CLUSTER.hosts.host("lab0"), facts("lab0", "10.0.0.1", **keeping)
    if keeping.get("kills_processes") and expected:
        with pytest.raises(ConfigError, match=expected):
            why_unkept(host, there)
    else:
        assert why_unkept(host, there) == expected


def test_unlike_numbers_of_gpus_are_all_taken_and_one_that_is_used_is_named() -> None:
    first, second = placed(facts("lab0", "10.0.0.1", gpu(0), gpu(1)), facts("lab2", "10.0.0.2", gpu(0), gpu(1)))
    assert first.run.node_ranks == (2, 1) and second.record.environment["CUDA_VISIBLE_DEVICES"] == "GPU-1", "the file allows GPU 1 alone"
    assert second.run.host is not None and second.run.host.claims == ("GPU-1",) and first.run.node_micro_batches == (0, 2)
    taken = gpu(1, claim="job y of bob")
    with pytest.raises(ConfigError, match=r"no GPU is free on lab2 \(GPU 1 is claimed by job y of bob\)"):
        placed(facts("lab0", "10.0.0.1", gpu(0)), facts("lab2", "10.0.0.2", gpu(0), taken))
    with pytest.raises(ConfigError, match="host lab2 has 0 free GPUs, and the job takes 1 there: GPU 1 is claimed by job y of bob"):
        placed(facts("lab0", "10.0.0.1", gpu(0)), facts("lab2", "10.0.0.2", taken), job=JOB.replace("nodes: 2", "nodes: 2, gpusPerNode: 1"))


def test_where_no_host_has_a_gpu_the_refusal_has_the_options_to_train_on_cpus() -> None:
    one_each = JOB.replace("nodes: 2", "nodes: 2, gpusPerNode: 1")
    options = "--set gpusPerNode=0 --set ranksPerNode=1"
    with pytest.raises(ConfigError, match=rf"^hosts lab0, lab1 have no GPU, and the job takes 1 on each: to train on CPUs, add {options}$"):
        placed(facts("lab0", "10.0.0.1"), facts("lab1", "10.0.0.2"), job=one_each)
    annotation = "metadata: {annotations: {lockstep.dev/typed: 'lockstep run --hosts lab0,lab1 --nproc-per-node 1 -- a.py --x'}, "
    with pytest.raises(ConfigError, match=f"add {options}: lockstep run --hosts lab0,lab1 --nproc-per-node 1 {options} -- a.py --x$"):
        placed(facts("lab0", "10.0.0.1"), facts("lab1", "10.0.0.2"), job=one_each.replace("metadata: {", annotation))
    with pytest.raises(ConfigError, match="host lab0 has 0 free GPUs, and the job takes 1 there: it has 0 in all"):
        placed(facts("lab0", "10.0.0.1"), facts("lab1", "10.0.0.2", gpu(0)), job=one_each)
    on_cpus = JOB.replace("nodes: 2", "nodes: 2, gpusPerNode: 0, ranksPerNode: 1")
    assert len(placed(facts("lab0", "10.0.0.1"), facts("lab1", "10.0.0.2"), job=on_cpus)) == 2


def test_a_job_that_takes_all_gpus_of_a_host_is_refused_where_not_all_are_known() -> None:
    lost = {"gpu_problem": "nvidia-smi ends with 15: lost"}
    refusal = "host lab1: its GPUs are not all known: nvidia-smi ends with 15: lost. Mend its driver, or leave the host out"
    for gpus in ((), (gpu(0),)):
        with pytest.raises(ConfigError, match=refusal):
            placed(facts("lab0", "10.0.0.1", *gpus), facts("lab1", "10.0.0.2", *gpus, **lost))
    with pytest.raises(ConfigError, match="host lab1 has 0 free GPUs, and the job takes 1 there: nvidia-smi ends with 15: lost"):
        placed(
            facts("lab0", "10.0.0.1", gpu(0)), facts("lab1", "10.0.0.2", **lost), job=JOB.replace("nodes: 2", "nodes: 2, gpusPerNode: 1")
        )
    on_cpus = JOB.replace("nodes: 2", "nodes: 2, gpusPerNode: 0, ranksPerNode: 1")
    assert len(placed(facts("lab0", "10.0.0.1"), facts("lab1", "10.0.0.2", **lost), job=on_cpus)) == 2
    named = placed(facts("lab0", "10.0.0.1", gpu(0)), facts("lab2", "10.0.0.2", gpu(1), **lost))
    assert named[1].run.host is not None and named[1].run.host.claims == ("GPU-1",), "the file names all that the job may take"


def test_a_job_whose_files_cannot_be_read_on_a_host_is_not_started_over_them() -> None:
    unread = {"x": JobOnHost(problem="job.json: Permission denied")}
    with pytest.raises(
        ConfigError, match=r"host lab1: the files of job x there can't be read: job\.json: Permission denied\. Mend or move away"
    ):
        placed(facts("lab0", "10.0.0.1"), facts("lab1", "10.0.0.2", jobs=unread))


@pytest.mark.parametrize(
    ("of_cluster", "of_host", "of_job", "expected"),
    [
        ("", "", "", "=eth0"),
        ("eth1", "", "", "eth1"),
        ("eth1", "interface: eth2", "", "=eth2"),
        ("eth1", "interface: eth2, env: [{name: NCCL_SOCKET_IFNAME, value: eth3}]", "", "eth3"),
        ("eth1", "env: [{name: NCCL_SOCKET_IFNAME, value: eth3}]", "env: [{name: NCCL_SOCKET_IFNAME, value: eth4}]", "eth4"),
    ],
)
def test_whoever_states_an_interface_wins_over_what_is_found_and_the_job_over_all(
    of_cluster: str, of_host: str, of_job: str, expected: str
) -> None:
    text = (
        f"cluster: {{name: lab, platform: hosts}}\ndefaults: {{python: /py}}\nhosts: [{{name: lab0, address: 10.0.0.1, {of_host}}}, {{name:"
        " lab1}]\n"
    )
    text += f"nccl: {{env: [{{name: NCCL_SOCKET_IFNAME, value: {of_cluster}}}]}}\n" if of_cluster else ""
    job = JOB.replace(', env: [{name: A, value: "1"}]', f", {of_job}" if of_job else "")
    hosts = (facts("lab0", "10.0.0.1", gpu(0)), facts("lab1", "10.0.0.2", gpu(0)))
    seat, _ = placed(*hosts, job=job, file=parse_cluster_file(text, "lab.yaml"))
    assert seat.record.environment["NCCL_SOCKET_IFNAME"] == expected


def test_an_interface_that_a_host_does_not_have_is_refused_with_those_that_it_has() -> None:
    text = (
        "cluster: {name: lab, platform: hosts}\ndefaults: {python: /py}\nhosts: [{name: lab0, address: 10.0.0.1, interface: enp0}, {name:"
        " lab1}]\n"
    )
    links = {"eth0": {"up": True}, "wlan0": {"up": True}}
    hosts = (facts("lab0", "10.0.0.1", gpu(0), links=links), facts("lab1", "10.0.0.2", gpu(0), links=links))
    with pytest.raises(
        ConfigError, match=r"^host lab0: the file names the interface enp0, and the host has eth0, wlan0: correct hosts\[\].interface$"
    ):
        placed(*hosts, file=parse_cluster_file(text, "lab.yaml"))
    assert placed(*hosts, file=parse_cluster_file(text.replace("enp0", "lo"), "lab.yaml"))


def test_an_address_that_nobody_states_or_that_two_have_is_refused() -> None:
    hosts = [CLUSTER.hosts.host("lab1"), CLUSTER.hosts.host("lab2")]
    with pytest.raises(ConfigError, match="no address of lab1, lab2 is known: state"):
        addresses_of(hosts, {"lab1": facts("lab1", "10.0.0.2"), "lab2": facts("lab2", "10.0.0.3")})
    with pytest.raises(ConfigError, match=r"hosts lab0, lab1 have the same address 10\.0\.0\.1"):
        addresses_of(
            [CLUSTER.hosts.host("lab0"), hosts[0]], {"lab1": facts("lab1", "10.0.0.1", routes={"10.0.0.1": Route("10.0.0.1", "eth0")})}
        )


def test_a_block_of_ports_is_one_that_nobody_listens_on_and_no_job_is_promised() -> None:
    assert CLUSTER.hosts is not None
    one, other = facts("lab0", "10.0.0.1", taken_ports=(29405,)), facts("lab1", "10.0.0.2", promised_ports=(29416,))
    assert free_block(CLUSTER.hosts, [one, other]) == 29432
    with pytest.raises(ConfigError, match="no block of 16 ports from 29400 to 29447 is free on every host"):
        free_block(CLUSTER.hosts, [one, other, facts("lab2", "10.0.0.3", taken_ports=(29447,))])


def test_hosts_are_chosen_by_name_and_number() -> None:
    assert CLUSTER.hosts is not None
    assert [host.name for host in chosen(CLUSTER.hosts, 2, first="lab1")] == ["lab1", "lab0"]
    assert [host.name for host in chosen(CLUSTER.hosts, 3, without=["lab0"])] == [
        "lab1",
        "lab2",
    ], "the job goes on with those that are left"
    for wrong in ({"first": "lab9"}, {"without": ["lab9"]}):
        with pytest.raises(ConfigError, match="there is no host lab9: the cluster file has lab0, lab1, lab2"):
            chosen(CLUSTER.hosts, None, **wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"the job has 4 nodes, but there are 3 hosts .*: use --nodes 3"):
        chosen(CLUSTER.hosts, 4)


def test_a_path_of_a_host_is_told_as_the_job_names_it() -> None:
    host = facts("lab0", "10.0.0.1")
    assert (
        path_of_job("~/lockstep/workspace/a.py", host) == "/workspace/a.py"
        and path_of_job("/d", host) == "/datasets"
        and path_of_job("/e", host) == "/e"
    )


def test_a_word_of_a_unit_keeps_its_characters() -> None:
    assert quoted('a "b" %h $HOME \\ \n') == '"a \\"b\\" %%h $HOME \\\\ \\n"'


def test_a_dollar_is_doubled_where_systemd_reads_variables_and_there_alone() -> None:
    lines = unit_text("x", 0, ("/bin/a", "--dollar", "$5"), {"PRICE": "$5"}, "/f", "/f/log", 30).splitlines()
    assert 'ExecStart="/bin/a" "--dollar" "$$5"' in lines and 'Environment="PRICE=$5"' in lines


@pytest.mark.parametrize(
    "answer", [{}, {"python": "x"}, {"jobs": 3}, {"jobs": {}, "python": "3.11"}, {"deep": json.loads("[" * 600 + "]" * 600)}]
)
def test_what_is_no_answer_of_a_host_is_refused_with_its_name(answer: dict[str, Any]) -> None:
    with pytest.raises(BadAnswer, match="host lab0: its Python gives no valid answer"):
        read_host("lab0", answer)
