"""The version before this one, and views of an upgrade while it happens: the pods of a gang, which nothing may touch, and who leads."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

from aiohttp import web
from kubernetes import config
from kubernetes.dynamic import DynamicClient

from lockstep.api.names import OPERATOR_NAME, OPERATOR_NAMESPACE
from support.clusters.cluster_jobs import API, Jobs, until
from support.clusters.counting_proxy import CountingProxy

DEPLOYMENT = f"/deployments/{OPERATOR_NAME}"
LOOK_SECONDS = 0.2
EVERY = 4
TRAINING: dict[str, Any] = {
    "model": {"name": "/workspace/models/tiny-base"}, "lora": {"rank": 4, "alpha": 8}, "precision": "FP32",
    "data": {"path": "/datasets/demo.jsonl", "maxLength": 64},
    "optimization": {"epochs": 1000, "learningRate": "1e-3", "schedule": "Constant", "microBatchSize": 2, "globalBatchSize": 32},
    "checkpoint": {"everySteps": EVERY}, "reportTo": [],
}  # fmt: skip


class TinyTraining:
    """A job of Lockstep's trainer on two nodes, with the quick start's model and data."""

    def __init__(self, jobs: Jobs, name: str, cluster: str, steps: int) -> None:
        self.jobs, self.name = jobs, name
        self._log = jobs.workspace() / "runs" / name / "logs" / "train_log.jsonl"
        training = TRAINING | {"optimization": TRAINING["optimization"] | {"maxSteps": steps}}
        held = {"stepSeconds": 3600, "collectiveSeconds": 3600}
        spec = {"cluster": cluster, "nodes": 2, "training": training, "hangTimeouts": held}
        jobs.create({"apiVersion": API, "kind": "TrainingJob", "metadata": {"name": name}, "spec": spec})

    def logged(self) -> list[dict[str, Any]]:
        """What the trainer has written of each step, which comes sooner than the operator's status."""
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def until_step(self, attempt: int, least: int) -> None:
        def look() -> bool:
            return any((entry["attempt"], entry["step"]) >= (attempt, least) for entry in self.logged())

        until(f"step {least} of {self.name}, attempt {attempt}", look, 240)


class Gang:
    """The pods of a job, which no deployment may touch."""

    def __init__(self, jobs: Jobs, name: str) -> None:
        self.jobs, self.name = jobs, name
        self._pods = self._seen()

    def _seen(self) -> dict[str, int]:
        pods = {pod["metadata"]["uid"]: pod["status"]["containerStatuses"] for pod in self.jobs.pods(self.name)}
        return {uid: sum(container["restartCount"] for container in containers) for uid, containers in pods.items()}

    @property
    def restarted(self) -> int:
        """Pods that are gone, new or restarted since."""
        return len(dict(self._seen().items() ^ self._pods.items()))

    @property
    def step(self) -> int:
        """Newest step that the operator has heard of; 0: none."""
        return int(((self.jobs.job(self.name).get("status") or {}).get("trainer") or {}).get("step") or 0)

    def until_heard(self) -> None:
        """Wait until an operator has heard of a later step, from the same pods in the same attempt."""
        before = self.step
        until(f"{self.name} trains on beyond step {before}, and an operator hears it", lambda: self.step > before)
        self.check_untouched()

    def check_untouched(self) -> None:
        assert (self._seen(), self.jobs.job(self.name)["status"]["attempts"]) == (self._pods, 1)


class KillingProxy(CountingProxy):
    """Kills its client instead of passing on the first write of the operator's Deployment: CRDs and rights are those of the other version
    then.
    """

    client: subprocess.Popen[bytes] | None = None

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        if request.method == "GET" or not request.path.endswith(DEPLOYMENT):
            return await super()._pass(request)
        assert self.client is not None
        self.client.kill()
        return web.Response(status=503)

    def kill(self, command: list[str], folder: Path, **environment: str) -> None:
        """Run a program that changes the Deployment, until then."""
        said = folder / "killed.log"
        with self.running(), said.open("wb") as log:
            settings = os.environ | environment | {"KUBECONFIG": str(self.kubeconfig(folder))}
            self.client = subprocess.Popen(command, cwd=folder, env=settings, stdout=log, stderr=log)
            code = self.client.wait(240)
        assert code == -signal.SIGKILL, said.read_text()


class Leaders:
    """Who leads, looked at again and again until the end of the block: no replica twice, and one Deployment in the whole cluster."""

    def __init__(self, kubeconfig: Path) -> None:
        self._kubeconfig = kubeconfig
        self.holders: list[str] = []
        """Holders of the Lease in turn; nobody between two is left out."""
        self._wrong: list[str] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look_again)

    def __enter__(self) -> Leaders:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end.set()
        self._thread.join()
        if kind is None:
            assert self._wrong == [] and len(self.holders) == len(set(self.holders)), (self._wrong, self.holders)

    def _look_again(self) -> None:
        with config.new_client_from_config(str(self._kubeconfig)) as connection:
            jobs = Jobs(DynamicClient(connection), OPERATOR_NAMESPACE)
            while not self._end.wait(LOOK_SECONDS):
                self._look(jobs)

    def _look(self, jobs: Jobs) -> None:
        lease: dict[str, Any] = jobs.get("Lease", OPERATOR_NAME, "coordination.k8s.io/v1") or {}
        holder = lease.get("spec", {}).get("holderIdentity")
        if holder and self.holders[-1:] != [holder]:
            self.holders.append(holder)
        selector = "app.kubernetes.io/component=operator"
        made = jobs.kind("Deployment", "apps/v1").get(label_selector=selector).to_dict()["items"]
        if len(made) > 1:
            self._wrong.append(", ".join(item["metadata"]["namespace"] for item in made))
