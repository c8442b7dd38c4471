"""The embedded cluster itself: what `up` repairs and what `down` leaves. A cluster of its own, beside the one other tests use.

An `up` costs most, so those that need one follow each other, and those about `down` look at one that was taken down for all of them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lockstep.devcluster import cluster, node
from lockstep.devcluster.host import cgroups, processes
from lockstep.devcluster.host.layout import Layout
from lockstep.devcluster.host.machine import remove_unused
from lockstep.devcluster.images import BASE
from lockstep.environments import cache_root
from support.clusters.own_cluster import NOBODYS, client_kubeconfig

LAYOUT = Layout(name="test", index=NOBODYS, root=cache_root())
WANTED = cluster.ClusterGoal(nodes=2)
DAEMONS = 6 + 3 * WANTED.nodes


def said(lines: list[str]) -> Callable[[str], None]:
    return lines.append


@pytest.fixture(scope="module", autouse=True)
def gone() -> Iterator[None]:
    """No such cluster before and after, whatever an earlier run left and a test breaks."""
    cluster.down(LAYOUT, print, purge=True)
    yield
    cluster.down(LAYOUT, print, purge=True)


@pytest.fixture
def up() -> None:
    cluster.up(LAYOUT, WANTED, print)


def kubectl(*arguments: str) -> str:
    done = cluster.kubectl(LAYOUT, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_pod(name: str, number: int = 0) -> None:
    """A pod that sleeps, running on this node."""
    overrides = {"spec": {"nodeName": f"test-{number}", "terminationGracePeriodSeconds": 1}}
    kubectl("run", name, f"--image={BASE}", f"--overrides={json.dumps(overrides)}", "--command", "--", "sleep", "1000")
    kubectl("wait", f"pod/{name}", "--for=condition=Ready", "--timeout=180s")


def is_healthy() -> bool:
    state = cluster.status(LAYOUT)
    return len(state["daemons"]) == DAEMONS and all(state["daemons"].values()) and list(state["nodes"].values()) == [True] * WANTED.nodes


def leftovers() -> list[str]:
    """Everything on the machine that belongs to this cluster, but for its folder."""
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    rules = subprocess.run(["iptables-save"], capture_output=True, text=True, check=True).stdout.splitlines()
    routes = subprocess.run(["ip", "route"], capture_output=True, text=True, check=True).stdout.splitlines()
    namespaces = Path("/run/netns").iterdir() if Path("/run/netns").exists() else []
    return [
        *(f"process {pid}" for pid in processes_of_cluster()),
        *(f"group {name}" for name in cgroups.of_cluster(LAYOUT.name)),
        *(f"mount {path}" for path in mounts if str(LAYOUT.state) in path or str(LAYOUT.run) in path or "lk9-" in path),
        *(f"rule {rule}" for rule in rules if LAYOUT.bridge in rule or "lockstep-devcluster-9" in rule),
        *(f"route {route}" for route in routes if LAYOUT.bridge in route),
        *(f"link {path.name}" for path in Path("/sys/class/net").iterdir() if path.name.startswith(("lk9", LAYOUT.bridge))),
        *(f"namespace {path.name}" for path in namespaces if path.name.startswith("lk9-")),
        *(f"folder {path}" for path in [LAYOUT.run] if path.exists()),
    ]


def processes_of_cluster() -> list[int]:
    """Processes that name the cluster's folders on their command line, or that live in a network namespace of its nodes."""
    own = [str(LAYOUT.state).encode(), str(LAYOUT.run).encode(), b"provisioner\0" + str(LAYOUT.root).encode() + b"\0test"]
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if any(mark in (folder / "cmdline").read_bytes() for mark in own) and processes.start_ticks(int(folder.name)) is not None:
                found.append(int(folder.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def kill_daemons(*names: str) -> None:
    """Kill them, and wait until they are gone: a process that is still ending counts as one that runs."""
    pids = [json.loads((LAYOUT.daemons / f"{name}.json").read_text())["pid"] for name in names]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    while any(processes.start_ticks(pid) is not None for pid in pids):
        time.sleep(0.01)


@contextmanager
def stranger(folders: list[str]) -> Iterator[int]:
    """A process that has mounted something on these folders in its own mount namespace, as the nodes of another cluster do; its pid."""
    script = 'for folder; do mkdir -p "$folder" && mount --bind /tmp "$folder" || exit 1; done; echo ready; read -r line'
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh", *folders]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        yield process.pid
        process.stdin.close()


def mounted(pid: int, folders: list[str]) -> list[str]:
    mounts = {line.split()[4] for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines()}
    return [folder for folder in folders if folder in mounts]


def test_a_folder_that_somebody_has_mounted_is_kept_and_removed_when_nobody_has(tmp_path: Path) -> None:
    """rmdir on the host would detach the mount in the other namespace, without an error anywhere."""
    folder = tmp_path / "folder"
    with stranger([str(folder)]) as pid:
        remove_unused([folder])
        assert mounted(pid, [str(folder)]) == [str(folder)]
    remove_unused([folder])
    assert not folder.exists()


def test_down_of_a_cluster_that_never_was_does_nothing() -> None:
    cluster.down(LAYOUT, print, purge=True)
    cluster.down(LAYOUT, print, purge=True)
    assert leftovers() == []


def test_a_group_is_removed_with_the_processes_that_came_after_the_others_were_killed() -> None:
    cluster.down(LAYOUT, print)
    group = cgroups.create_tracking(f"{LAYOUT.cgroup}/etcd")
    with subprocess.Popen(["sleep", "1000"]) as late:
        group.write_text(str(late.pid))
        cgroups.remove(LAYOUT.cgroup)
    assert late.returncode == -signal.SIGKILL
    assert cgroups.of_cluster(LAYOUT.name) == []


def test_a_daemon_whose_starter_was_killed_before_it_joined_its_group_is_replaced_not_doubled() -> None:
    cluster.down(LAYOUT, print)
    code = (
        "from lockstep.devcluster.host import processes\nfrom lockstep.devcluster.host.layout import Layout\nfrom lockstep.environments"
        f" import cache_root\nlayout = Layout('test', {LAYOUT.index}, cache_root())\nprocesses.JOIN = 'sleep 2; ' + processes.JOIN\nlate ="
        " processes.start(layout.daemons, 'etcd', ['sleep', '1000'], layout.log('etcd'), f'{layout.cgroup}/etcd',"
        " layout.starting)\nprocesses.record(layout.daemons, 'etcd').unlink()\nprint(late.pid)\n"
    )
    late = int(subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True).stdout)
    cluster.up(LAYOUT, WANTED, print)
    assert is_healthy()
    assert processes.start_ticks(late) is None


def start_and_kill(step: str) -> None:
    """An `up` from nothing that is killed once this function of one of its modules has first returned."""
    cluster.down(LAYOUT, print)
    module, function = step.split(".")
    code = (
        "import os, signal\nfrom lockstep.devcluster import cluster\nfrom lockstep.devcluster.host.layout import Layout\nfrom"
        f" lockstep.environments import cache_root\nstep = cluster.{module}.{function}\ndef last(*given, **named):\n    try: return"
        f" step(*given, **named)\n    finally: os.kill(os.getpid(), signal.SIGKILL)\ncluster.{module}.{function} = last\n"
        f"cluster.up(Layout('test', {LAYOUT.index}, cache_root()), cluster.ClusterGoal(nodes={WANTED.nodes}), print)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL


STEPS = [
    *("network.create_bridge", "node.write_files", "processes.start", "server.is_ready"),
    *("node.image_names", "node.mount_python", "server.create_classes"),
]
"""From a cluster's first link to what is made in it once its nodes have started."""


@pytest.mark.parametrize("step", STEPS)
def test_an_up_that_is_killed_in_the_middle_is_cleaned_by_down(step: str) -> None:
    start_and_kill(step)
    cluster.down(LAYOUT, print)
    assert leftovers() == []


@pytest.mark.parametrize("step", ["processes.start", "node.mount_python"])
def test_an_up_that_is_killed_in_the_middle_is_repaired_by_up(step: str) -> None:
    start_and_kill(step)
    cluster.up(LAYOUT, WANTED, print)
    assert is_healthy()


def test_up_of_a_cluster_that_is_up_starts_nothing(up: None) -> None:
    before = {path.name: path.read_text() for path in LAYOUT.daemons.glob("*.json")}
    cluster.up(LAYOUT, WANTED, print)
    assert {path.name: path.read_text() for path in LAYOUT.daemons.glob("*.json")} == before


@pytest.mark.parametrize("killed", [{"etcd", "provisioner", "test-0-proxy"}, {"kube-apiserver", "coredns", "test-1-containerd"}])
def test_daemons_that_died_are_started_again_and_only_they(up: None, killed: set[str]) -> None:
    before = {path.stem: path.read_text() for path in LAYOUT.daemons.glob("*.json")}
    kill_daemons(*killed)
    cluster.up(LAYOUT, WANTED, print)
    after = {path.stem: path.read_text() for path in LAYOUT.daemons.glob("*.json")}
    # The kubelet lives in the mount namespace that its containerd opened, so it goes with it.
    expected = killed | ({"test-1-kubelet"} if "test-1-containerd" in killed else set())
    assert {name for name in before if before[name] != after[name]} == expected
    assert is_healthy()


def test_a_daemon_whose_record_was_never_written_is_replaced_not_doubled(up: None) -> None:
    record = LAYOUT.daemons / "etcd.json"
    first = json.loads(record.read_text())["pid"]
    record.unlink()
    cluster.up(LAYOUT, WANTED, print)
    assert is_healthy()
    assert processes.start_ticks(first) is None


def test_nodes_can_have_different_resources_that_change_on_a_cluster_that_is_up(up: None) -> None:
    def resources() -> list[str | None]:
        items = json.loads(kubectl("get", "nodes", "-o", "json"))["items"]
        return [item["status"]["allocatable"].get("nvidia.com/gpu") for item in items]

    cluster.up(LAYOUT, cluster.ClusterGoal(nodes=2, resources={None: {"nvidia.com/gpu": 4}, 1: {"nvidia.com/gpu": 2}}), print)
    assert resources() == ["4", "2"]
    cluster.up(LAYOUT, WANTED, print)
    assert resources() == ["4", "2"]
    cluster.up(LAYOUT, cluster.ClusterGoal(nodes=2, resources={0: {"nvidia.com/gpu": 1}}), print)
    assert resources() == ["1", None]


def test_a_user_with_a_client_certificate_may_do_what_rbac_says_and_no_more(up: None) -> None:
    kubectl("create", "namespace", "theirs")
    kubectl("create", "rolebinding", "jane", "-n", "theirs", "--clusterrole=admin", "--group=team")
    file = client_kubeconfig("jane", ["team"], layout=LAYOUT)
    assert file.stat().st_mode & 0o077 == 0

    def may(*question: str) -> str:
        return cluster.kubectl(LAYOUT, "--kubeconfig", str(file), "auth", "can-i", *question).stdout.strip()

    assert may("create", "pods", "-n", "theirs") == "yes"
    assert may("create", "pods", "-n", "default") == "no"
    assert may("get", "nodes") == "no"


def test_etcd_answers_nobody_who_has_no_certificate_of_its_own_authority(up: None) -> None:
    cluster_pki = LAYOUT.pki
    command = ["curl", "--silent", "--cacert", str(cluster_pki / "etcd" / "ca.crt"), f"https://127.0.0.1:{LAYOUT.etcd_port()}/version"]
    admin = ["--cert", str(cluster_pki / "user-admin.crt"), "--key", str(cluster_pki / "user-admin.key")]
    own = ["--cert", str(cluster_pki / "etcd" / "client.crt"), "--key", str(cluster_pki / "etcd" / "client.key")]
    codes = [subprocess.run([*command, *extra], capture_output=True, check=False).returncode for extra in ([], admin, own)]
    assert codes[0] != 0
    assert codes[1] != 0
    assert codes[2] == 0


def test_a_service_account_s_token_is_good_for_its_audience_only(up: None) -> None:
    token = kubectl("create", "token", "default", "--audience=lockstep.dev/report").strip()

    def review(audience: str) -> bool:
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": {"token": token, "audiences": [audience]}}
        file = LAYOUT.run / "review.json"
        file.write_text(json.dumps(body))
        answer = kubectl("create", "-f", str(file), "-o", "json")
        return bool(json.loads(answer)["status"].get("authenticated"))

    assert review("lockstep.dev/report")
    assert not review("something.else")


def test_the_nodes_run_the_kubernetes_release_that_go_mod_names(up: None) -> None:
    from lockstep.devcluster.binary import kubernetes_version

    assert kubectl("get", "nodes", "-o", "jsonpath={.items[*].status.nodeInfo.kubeletVersion}").split() == [kubernetes_version()] * 2
    assert node.answers(LAYOUT.node(0))


def test_a_cluster_whose_processes_were_all_killed_is_repaired_with_its_objects(up: None) -> None:
    kubectl("create", "configmap", "kept", "--from-literal=a=b")
    run_pod("before")
    cgroups.kill(*cgroups.of_cluster(LAYOUT.name))
    assert not any(cluster.status(LAYOUT)["daemons"].values())
    cluster.up(LAYOUT, WANTED, print)
    assert is_healthy()
    assert kubectl("get", "configmap", "kept", "-o", "jsonpath={.data.a}") == "b"
    run_pod("after")
    kubectl("delete", "pod", "before", "after", "--wait=true", "--timeout=180s")
    kubectl("delete", "configmap", "kept")


def test_a_cluster_whose_daemons_alone_were_killed_leaves_no_container_of_theirs(up: None) -> None:
    """End containerd's shims and containers, too: they outlive it, and would stay."""
    run_pod("orphan")
    orphans = cgroups.processes(LAYOUT.node(0).cgroup)
    assert orphans
    kill_daemons(*(path.stem for path in LAYOUT.daemons.glob("*.json")))
    cluster.up(LAYOUT, WANTED, print)
    assert is_healthy()
    assert not orphans & cgroups.processes(LAYOUT.node(0).cgroup)
    kubectl("delete", "pod", "orphan", "--timeout=180s")


@pytest.fixture(scope="module")
def taken_down() -> dict[str, Any]:
    """What a cluster with running pods and the data of a claim left when it was taken down beside mounts of a stranger."""
    cluster.up(LAYOUT, WANTED, print)
    settings, folders, data = json.loads(LAYOUT.sysctls.read_text()), list(node.PRIVATE_FOLDERS), LAYOUT.volumes / "some" / "claim" / "data"
    for number in range(WANTED.nodes):
        run_pod(f"sleeper-{number}", number)
    data.parent.mkdir(parents=True)
    data.write_text("x")
    assert processes_of_cluster()
    assert leftovers()
    with stranger(folders) as pid:
        cluster.down(LAYOUT, print)
        now = {name: (Path("/proc/sys") / name).read_text().strip() for name in settings}
        return {"leftovers": leftovers(), "settings": (now, settings), "mounted": mounted(pid, folders), "data": data.read_text()}


def test_down_leaves_nothing_of_a_cluster_with_running_pods(taken_down: dict[str, Any]) -> None:
    assert taken_down["leftovers"] == []
    assert taken_down["settings"][0] == taken_down["settings"][1]


def test_down_leaves_what_others_have_mounted_on_the_folders_that_nodes_use(taken_down: dict[str, Any]) -> None:
    assert taken_down["mounted"] == list(node.PRIVATE_FOLDERS)


def test_down_keeps_the_data_of_claims(taken_down: dict[str, Any]) -> None:
    assert taken_down["data"] == "x"


@pytest.mark.usefixtures("taken_down")
def test_a_warm_up_builds_and_imports_nothing_and_ends_with_two_ready_nodes() -> None:
    lines: list[str] = []
    cluster.up(LAYOUT, WANTED, said(lines))
    assert lines == ["API server is ready", "nodes test-0, test-1 are Ready"]
    assert is_healthy()


def test_a_cluster_whose_processes_were_all_killed_is_cleaned_by_down(up: None) -> None:
    cgroups.kill(*cgroups.of_cluster(LAYOUT.name))
    cluster.down(LAYOUT, print)
    assert leftovers() == []


@pytest.mark.usefixtures("taken_down")
def test_a_purge_removes_the_data_of_claims() -> None:
    assert LAYOUT.volumes.exists()
    cluster.down(LAYOUT, print, purge=True)
    assert not LAYOUT.state.exists()
