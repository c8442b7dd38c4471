"""The guide for multi-node training, followed command by command on the embedded cluster: docs/how-to/multi-node-guide.md.

`oc` is kubectl, CLUSTER is `local`, and the namespace is the one that its file names. What needs a GPU, RDMA or an SCC
ends here as the guide's table says. Two people follow it: an administrator of the cluster, and somebody with the built-in role
`admin` in that namespace and no other right, for whom an administrator has sent the definitions before.
"""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import yaml

from lockstep.cli.clusters.deploymentplan import Mode, definition_commands, planned
from lockstep.cli.shared.places import Verb
from lockstep.devcluster import binary
from lockstep.devcluster.host.layout import default_layout
from lockstep.devcluster.python_volume import publish_code
from lockstep.environments import cache_root
from support.checkout import ROOT
from support.clusters.cluster_jobs import Jobs, kubeconfig_of

GUIDE = ROOT / "docs/how-to/multi-node-guide.md"
Page = Callable[..., subprocess.CompletedProcess[str]]
DEPLOY = "make deploy-cluster CLUSTER=local MODE=tcp"
TRAINS = "train_multi_node.py ARGS='--epochs 3'"
DONE = r"\[rank 0\] Step (\d+)/\1 \|"
SAYS = 'echo \'import os; print(os.environ["RANK"], "of", os.environ["WORLD_SIZE"])\' > says.py'
SAID = ("[rank 0] 0 of 2\n", "[rank 1] 1 of 2\n")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A PATH on which `oc` is kubectl."""
    folder = tmp_path_factory.mktemp("bin")
    for name in ("oc", "kubectl"):
        (folder / name).write_text(f'#!/bin/sh\nexec {binary.folder(cache_root()) / binary.MULTI_CALL} kubectl "$@"\n')
        (folder / name).chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


@pytest.fixture(scope="module")
def typed_cluster() -> str:
    """What is typed after CLUSTER=, in place of the guide's `local`."""
    return "local"


@dataclass(frozen=True)
class Person:
    """Somebody who follows the guide."""

    environment: dict[str, str]
    deploys: str
    is_administrator: bool


@pytest.fixture(scope="module", params=["administrator", pytest.param("admin of a namespace", marks=pytest.mark.long)])
def person(request: pytest.FixtureRequest, path: str, typed_cluster: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Person]:
    environment = {**os.environ, "PATH": path}
    if request.param == "administrator":
        yield Person(environment, DEPLOY, True)
        return
    cluster, api = request.getfixturevalue("cluster"), request.getfixturevalue("api")
    publish_code(default_layout().python_volume)
    applied = [command for command in definition_commands(planned(Verb(), "local", Mode.TCP)) if " apply " in command]
    once = ["bash", "-c", f"kubectl create namespace lockstep; {' && '.join(applied)}"]
    subprocess.run(once, cwd=ROOT, env=environment, check=True)
    jobs = Jobs(api, "lockstep")
    try:
        environment |= {"KUBECONFIG": str(kubeconfig_of("admin", jobs, cluster, tmp_path_factory.mktemp("person")))}
        yield Person(environment, f"{DEPLOY} NAMESPACE_ONLY=1", False)
    finally:
        removed = ["make", "uninstall", f"CLUSTER={typed_cluster}", "JOBS=1", "YES=1"]
        done = subprocess.run(removed, cwd=ROOT, env=environment, check=False)
        jobs.delete("RoleBinding", "person", "rbac.authorization.k8s.io/v1")
        jobs.delete("ServiceAccount", "person")
        assert done.returncode == 0


@pytest.fixture(scope="module")
def page(person: Person, typed_cluster: str) -> Page:
    """Runs what the guide says, which must say so."""
    guide = GUIDE.read_text().replace("\\|", "|")  # as a table has it

    def run(command: str, seconds: float = 300.0) -> subprocess.CompletedProcess[str]:
        assert command in guide, f"the guide doesn't say: {command}"
        script = TRAINS if person.is_administrator else "says.py"
        typed = ["bash", "-c", command.replace("CLUSTER=local", f"CLUSTER={typed_cluster}").replace(TRAINS, script)]
        return subprocess.run(typed, cwd=ROOT, env=person.environment, capture_output=True, text=True, check=False, timeout=seconds)

    return run


def well(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def deployed(page: Page, person: Person, typed_cluster: str) -> Iterator[str]:
    """What the one deployment of these tests has said."""
    try:
        yield well(page(person.deploys))
    finally:
        removed = ["make", "clean-cluster", f"CLUSTER={typed_cluster}", "PVCS=1", "YES=1"]
        subprocess.run(removed, cwd=ROOT, env=person.environment, check=False)


def test_clusters_are_listed(page: Page) -> None:
    listed = well(page("make list-clusters"))
    assert re.search(r"^ +barcelona .* RDMA, TCP ", listed, re.MULTILINE) and re.search(r"^ +nerc-production .* TCP ", listed, re.MULTILINE)
    assert re.search(r"^\* +local ", listed, re.MULTILINE), "the one that is talked to"


def test_rdma_is_refused_where_there_is_none(page: Page) -> None:
    refused = page("make deploy-cluster CLUSTER=local MODE=rdma")
    assert refused.returncode != 0 and re.search(r"cluster \S+ has no RDMA", refused.stderr)


def test_a_deployment_ends_with_two_pods_that_run_and_the_next_commands(person: Person, deployed: str, typed_cluster: str) -> None:
    assert re.search(r"^ml-dev-env +ready: ml-dev-env-0 on .*, ml-dev-env-1 on ", deployed, re.MULTILINE)
    assert f"lockstep sync ml-dev-env workspace --cluster {typed_cluster}" in deployed.partition("Ready. Next:")[2]
    watched = "oc get pods -n lockstep -l app=ml-dev-env-multi -w"
    assert watched in GUIDE.read_text()
    watch = subprocess.Popen(watched.split(), env=person.environment, stdout=subprocess.PIPE, text=True)
    try:
        shown = [watch.stdout.readline() for _ in range(3)]
    finally:
        watch.send_signal(signal.SIGINT)
        watch.communicate()
    assert [line.split()[:3] for line in shown[1:]] == [[f"ml-dev-env-{node}", "1/1", "Running"] for node in (0, 1)]


def in_a_terminal(command: str, environment: dict[str, str], *lines: str) -> str:
    """What a person sees who types the command, and then these lines into the shell that it opens."""
    here, there = pty.openpty()
    process = subprocess.Popen(command.split(), cwd=ROOT, env=environment, stdin=there, stdout=there, stderr=there, start_new_session=True)
    os.close(there)
    seen, end = "", time.monotonic() + 400
    try:
        for line in [*lines, "exit"]:
            os.write(here, f"{line}; echo ended-$((40+2)) with $?\n".encode())
            before = len(seen)
            while line != "exit" and "ended-42" not in seen[before:]:
                assert select.select([here], [], [], max(0.0, end - time.monotonic()))[0], seen
                seen += os.read(here, 1 << 16).decode(errors="replace")
        process.wait(timeout=60)
    finally:
        process.kill()
        process.wait()
        os.close(here)
    return seen.replace("\r", "")


@pytest.mark.usefixtures("deployed")
def test_code_is_sent_and_trains_on_both_nodes_from_a_shell_of_either_kind(page: Page, person: Person) -> None:
    """Real training comes from the administrator's first shell and goes on in the command of one line; elsewhere ranks say who they are."""
    sent = well(page("make sync-multi-node"))
    assert re.search(r"^ml-dev-env-0: \d+ sent", sent, re.MULTILINE)
    guide = GUIDE.read_text()
    assert "oc exec -it ml-dev-env-0 -n lockstep -- bash" in guide and "make shell-multi-node" in guide
    assert "cd /workspace\n./launch_deepspeed.sh train_multi_node.py" in guide
    says = ("cd /workspace", SAYS, "./launch_deepspeed.sh says.py")
    typed = ("cd /workspace", "./launch_deepspeed.sh train_multi_node.py") if person.is_administrator else says
    seen = in_a_terminal("oc exec -it ml-dev-env-0 -n lockstep -- bash", person.environment, *typed)
    if person.is_administrator:
        assert re.search(DONE, seen) and "ended-42 with 0" in seen.rpartition("Step")[2], seen
        assert "2 ranks over gloo" in seen
    else:
        assert all(line in seen for line in SAID) and "ended-42 with 0" in seen.rpartition(" of 2")[2], seen
    assert well(page("./scripts/sync-multi-node.sh")).startswith("ml-dev-env-0: ")
    seen = in_a_terminal("make shell-multi-node", person.environment, *says)
    assert all(line in seen for line in SAID) and "ended-42 with 0" in seen.rpartition(" of 2")[2], seen
    logged = well(page("oc logs --tail=200 ml-dev-env-0 -n lockstep"))
    assert all(line in logged for line in SAID), "what runs is in the log of node 0, too"
    assert "oc logs -f ml-dev-env-0 -n lockstep" in guide
    following = subprocess.Popen(
        ["oc", "logs", "-f", "ml-dev-env-0", "-n", "lockstep"], env=person.environment, stdout=subprocess.PIPE, text=True
    )
    try:
        assert following.stdout is not None and any(line.endswith(SAID) for line in following.stdout)
        assert following.poll() is None, "it goes on"
    finally:
        following.kill()
        following.communicate()
    assert "=== Node 1 ===" in well(page('for i in 0 1; do echo "=== Node $i ==="; oc logs --tail=20 ml-dev-env-$i -n lockstep; done'))
    ran = well(page(f"make run-multi-node SCRIPT={TRAINS}"))
    assert re.search(DONE, ran) and ", from step" in ran if person.is_administrator else all(line in ran for line in SAID), ran


@pytest.mark.usefixtures("deployed")
def test_state_names_and_storage_are_as_the_guide_says(page: Page, person: Person) -> None:
    status = well(page("make status-cluster CLUSTER=local"))
    assert "2 of 2 ready" in status and "ml-dev-env" in status
    assert len(well(page("oc get pods -n lockstep -l app=ml-dev-env-multi -o wide")).splitlines()) == 3
    assert "Container ID" in well(page("oc describe pod ml-dev-env-0 -n lockstep"))
    assert "2/2" in well(page("oc get statefulset ml-dev-env -n lockstep"))
    assert "ml-dev-env-1.ml-dev-env-headless" in well(
        page("oc exec ml-dev-env-0 -n lockstep -- getent hosts ml-dev-env-1.ml-dev-env-headless")
    )
    assert "ml-dev-workspace" in well(page("oc get pvc -n lockstep"))
    classes = page("oc get storageclass")
    assert "local-rwx" in well(classes) if person.is_administrator else "storageclasses.storage.k8s.io is forbidden" in classes.stderr
    well(page("oc exec ml-dev-env-0 -n lockstep -- touch /workspace/test"))
    assert "/workspace/test" in well(page("oc exec ml-dev-env-1 -n lockstep -- ls -la /workspace/test"))
    assert "ml-dev-env-1.ml-dev-env-headless" in well(page("oc exec ml-dev-env-0 -n lockstep -- cat /workspace/hostfile"))
    assert "ml-dev-sa" in well(page("oc get sa ml-dev-sa -n lockstep"))
    assert "runAsNonRoot: true" in well(page("oc get pod ml-dev-env-0 -n lockstep -o yaml | grep -A 10 securityContext"))


@pytest.mark.usefixtures("deployed")
@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("oc exec ml-dev-env-0 -n lockstep -- nvidia-smi", "executable file not found"),
        ("oc exec ml-dev-env-0 -n lockstep -- ibstat", "executable file not found"),
        ("oc exec ml-dev-env-0 -n lockstep -- ping -c 3 ml-dev-env-1.ml-dev-env-headless", "executable file not found"),
    ],
)
def test_what_needs_a_gpu_or_rdma_says_so(page: Page, command: str, said: str) -> None:
    done = page(command)
    assert done.returncode != 0 and said in done.stderr


SCC = "oc describe scc privileged | grep -A 10 Users"


def test_what_needs_openshift_says_so(page: Page) -> None:
    done = page(SCC)
    assert done.returncode != 0 and "doesn't have a resource type" in done.stderr


def test_a_cluster_of_one_s_own_is_described_and_planned(page: Page) -> None:
    own = ROOT / "clusters" / "my-cluster.yaml"
    example = re.search(r"```yaml\n(cluster:\n  name: my-cluster\n.*?)```", GUIDE.read_text(), re.DOTALL)
    try:
        well(page("cp clusters/template.yaml clusters/my-cluster.yaml"))
        own.write_text(example[1])
        objects = list(yaml.safe_load_all(well(page("make deploy-cluster-dry-run CLUSTER=my-cluster MODE=rdma"))))
    finally:
        own.unlink(missing_ok=True)
    found = {(item["kind"], item["metadata"]["name"]): item for item in objects}
    assert found["TrainingCluster", "my-cluster"]["spec"]["network"]["rdma"]["devices"] == ["mlx5_2", "mlx5_3", "mlx5_4", "mlx5_5"]
    assert found["TrainingJob", "ml-dev-env"]["metadata"]["namespace"] == "nccl-test"


@pytest.mark.parametrize("program", ["kubectl", "oc"])
def test_the_command_is_a_plugin_of_kubectl_and_of_oc(path: str, program: str) -> None:
    command, environment = [program, "lockstep", "--version"], {**os.environ, "PATH": f"{path}:{sys.prefix}/bin"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert well(done).startswith("0.1.0")


@pytest.mark.usefixtures("deployed")
def test_cleaning_up_leaves_claims_until_they_are_asked_for(page: Page) -> None:
    assert "ready" in well(page(DEPLOY)), "once more changes nothing"
    well(page("oc delete tj ml-dev-env -n lockstep"))
    assert re.search(r"^ml-dev-env +made$", well(page(DEPLOY)), re.MULTILINE)
    well(page("make clean-cluster CLUSTER=local"))
    assert "No resources found" in page("oc get pods -n lockstep -l app=ml-dev-env-multi").stderr
    assert page("oc get statefulset ml-dev-env -n lockstep").returncode != 0
    assert page("oc get sa ml-dev-sa -n lockstep").returncode != 0
    kept = well(page("oc get pvc -n lockstep"))
    assert "ml-dev-workspace" in kept and "ml-datasets" in kept
    well(page("oc delete pvc ml-dev-workspace ml-datasets -n lockstep"))
    assert page("oc delete pvc -l app=ml-dev-env-multi -n lockstep").returncode == 0
