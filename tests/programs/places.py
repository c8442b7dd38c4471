"""Places where a job runs, and what a person types there: the same verbs on this machine, on hosts and on a cluster."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from kubernetes import config, dynamic

from lockstep.cli.clusters.devcluster import bring_up
from lockstep.devcluster.hosts.bed import up, write_cluster_file
from programs.inputs import PACKAGES, Program
from support.clusters.cluster_jobs import prepare
from support.clusters.installed_operator import local_objects, local_profile, send
from support.clusters.own_cluster import own_bed, own_number
from support.in_process import Told, lockstep
from support.launched import Typed

NAMESPACE = "programs"
HOSTS = 2


@dataclass
class Place:
    """Where a job runs. `where`: the words that say so to every verb. `python_path`: where ranks find packages."""

    folder: Path
    where: Sequence[str]
    python_path: str = PACKAGES
    typed: list[Typed] = field(default_factory=list)

    def type(self, *words: str) -> Told:
        """Type `lockstep WORDS`, which must end well."""
        done = lockstep(*words, *self.where)
        assert done.returncode == 0, f"{' '.join(words)}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def begin(self, *words: str) -> Typed:
        """Type `lockstep WORDS`, and don't wait for its end."""
        log = self.folder / f"typed-{len(self.typed)}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "lockstep.cli.main", *words, *self.where],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, env={**os.environ, "NO_COLOR": "1"}, start_new_session=True,
            )  # fmt: skip
        self.typed.append(Typed(process, log))
        return self.typed[-1]

    def job_file(self, name: str, job: dict[str, Any]) -> Path:
        file = self.folder / f"{name}.yaml"
        file.write_text(json.dumps(job))
        return file

    def start(self, name: str, program: Program) -> Typed:
        """Run a program as a job, and follow it."""
        return self.begin("run", "-f", str(self.job_file(name, program.job(name, self.python_path))))

    def go_on(self, name: str, follows: Typed) -> Typed:
        """Let a stopped job go on, and follow it to its end. `follows`: what followed it to the stop, and goes on when the job does."""
        self.type("resume", name)
        return follows

    def share(self, name: str, path: str) -> None:
        """Give every node what node 0 has in this folder of the project; nothing where they have one disk."""

    def stopped(self, name: str) -> bool:
        conditions = json.loads(self.type("get", name, "-o", "json").stdout)["status"]["conditions"]
        return any((one["type"], one["status"]) == ("Suspended", "True") for one in conditions)

    def log(self, name: str, attempt: int) -> str:
        """Output of node 0 in an attempt."""
        return self.type("logs", name, "--attempt", str(attempt)).stdout

    def put(self, folder: Path) -> None:
        """Put a folder into /workspace."""
        file = self.job_file("files", Program({"path": "any.py"}, "").job("files"))
        self.type("cp", "-f", str(file), str(folder), "files:/workspace/")

    def end(self) -> None:
        for one in self.typed:
            if one.process.poll() is None:
                one.process.terminate()
                one.ends()


class OnThisMachine(Place):
    """Processes of this machine."""

    @classmethod
    @contextmanager
    def opened(cls, folder: Path) -> Iterator[Place]:
        (folder / "workspace").mkdir()
        yield cls(folder, ("--cluster", str(folder)))

    def go_on(self, name: str, follows: Typed) -> Typed:
        follows.ends()
        return self.begin("run", "-f", str(self.folder / f"{name}.yaml"))

    def put(self, folder: Path) -> None:
        shutil.copytree(folder, self.folder / "workspace" / folder.name, copy_function=os.link)


class OnHosts(Place):
    """Hosts over ssh, with a disk each."""

    @classmethod
    @contextmanager
    def opened(cls, folder: Path) -> Iterator[Place]:
        with own_bed() as bed:
            up(bed, HOSTS, print)
            yield cls(folder, ("--cluster", str(write_cluster_file(bed, HOSTS))))

    def share(self, name: str, path: str) -> None:
        self.type("cp", "--from", "bed0", f"~/lockstep/workspace/project/{path}", f"{name}:/workspace/project/")


class OnCluster(Place):
    """Pods of the embedded cluster, which share a volume."""

    @classmethod
    @contextmanager
    def opened(cls, folder: Path) -> Iterator[Place]:
        with pytest.MonkeyPatch.context() as patch, own_number():
            kubeconfig = str(bring_up())
            patch.setenv("KUBECONFIG", kubeconfig)
            patch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", kubeconfig)  # it has read the variable already
            send(local_objects())
            with config.new_client_from_config(kubeconfig) as connection:
                api = dynamic.DynamicClient(connection)
                api.resources.get(api_version="v1", kind="Namespace").create(body={"metadata": {"name": NAMESPACE}})
                prepare(api, NAMESPACE)
            [theirs] = [variable.value for variable in local_profile().spec.pod.env if variable.name == "PYTHONPATH"]
            yield cls(folder, ("--cluster", "local", "-n", NAMESPACE), f"{PACKAGES}:{theirs}")  # (a job's value replaces the cluster's)
