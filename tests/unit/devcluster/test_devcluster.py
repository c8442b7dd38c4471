"""What the embedded cluster decides before it touches the machine."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography import x509
from cryptography.x509.oid import NameOID

from lockstep.api.errors import ConfigError
from lockstep.devcluster import binary, python_volume
from lockstep.devcluster.binary import SOURCE, build_options, kubernetes_version, source_key
from lockstep.devcluster.certificates import Authority
from lockstep.devcluster.cluster import ClusterError, ClusterGoal, _wait, parse_resources, prepare
from lockstep.devcluster.controlplane import commands
from lockstep.devcluster.host import cgroups, machine, processes
from lockstep.devcluster.host.layout import Layout, default_layout
from lockstep.devcluster.hosts.needs import CLUSTER, CNI, HOSTS, MachineFacts, Purpose, Shortfall, judge
from lockstep.devcluster.provisioner import to_provision, to_release, volume_for
from lockstep.devcluster.server import node_readiness
from support.clusters.own_cluster import client_kubeconfig
from unit.virtual_time import VirtualClock

COMMANDS = frozenset(CLUSTER.packages)
READY = MachineFacts(
    system="Linux", is_root=True, distribution="debian", commands=COMMANDS, go=(1, 26), is_built=False, lacks=frozenset(),
    groups=Path("/sys/fs/cgroup"), groups_writable=True, python="3.11", base_python="3.11", has_image=False, networks=("10.89.0.0/24",),
    routes=(("192.0.2.0/24", "eth0"),),
)  # fmt: skip
READY_FOR_HOSTS = dataclasses.replace(
    READY, commands=frozenset(HOSTS.packages), groups=Path("/sys/fs/cgroup/unified"), networks=("10.70.0.0/24",), is_built=True
)


def but(**changes: Any) -> tuple[Purpose, MachineFacts]:
    return CLUSTER, dataclasses.replace(READY, **changes)


def hosts_but(**changes: Any) -> tuple[Purpose, MachineFacts]:
    return HOSTS, dataclasses.replace(READY_FOR_HOSTS, **changes)


@pytest.mark.parametrize("look", [but(), hosts_but()])
def test_a_machine_that_has_everything_needs_nothing(look: tuple[Purpose, MachineFacts]) -> None:
    assert judge(*look) == Shortfall((), ())


NEEDS = {
    "this is Darwin; the embedded cluster needs Linux": but(system="Darwin"),
    "this is Darwin; the hosts need Linux": hosts_but(system="Darwin"),
    "it needs root": but(is_root=False),
    "the kernel has no bridges (CONFIG_BRIDGE)": but(lacks=frozenset({"bridges (CONFIG_BRIDGE)"})),
    "/sys/fs/cgroup is read-only": but(groups_writable=False),
    "control groups of version 2 are not mounted": hosts_but(groups=None, groups_writable=False),
    "there is no Go to build Kubernetes with": but(go=None),
    "Go 1.19 is too old to build Kubernetes with": but(go=(1, 19)),
    (
        "Lockstep runs on Python 3.13, pods have this distribution's 3.11: install it with `uv tool install --force --python"
        " /usr/bin/python3.11 dist/lockstep_trainer-0.1.0-py3-none-any.whl`, or in a clone with `make setup PYTHON=/usr/bin/python3.11`"
    ): but(python="3.13"),
    "Lockstep runs on Python 3.13, the hosts have this distribution's 3.11": hosts_but(python="3.13"),
    "fedora is neither Debian nor Ubuntu": but(distribution="fedora"),
    "the network 10.89.0.0/24 is taken: this machine has a route to 10.88.0.0/15 through tun0": but(routes=(("10.88.0.0/15", "tun0"),)),
}


@pytest.mark.parametrize("sentence", NEEDS, ids=lambda sentence: sentence[:30])
def test_what_is_missing_is_said_in_one_sentence(sentence: str) -> None:
    (missing,) = judge(*NEEDS[sentence]).missing
    assert missing.startswith(sentence)


def test_all_that_is_missing_is_said_at_once() -> None:
    assert len(judge(*but(is_root=False, go=None, python="3.13")).missing) == 3


SSH = frozenset(HOSTS.packages) - {"ssh", "ssh-keygen", "debootstrap"}


@pytest.mark.parametrize(
    ("look", "packages"),
    [
        (but(commands=COMMANDS - {"containerd", "runc"}), ("containerd", "runc")),
        (but(commands=COMMANDS - {CNI}), ("containernetworking-plugins",)),
        (but(commands=COMMANDS - {"debootstrap"}), ("debootstrap",)),
        (but(commands=COMMANDS - {"debootstrap"}, has_image=True), ()),
        (hosts_but(commands=SSH), ("debootstrap", "openssh-client")),
    ],
)
def test_what_apt_has_is_installed(look: tuple[Purpose, MachineFacts], packages: tuple[str, ...]) -> None:
    assert judge(*look) == Shortfall((), packages)


def test_without_apt_packages_are_asked_for() -> None:
    words = "install runc (on Debian and Ubuntu this is done for you)"
    assert judge(*but(distribution="arch", has_image=True, commands=COMMANDS - {"runc"})) == Shortfall((words,), ())


def test_go_is_not_needed_for_what_is_built_already() -> None:
    assert judge(*but(go=None, is_built=True)).missing == ()


def test_resources_are_read_for_all_nodes_and_for_one() -> None:
    wanted = ClusterGoal(nodes=2, resources=parse_resources(["nvidia.com/gpu=4", "1:nvidia.com/gpu=0", "1:a.b/c=2"], nodes=2))
    assert wanted.of_node(0) == {"nvidia.com/gpu": 4}
    assert wanted.of_node(1) == {"nvidia.com/gpu": 0, "a.b/c": 2}


def test_resources_that_nobody_spoke_of_are_left_alone() -> None:
    assert ClusterGoal(nodes=2).of_node(0) is None
    assert ClusterGoal(nodes=2, resources={}).of_node(0) == {}


@pytest.mark.parametrize(
    ("text", "says"), [("gpu=4", "domain/name=count"), ("nvidia.com/gpu", "domain/name=count"), ("2:a.b/c=1", "no node 2")]
)
def test_a_resource_that_can_not_be_is_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_resources([text], nodes=2)


def addresses(layout: Layout) -> list[str]:
    nodes = [layout.node(number) for number in range(2)]
    own = [layout.bridge, layout.gateway, layout.node_network, layout.pod_network, layout.service_network, layout.cgroup, str(layout.run)]
    ports = [str(layout.etcd_port(peer)) for peer in (False, True)]
    return [*own, *ports, *(text for n in nodes for text in (n.name, n.namespace, n.link, n.address, n.pod_network, n.cgroup))]


def test_two_clusters_of_a_machine_share_no_name_and_no_address(tmp_path: Path) -> None:
    both = [*addresses(Layout("lockstep", 0, tmp_path)), *addresses(Layout("test", 1, tmp_path))]
    assert len(both) == len(set(both))


def test_a_daemon_that_got_no_inotify_instance_comes_with_the_setting_and_any_other_with_its_last_line(tmp_path: Path) -> None:
    layout = Layout("test", 1, tmp_path)
    layout.logs.mkdir(parents=True)
    layout.log("test-0-kubelet").write_text('E1127 kubelet.go:1687] "Failed to start cAdvisor" err="inotify_init: too many open files"\n')
    layout.log("test-1-kubelet").write_text("the reason\n")
    for name, reason in (
        ("test-0-kubelet", r"it got no inotify instance of .*: sysctl fs.inotify.max_user_instances=1024"),
        ("test-1-kubelet", "the reason"),
    ):
        with pytest.raises(ClusterError, match=rf"{name} has ended: {reason} \(see "):
            _wait(layout, "it", lambda: False, name)


def test_names_of_links_fit_the_kernel_s_limit(tmp_path: Path) -> None:
    layout = Layout("lockstep", 9, tmp_path)
    assert max(len(layout.bridge), len(layout.node(9).link)) <= 15


def claim(name: str, uid: str, storage_class: str = "local-rwx", **metadata: str) -> dict[str, Any]:
    spec = {"storageClassName": storage_class, "accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
    return {"metadata": {"namespace": "ns", "name": name, "uid": uid, **metadata}, "spec": spec}


def test_a_claim_gets_a_volume_that_is_its_own(tmp_path: Path) -> None:
    layout = Layout("lockstep", 0, tmp_path)
    volume = volume_for(claim("w", "1"), layout)
    assert volume["spec"]["claimRef"]["uid"] == "1"
    assert volume["spec"]["hostPath"]["path"] == str(layout.volumes / "ns" / "w")


def test_every_claim_of_the_python_environment_gets_the_read_only_mount(tmp_path: Path) -> None:
    layout = Layout("lockstep", 0, tmp_path)
    paths = {volume_for(claim(name, name, "local-python"), layout)["spec"]["hostPath"]["path"] for name in "ab"}
    assert paths == {str(layout.python_mount)}


def test_claims_of_other_classes_bound_ones_and_dying_ones_get_no_volume() -> None:
    bound = claim("bound", "1")
    bound["spec"]["volumeName"] = "pvc-1"
    assert to_provision([claim("a", "2", "gp3"), bound, claim("dying", "3", deletionTimestamp="now")], []) == []


def test_a_claim_made_again_waits_until_the_earlier_one_s_volume_is_gone(tmp_path: Path) -> None:
    old, new = claim("w", "old"), claim("w", "new")
    volume = volume_for(old, Layout("lockstep", 0, tmp_path)) | {"status": {"phase": "Released"}}
    assert to_provision([new], [volume]) == []
    assert to_release([volume]) == [volume]
    assert to_provision([new], []) == [new]


def test_a_volume_in_use_is_not_released(tmp_path: Path) -> None:
    assert to_release([volume_for(claim("w", "1"), Layout("lockstep", 0, tmp_path)) | {"status": {"phase": "Bound"}}]) == []


@pytest.mark.parametrize(
    ("said", "ready"),
    [(("True", -10), False), (("False", 1), False), (("True", 0), True), (("True", 3), True)],
)
def test_a_node_is_ready_by_what_its_kubelet_says_since_its_start(said: tuple[str, int], ready: bool) -> None:
    """Heartbeats are of whole seconds. Of a kubelet that was not started anew, any counts."""
    started = datetime(2026, 1, 1, 12, 0, 0, 700_000, tzinfo=UTC)
    heard = started.replace(microsecond=0) + timedelta(seconds=said[1])
    told = {"type": "Ready", "status": said[0], "lastHeartbeatTime": f"{heard:%Y-%m-%dT%H:%M:%SZ}"}
    nodes = {"items": [{"metadata": {"name": "a"}, "status": {"conditions": [told]}}]}
    client: Any = SimpleNamespace(request=lambda *_: nodes)
    assert node_readiness(client, {"a": started}) == {"a": ready}
    assert node_readiness(client) == node_readiness(client, {"b": started}) == {"a": said[0] == "True"}


def test_no_key_is_written_by_the_daemon_that_makes_volumes(tmp_path: Path) -> None:
    layout, copies = Layout("x", 0, tmp_path), tmp_path / "copies"
    layout.pki.mkdir(parents=True)
    copies.mkdir()
    Authority(layout.pki).kubeconfig(layout.kubeconfig, "https://127.0.0.1:1", "admin", context="x")
    command = [sys.executable, "-m", "lockstep.devcluster.provisioner", str(tmp_path), "x", "0"]
    with subprocess.Popen(command, env={**os.environ, "TMPDIR": str(copies)}, stderr=subprocess.PIPE, text=True) as daemon:
        try:
            assert daemon.stderr is not None and "trying again" in daemon.stderr.readline()
        finally:
            daemon.kill()
    assert list(copies.iterdir()) == []


def test_a_record_of_a_pid_that_another_process_has_now_is_not_believed(tmp_path: Path) -> None:
    mine = processes.start_ticks(os.getpid())
    assert mine is not None
    for ticks, expected in ((mine, True), (mine - 1, False)):
        processes.record(tmp_path, "x").write_text(json.dumps({"pid": os.getpid(), "start_ticks": ticks, "command": ""}))
        assert (processes.running(tmp_path, "x") is not None) is expected


def test_a_daemon_inherits_no_descriptor_of_whoever_starts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its output goes to its log, and pipes of the caller end with the caller: also those that the caller's own caller handed on."""
    monkeypatch.setattr(cgroups, "create_tracking", lambda name: tmp_path / "cgroup.procs")
    monkeypatch.setattr(cgroups, "kill", lambda *names: None)
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)
    os.dup2(writer, 251)
    try:
        daemon = processes.start(tmp_path, "x", ["sleep", "600"], tmp_path / "x.log", "group", tmp_path / "starting")
        try:
            for number in (writer, 251):
                os.close(number)
            assert os.read(reader, 1) == b"", "the pipe ends while the daemon runs"
            with processes.locked(tmp_path / "starting"):  # so it has become the daemon
                left = {path.name: str(path.readlink()) for path in Path(f"/proc/{daemon.pid}/fd").iterdir()}
            assert left == {"0": os.devnull, "1": str(tmp_path / "x.log"), "2": str(tmp_path / "x.log")}
        finally:
            os.kill(daemon.pid, 9)
            os.waitpid(daemon.pid, 0)
    finally:
        for number in (reader, writer, 251):
            with suppress(OSError):
                os.close(number)


def test_a_half_written_record_is_no_daemon(tmp_path: Path) -> None:
    processes.record(tmp_path, "x").write_text('{"pid": 1')
    assert processes.running(tmp_path, "x") is None


def test_settings_of_the_machine_are_noted_once_and_put_back(tmp_path: Path) -> None:
    setting = tmp_path / "proc" / "vm" / "overcommit_memory"
    setting.parent.mkdir(parents=True)
    setting.write_text("0\n")
    record = tmp_path / "sysctls.json"
    machine.note_settings(record, tmp_path / "proc")
    setting.write_text("1\n")
    machine.note_settings(record, tmp_path / "proc")  # a repair, after the kubelet changed it
    machine.restore_settings(record, tmp_path / "proc")
    assert setting.read_text() == "0"


def test_the_binary_s_key_is_stable_and_its_version_is_go_mod_s() -> None:
    assert source_key(SOURCE, build_options()) == source_key(SOURCE, build_options())
    assert f"-X k8s.io/component-base/version.gitVersion={kubernetes_version()}" in build_options()[-1]


def test_etcd_s_authority_is_not_the_cluster_s(tmp_path: Path) -> None:
    layout = Layout("lockstep", 0, tmp_path)
    layout.state.mkdir(parents=True)
    options = commands(layout, Path("kube"))
    assert f"--trusted-ca-file={layout.pki / 'etcd' / 'ca.crt'}" in options["etcd"]
    assert f"--client-ca-file={layout.pki / 'ca.crt'}" in options["kube-apiserver"]


def test_a_client_certificate_names_the_user_and_the_groups_of_the_last_call(tmp_path: Path) -> None:
    layout = Layout("lockstep", 0, tmp_path)
    Authority(layout.pki)
    for groups in (["team"], ["team", "other"]):
        file = client_kubeconfig("jane@example.org", groups, layout=layout)
    subject = x509.load_pem_x509_certificate((layout.pki / f"user-{file.name}.crt").read_bytes()).subject
    assert [name.value for name in subject.get_attributes_for_oid(NameOID.COMMON_NAME)] == ["jane@example.org"]
    assert {name.value for name in subject.get_attributes_for_oid(NameOID.ORGANIZATION_NAME)} == {"team", "other"}
    assert file.stat().st_mode & 0o077 == 0


def test_a_client_of_a_cluster_that_is_down_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is not up"):
        client_kubeconfig("jane", layout=Layout("lockstep", 0, tmp_path))


def test_keys_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    Authority(tmp_path).issue("x", "x")
    assert {path.name for path in tmp_path.glob("*.key") if path.stat().st_mode & 0o077} == set()


def test_published_code_is_named_by_its_content_compiled_and_readable_by_everybody(tmp_path: Path) -> None:
    target = python_volume.publish_code(tmp_path)
    assert (tmp_path / "code").readlink() == Path(target.name)
    assert target.name == f"code-{python_volume.code_key()}"
    assert list(target.glob("lockstep/__pycache__/*.pyc"))
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in target.rglob("*"))


def test_publishing_the_same_code_again_copies_nothing(tmp_path: Path) -> None:
    first = python_volume.publish_code(tmp_path).stat().st_ino
    assert python_volume.publish_code(tmp_path).stat().st_ino == first


def test_code_of_another_volume_is_linked_and_stays_when_it_is_removed_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, compiled_code, own = (tmp_path / name for name in ("source", "all", "own"))
    for folder in (source, compiled_code, own):
        folder.mkdir()
    (source / "run.py").write_text("")
    monkeypatch.setattr(python_volume, "source_folders", lambda: [source])
    for _ in range(2):
        code = python_volume.publish_code(own, compiled_code)
    assert (code / "source/run.py").samefile(compiled_code / "code/source/run.py") and (own / "code").readlink() == Path(code.name)
    shutil.rmtree(compiled_code)
    assert list((own / "code").glob("source/__pycache__/run.*.pyc")) and sorted(path.name for path in own.glob("[a-z]*")) == [
        "code",
        code.name,
    ]


def test_two_clusters_that_come_up_at_once_publish_the_code_once(tmp_path: Path) -> None:
    with ThreadPoolExecutor() as pool:
        targets = set(pool.map(python_volume.publish_code, [tmp_path] * 2))
    assert [path for path in tmp_path.iterdir() if path.is_dir() and not path.is_symlink()] == list(targets)


def test_an_environment_of_the_command_line_alone_is_told_what_pods_lack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ConfigError,
        match=r"has no torch, which pods of the embedded cluster take from here: run `lockstep quickstart`, or make setup in a clone",
    ):
        python_volume.publish_packages(tmp_path)


def test_a_build_that_fails_says_why_and_where_its_log_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go = tmp_path / "go"
    go.write_text("#!/bin/sh\necho 'go: downloading much'\necho 'no space left on device' >&2\nexit 1\n")
    go.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(binary.BuildError, match=rf"ended with 1: .*no space left on device \(see {tmp_path}/.*\.log\)"):
        binary.build(tmp_path, lambda text: None)
    assert not binary.is_built(tmp_path)


def test_a_variable_tells_the_clusters_of_one_machine_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCKSTEP_DEVCLUSTER", raising=False)
    first = default_layout()
    monkeypatch.setenv("LOCKSTEP_DEVCLUSTER", "2")
    other = default_layout()
    assert (first.name, first.index, other.name, other.index) == ("lockstep", 0, "lockstep2", 2)


@pytest.mark.parametrize("given", ["", "10", "-1", "two"])
def test_a_number_of_a_cluster_that_can_not_be_is_refused(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv("LOCKSTEP_DEVCLUSTER", given)
    with pytest.raises(ConfigError, match="must be a number from 0 to 9"):
        default_layout()


@pytest.mark.parametrize("is_linked", [False, True], ids=["in-place", "linked-into-an-environment"])
def test_pods_get_the_code_of_an_installed_lockstep_as_that_of_a_checkout(is_linked: bool, tmp_path: Path) -> None:
    site, volume, path = tmp_path / "site-packages", tmp_path / "volume", tmp_path / "site-packages"
    for folder in python_volume.source_folders():
        shutil.copytree(folder, site / folder.name)
    if is_linked:
        path = tmp_path / "linked"
        path.mkdir()
        for folder in site.iterdir():
            (path / folder.name).symlink_to(folder)
    for folder in (*site.rglob("*"), site):
        folder.chmod(0o555 if folder.is_dir() else 0o444)
    code = (
        "import sys; from pathlib import Path; from lockstep.devcluster.python_volume import publish_code as p; print(p(Path(sys.argv[1])))"
    )
    command = [sys.executable, "-B", "-c", code, str(volume)]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(path)}, capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()).name == f"code-{python_volume.code_key()}"
    assert (volume / "code/lockstep/devcluster/kube/go.mod").stat().st_mode & 0o777 == 0o644


def test_packages_that_pods_cannot_see_are_refused_before_anything_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binary, "build", lambda *arguments: pytest.fail("it was built"))
    with pytest.raises(
        ConfigError, match=r"^torch is in .*, outside .*, where pods can't see it: install Lockstep into an environment without"
    ):
        prepare(Layout("lockstep", 0, tmp_path), lambda line: None)


def test_processes_that_cannot_be_killed_are_named_after_twenty_seconds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clock = VirtualClock()
    monkeypatch.setattr(cgroups, "time", clock)
    monkeypatch.setattr(cgroups, "processes", lambda *names: {7})
    monkeypatch.setattr(cgroups.os, "kill", lambda pid, number: None)
    with pytest.raises(TimeoutError, match=r"\[7\] don't end"):
        cgroups.kill("x")
    assert clock.now - 1000.0 == pytest.approx(20, abs=0.1)


def test_certificates_of_the_embedded_cluster_are_good_for_a_year(tmp_path: Path) -> None:
    issued = Authority(tmp_path).issue("server", "x")
    for path in (tmp_path / "ca.crt", issued):
        left = x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc - datetime.now(UTC)
        assert timedelta(days=364) < left <= timedelta(days=365)
