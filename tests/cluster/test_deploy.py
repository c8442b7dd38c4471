"""Deploying with the rights of one namespace and what an administrator then does; the diff of a deployment, and the way back from it."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import config, dynamic

from lockstep.cli.clusters.deploymentplan import Mode, definition_commands, planned
from lockstep.cli.shared.places import Verb
from lockstep.devcluster.host.layout import default_layout
from lockstep.devcluster.images import BASE
from lockstep.devcluster.python_volume import publish_code
from lockstep.kube.cluster import Cluster
from lockstep.platforms.clusters import install, waits
from support import in_process
from support.checkout import ROOT
from support.clusters.cluster_jobs import SCRIPTS, Jobs, kubeconfig_of, until

Kubectl = Callable[..., subprocess.CompletedProcess[str]]


def lockstep(*arguments: str, kubeconfig: Path | None = None) -> tuple[int, str, str]:
    """Exit code, output and errors of the command line, as somebody with this kubeconfig."""
    with pytest.MonkeyPatch.context() as patch:
        if kubeconfig is not None:
            patch.setenv("KUBECONFIG", str(kubeconfig))
        done = in_process.lockstep(*arguments)
    return done.returncode, done.stdout, done.stderr


def printed(text: str) -> list[list[str]]:
    """Return the words of every kubectl command that a person is told."""
    return [shlex.split(line) for line in text.splitlines() if line.strip().startswith("kubectl ")]


def type_as_administrator(commands: list[list[str]], kubectl: Kubectl) -> None:
    """Type them in turn, again where kubectl's wait refuses a definition whose conditions are still null."""
    for command in commands:
        until(shlex.join(command), lambda command=command: kubectl(*command[1:]).returncode == 0)


@pytest.fixture
def person(api: dynamic.DynamicClient, cluster: Path, namespace: str, tmp_path: Path) -> Path:
    """The kubeconfig of somebody with the built-in role `admin` in one namespace, and nothing else."""
    return kubeconfig_of("admin", Jobs(api, namespace), cluster, tmp_path)


@pytest.fixture
def own_file(namespace: str, tmp_path: Path) -> Path:
    """A file of the embedded cluster under another name, with the jobs in a namespace of this test."""
    described: dict[str, Any] = yaml.safe_load((ROOT / "clusters" / "local.yaml").read_text())
    described["cluster"] |= {"name": "mine", "namespace": namespace}
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(described))
    return path


@pytest.fixture
def cluster_file(own_file: Path, kubectl: Kubectl) -> Iterator[Path]:
    """It is deployed for the whole cluster; `local` is deployed again afterwards."""
    yield own_file
    kubectl("delete", "trainingcluster", "mine", "--ignore-not-found")
    lockstep("deploy", "local", "--no-dev")


async def test_an_operator_whose_volume_lacks_an_object_ends_the_wait_in_the_kubelet_s_words(
    kubectl: Kubectl, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waits, "STUCK_SECONDS", 1.0)
    labels = {"app.kubernetes.io/component": "operator"}
    volume = {"name": "own", "configMap": {"name": "none-such"}}
    container = {"name": "operator", "image": BASE, "volumeMounts": [{"name": "own", "mountPath": "/own"}]}
    template = {"metadata": {"labels": labels}, "spec": {"containers": [container], "volumes": [volume]}}
    spec = {"replicas": 1, "selector": {"matchLabels": labels}, "template": template}
    made = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "o", "namespace": namespace}, "spec": spec}
    assert kubectl("apply", "-f", "-", input=yaml.safe_dump(made)).returncode == 0
    told: list[str] = []
    with pytest.raises(install.InstallError) as raised:
        async with await Cluster.connect() as connection:
            await install.until_ready(connection, namespace, "o", told.append, 60)
    assert re.fullmatch(
        r'the operator can\'t start: pod o-\S+: MountVolume.SetUp failed for volume "own" : configmap "none-such" not found; '
        r"create it in the operator's namespace",
        str(raised.value),
    )
    assert 'configmap "none-such" not found' in told[-1]


def test_who_may_only_use_a_namespace_gets_the_commands_by_which_an_administrator_completes_it(
    person: Path, cluster_file: Path, namespace: str, kubectl: Kubectl
) -> None:
    assert lockstep("cluster", "uninstall", "local", "--jobs", "--yes")[0] == 0
    code, said, errors = lockstep("deploy", str(cluster_file), "--no-dev", kubeconfig=person)
    once = printed(errors)
    assert (code, said) == (1, "") and len(once) == 3
    type_as_administrator(once, kubectl)
    code, said, errors = lockstep("deploy", str(cluster_file), "--no-dev", kubeconfig=person)
    assert (code, said) == (1, "") and errors.splitlines()[-1] == f"  lockstep deploy {cluster_file} --no-dev --namespace-only"
    kubectl("delete", *(word for command in (once[0], once[-1]) for word in command[-2:]))
    assert kubectl("get", "serviceaccount,pvc", "-n", namespace, "-o", "name").stdout.split() == [
        "serviceaccount/default",
        "serviceaccount/person",
    ]
    code, said, _ = lockstep("cluster", "status", str(cluster_file), kubeconfig=person)
    assert code == 1 and "jobs       this cluster doesn't know TrainingJobs: lockstep deploy mine" in said
    code, said, _ = lockstep("deploy", str(cluster_file), "--namespaces", "all", kubeconfig=person)
    assert code == 1 and "ml-dev-env   NOT MADE: there is no CustomResourceDefinition trainingclusters.lockstep.dev; repeat" in said
    assert "applied      1 PersistentVolumeClaim, 1 ServiceAccount\n" in said
    assert "CustomResourceDefinition trainingjobs.lockstep.dev: missing" in said
    assert "Deployment lockstep-system/lockstep-operator: can't be seen" in said
    commands = printed(said)
    assert len(commands) == 3
    *definitions, rest = commands
    type_as_administrator(definitions, kubectl)
    unseen = lockstep("deploy", str(cluster_file), "--namespaces", "all", kubeconfig=person)
    assert "ml-dev-env   NOT MADE: no operator is to be seen in namespace lockstep-system; repeat" in unseen[1], unseen
    assert kubectl(*rest[1:]).returncode == 0
    assert kubectl("delete", "trainingcluster", "mine").returncode == 0
    until("the operator leads", lambda: kubectl("get", "lease", "lockstep-operator", "-n", "lockstep-system").returncode == 0)
    refused = lockstep("deploy", str(cluster_file), kubeconfig=person)
    assert "ml-dev-env   REMOVED again: ml-dev-env is not accepted: " in refused[1], refused
    assert kubectl("get", "trainingjobs", "-n", namespace, "-o", "name").stdout == ""
    assert kubectl(*rest[1:]).returncode == 0
    code, said, errors = lockstep("deploy", str(cluster_file), "--no-dev", kubeconfig=person)
    assert code == 0, said + errors
    assert "so their state is unknown" in said and "\nReady. Next:\n" in said
    code, _, errors = lockstep("cluster", "uninstall", str(cluster_file), "--yes", kubeconfig=person)
    assert code == 1 and "and nothing was removed" in errors
    code, _, errors = lockstep("cluster", "rollback", str(cluster_file), "--yes", kubeconfig=person)
    assert code == 1 and "you may not look into namespace lockstep-system" in errors
    code, said, _ = lockstep("cluster", "status", str(cluster_file), kubeconfig=person)
    assert code == 0 and "operator   you may not look" in said


def test_an_admin_of_a_namespace_needs_no_other_right_to_run_an_operator_and_jobs_there(
    api: dynamic.DynamicClient, person: Path, own_file: Path, namespace: str, kubectl: Kubectl, tmp_path: Path
) -> None:
    """With real pods: the operator, a dev environment and a job to its end, as that person; an administrator sends the definitions
    before.
    """
    publish_code(default_layout().python_volume)
    type_as_administrator([shlex.split(command) for command in definition_commands(planned(Verb(), str(own_file), Mode.TCP))], kubectl)
    until("the rights of admins", lambda: "trainingjobs" in kubectl("get", "clusterrole", "admin", "-o", "yaml").stdout)

    def mine(*arguments: str) -> str:
        code, said, errors = lockstep(*arguments, kubeconfig=person)
        assert code == 0, f"lockstep {' '.join(arguments)} → {code}\n{said}{errors}"
        return said

    here = ("--cluster", str(own_file))
    with config.new_client_from_config(str(person)) as connection:
        jobs = Jobs(dynamic.DynamicClient(connection), namespace)
        try:
            said = mine("deploy", str(own_file), "--namespace-only")
            assert f"operator     ready, in namespace {namespace}" in said and "ml-dev-env   ready: " in said
            elsewhere = tmp_path / "elsewhere"
            elsewhere.write_text(person.read_text().replace(default_layout().gateway, "127.0.0.1"))
            refused = lockstep("delete", "ml-dev-env", "--yes", *here, kubeconfig=elsewhere)
            assert (
                refused[0] != 0
                and f"cluster mine was deployed to {default_layout().server}, and its file states no cluster.api" in refused[2]
            )
            mine("deploy", str(own_file), "--diff")
            assert "ml-dev-env-0: " in mine("sync", "ml-dev-env", *here)
            (tmp_path / "says.py").write_text("import os, sys\nprint(os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], sys.argv[1])\n")
            mine("cp", str(tmp_path / "says.py"), "ml-dev-env:/workspace/", *here)
            assert "[rank 1] 1 of 2 here" in mine("run", "--job", "ml-dev-env", *here, "says.py", "here")
            assert "[rank 1] 1 of 2 here" in mine("logs", "ml-dev-env", *here)
            jobs.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "scripts"}, "data": SCRIPTS})
            jobs.start("s", "ok.py")
            assert "s: Complete" in mine("wait", "s", "--for", "Complete", "--timeout", "180", *here)
            for verb, shown in {
                "why": "s: Complete",
                "describe": "Accepted",
                "top": "Complete",
            }.items():
                assert shown in mine(verb, "s", *here), verb
            mine("cp", "ml-dev-env:/workspace/train_multi_node.py", str(tmp_path / "copied.py"), *here)
            assert "2 of 2 replicas ready" in mine("doctor", str(own_file)) and "--namespace-only" in mine(
                "cluster", "status", str(own_file)
            )
            assert BASE in mine("version", *here)
            mine("stop", "ml-dev-env", *here)
        finally:
            mine("cluster", "uninstall", str(own_file), "--jobs", "--yes")
    left = kubectl("get", "deployment,role,secret,lease,tj", "-n", namespace, "-o", "name").stdout.split()
    assert left == [], "nothing is left but claims"


def test_a_diff_tells_what_a_deployment_would_change_and_a_rollback_takes_it_back(kubectl: Kubectl) -> None:
    def mode() -> str:
        return kubectl("get", "trainingcluster", "local", "-o", "jsonpath={.spec.network.mode}").stdout

    assert lockstep("deploy", "local", "--no-dev", "--mode", "auto")[0] == 0
    code, told, _ = lockstep("deploy", "local", "--no-dev", "--mode", "auto", "--diff")
    assert code == 0 and told.startswith("nothing would change: ")
    code, said, _ = lockstep("deploy", "local", "--no-dev", "--mode", "tcp", "--diff")
    assert (code, said) == (1, '~ TrainingCluster local\n    spec.network.mode: "Auto" → "TCP"\n')
    assert mode() == "Auto"
    assert lockstep("deploy", "local", "--no-dev", "--mode", "tcp")[0] == 0
    assert mode() == "TCP"
    code, said, errors = lockstep("cluster", "rollback", "local", "--yes")
    assert code == 0, errors
    assert said.startswith("Back to local, --mode auto") or "\nBack to local, --mode auto" in said
    assert mode() == "Auto"
    assert lockstep("cluster", "rollback", "local", "--yes")[0] == 0
    assert mode() == "TCP"


def test_one_cluster_of_two_goes_with_its_rights_and_the_operator_stays(kubectl: Kubectl, own_file: Path, namespace: str) -> None:
    """As after a deployment that was forced to the wrong cluster: the file is for OpenShift, and what it brought along is there."""
    described: dict[str, Any] = yaml.safe_load(own_file.read_text())
    described["cluster"]["platform"] = "openshift"
    own_file.write_text(yaml.safe_dump(described))
    sent = [item for item in yaml.safe_load_all(lockstep("deploy", str(own_file), "--no-dev", "--dry-run")[1]) if item]
    came = {"TrainingCluster mine", "ClusterRole lockstep-rdma", f"RoleBinding lockstep-image-puller-{namespace}"}
    brought = [item for item in sent if f"{item['kind']} {item['metadata']['name']}" in came]
    assert len(brought) == 3 and kubectl("apply", "-f", "-", input=yaml.safe_dump_all(brought)).returncode == 0
    job = {"apiVersion": "lockstep.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "user", "namespace": namespace}}
    spec = {"cluster": "mine", "suspend": True, "script": {"path": "/a.py"}}
    assert kubectl("apply", "-f", "-", input=yaml.safe_dump({**job, "spec": spec})).returncode == 0

    def there() -> set[str]:
        asked = ("trainingcluster", "clusterrole/lockstep-rdma", f"rolebinding/lockstep-image-puller-{namespace}")
        found = (kubectl("get", name, "-n", "lockstep-system", "-o", "name").stdout.split() for name in asked)
        return {name.rpartition("/")[2] for names in found for name in names}

    before = there()
    code, _, errors = lockstep("cluster", "uninstall", str(own_file), "--cluster-only", "--yes")
    assert code == 2 and f"jobs use TrainingCluster mine ({namespace}/user): delete them first" in errors
    assert there() == before and {"mine", "local", "lockstep-rdma"} <= before
    assert kubectl("delete", "tj", "user", "-n", namespace).returncode == 0
    code, said, errors = lockstep("cluster", "uninstall", str(own_file), "--cluster-only", "--yes")
    assert code == 0 and "TrainingCluster mine is removed; Lockstep stays, with local.\n" in said, errors
    assert before - there() == {"mine", "lockstep-rdma", f"lockstep-image-puller-{namespace}"}
    assert kubectl("rollout", "status", "deployment/lockstep-operator", "-n", "lockstep-system", "--timeout=180s").returncode == 0
