""".venv/bin/python tests/bench/operator_scale.py --json: what a thousand jobs cost the operator, and how soon it answers.

API server, controllers and the operator's process are real, in a control plane of its own. Nodes are played as KWOK plays them: pods name a
scheduler that doesn't exist, are bound to nodes without a kubelet and said to run; coordinators' reports are real ones, with a token of
their pod each.

apply_to_stateful_set   from before the POST of a TrainingJob until a watch sees its StatefulSet, one job after the other has gone
floor                   the same with a client that does nothing but watch TrainingJobs and POST one StatefulSet, before and after, in the
same run lost_leases             how often the operator ended since the machine was too busy to renew its lease; it is started again memory
PSS of the operator's process, MB writes_per_job          what came through a proxy in front of the API server, by method and kind, over the
whole life of every job for_suspended_jobs,     writes and all calls (less the election, looks at tokens, and watches) of 20 s in which
nothing happens for_finished_jobs
"""

from __future__ import annotations

import sys

sys.path[0] = __file__.rsplit("/", 2)[0]  # tests/ has what it stands on

import argparse
import asyncio
import base64
import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp

from lockstep.api.names import API_VERSION, OPERATOR_NAME, OPERATOR_NAMESPACE, REPORT_AUDIENCE
from lockstep.devcluster.host.processes import TIED
from lockstep.kube.cluster import MERGE, ApiError, Cluster
from lockstep.kube.kinds import KINDS, path_of
from lockstep_gang.contract.proof import parse_key, report_signature
from lockstep_gang.contract.report import JOB_HEADER, SIGNATURE_HEADER, NodeReport, RankCount, Report, State, job_header, report_body
from lockstep_gang.contract.run import JobIdentity
from support.clusters.control_plane import control_plane
from support.clusters.counting_proxy import CountingProxy

Object = dict[str, Any]
NAMESPACES = 10
NODES = 2
QUIET_SECONDS = 20.0
REPORT_SECONDS = 15.0
ADDRESSES = 32
HEALTH_PORT = 8445
IMPORTED = "import time, lockstep.platforms.operator.replica; print('imported', flush=True); time.sleep(60)"


def megabytes(pid: int) -> float:
    """The process's proportional set size."""
    found = re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
    return round(int(found[1]) / 1024, 1)


def peak_megabytes(pid: int) -> float:
    found = re.search(r"^VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return round(int(found[1]) / 1024, 1)


def milliseconds(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        "p50": round(1000 * statistics.median(ordered), 1),
        "p99": round(1000 * ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))], 1),
        "runs": len(ordered),
    }


class OperatorUnderTest:
    """One replica as its pod runs it, started anew for every phase."""

    def __init__(self, kubeconfig: Path, port: int, log: Path) -> None:
        variables = {
            "KUBECONFIG": str(kubeconfig),
            "LOCKSTEP_AGENT_IMAGE": "agent:1",
            "LOCKSTEP_REPORT_PORT": str(port),
            "LOCKSTEP_POD_IP": "127.0.0.1",
        }
        self._environment = {**os.environ, **variables}
        self._log = log.open("ab")
        self.port = port
        self.ended = 0
        self._process = self._started()

    def _started(self) -> subprocess.Popen[bytes]:
        command = [*TIED, sys.executable, "-m", "lockstep.platforms.operator.replica"]
        return subprocess.Popen(command, env=self._environment, stdout=self._log, stderr=self._log)

    async def revive(self) -> None:
        """Restart, for ever and as a kubelet would, an operator that ended by itself because the machine was too busy for its lease."""
        while not self._log.closed:
            await asyncio.sleep(0.5)
            if self._process.poll() is not None and not self._log.closed:
                self.ended += 1
                self._process = self._started()

    @property
    def pid(self) -> int:
        return self._process.pid

    async def until_synced(self, cluster: Cluster) -> float:
        """Seconds until it takes reports: it leads, and has listed the cluster."""
        began = time.monotonic()
        found = await cluster.get("Secret", OPERATOR_NAMESPACE, f"{OPERATOR_NAME}-tls")
        while found is None:
            await asyncio.sleep(0.2)
            found = await cluster.get("Secret", OPERATOR_NAMESPACE, f"{OPERATOR_NAME}-tls")
        async with aiohttp.ClientSession() as session:
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    async with session.get(f"http://127.0.0.1:{HEALTH_PORT}/readyz") as reply:
                        if reply.status == 200:
                            return time.monotonic() - began
                await asyncio.sleep(0.05)

    def end(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(20)
        self._log.close()


@contextlib.asynccontextmanager
async def prepared(cluster: Cluster) -> AsyncIterator[list[str]]:
    """Namespaces with a service account, and a node without a kubelet for every pod's ordinal."""
    names = [f"lockstep-bench-{number}" for number in range(NAMESPACES)]
    nodes = [f"lockstep-played-{ordinal}" for ordinal in range(NODES)]
    try:
        for name in names:
            await cluster.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
            await cluster.create({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "ml-dev-sa", "namespace": name}})
        for node in nodes:
            await cluster.create({"apiVersion": "v1", "kind": "Node", "metadata": {"name": node}, "spec": {"unschedulable": True}})
            ready = {"type": "Ready", "status": "True", "reason": "Played", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"}
            await cluster.request("PATCH", path_of("Node", None, node, "status"), {"status": {"conditions": [ready]}}, content_type=MERGE)
        yield names
    finally:
        for kind, found in (("Namespace", names), ("Node", nodes)):
            for name in found:
                await cluster.delete(kind, None, name)


def job_of(name: str, namespace: str, **spec: Any) -> Object:
    given = {"cluster": "local", "nodes": NODES, "script": {"path": "/scripts/x.py"}, "podTemplate": {"schedulerName": "played"}}
    return {"apiVersion": API_VERSION, "kind": "TrainingJob", "metadata": {"name": name, "namespace": namespace}, "spec": {**given, **spec}}


class Arrivals:
    """Times at which the watch saw each object ADDED."""

    def __init__(self) -> None:
        self._at: dict[str, asyncio.Future[float]] = {}

    def of(self, name: str) -> asyncio.Future[float]:
        return self._at.setdefault(name, asyncio.get_running_loop().create_future())

    async def watch(self, cluster: Cluster, kind: str, namespace: str, seen: Callable[[Object], Awaitable[None]] | None = None) -> None:
        version = (await cluster.list(kind, namespace))["metadata"]["resourceVersion"]
        async for event in cluster.watch(kind, namespace, {"resourceVersion": version}):
            if event["type"] == "ADDED":
                at = self.of(event["object"]["metadata"]["name"])
                if not at.done():
                    at.set_result(time.monotonic())
                if seen is not None:
                    await seen(event["object"])


async def one_after_the_other(cluster: Cluster, namespace: str, prefix: str, runs: int, arrivals: Arrivals) -> list[float]:
    """Seconds from before the POST of a job until its StatefulSet was seen."""
    found = []
    for number in range(runs):
        name = f"{prefix}{number}"
        asked = time.monotonic()
        await cluster.create(job_of(name, namespace))
        async with asyncio.timeout(30):
            found.append(await arrivals.of(name) - asked)
        await cluster.delete("TrainingJob", namespace, name)
        await until_gone(cluster, namespace, name)
    return found


async def until_gone(cluster: Cluster, namespace: str, name: str) -> None:
    """The garbage collector takes longer than a start: the next job would wait for what the one before has left to do."""
    for _ in range(600):
        await asyncio.sleep(0.1)
        if not await cluster.get("StatefulSet", namespace, name) and not (await cluster.list("Pod", namespace))["items"]:
            return
    raise SystemExit(f"{name} is still there a minute after it was deleted")


async def floor(cluster: Cluster, namespace: str, prefix: str, runs: int) -> list[float]:
    """Measure the lower bound: see the job, POST one object."""
    arrivals, jobs = Arrivals(), Arrivals()
    template = {"metadata": {"labels": {"a": "b"}}, "spec": {"containers": [{"name": "c", "image": "i"}]}}

    async def answer(job: Object) -> None:
        owner = {"apiVersion": API_VERSION, "kind": "TrainingJob", "name": job["metadata"]["name"], "uid": job["metadata"]["uid"]}
        metadata = {"name": job["metadata"]["name"], "namespace": namespace, "ownerReferences": [owner]}
        spec = {"replicas": 0, "serviceName": "s", "selector": {"matchLabels": {"a": "b"}}, "template": template}
        await cluster.create({"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": metadata, "spec": spec})

    watching = [
        asyncio.create_task(jobs.watch(cluster, "TrainingJob", namespace, answer)),
        asyncio.create_task(arrivals.watch(cluster, "StatefulSet", namespace)),
    ]
    await asyncio.sleep(1)
    try:
        return await one_after_the_other(cluster, namespace, prefix, runs, arrivals)
    finally:
        for task in watching:
            task.cancel()


async def answers(cluster: Cluster, namespace: str, runs: int) -> list[float]:
    """The operator's own."""
    arrivals = Arrivals()
    watching = asyncio.create_task(arrivals.watch(cluster, "StatefulSet", namespace))
    await asyncio.sleep(1)
    try:
        await one_after_the_other(cluster, namespace, "warm", 20, arrivals)  # the claims are made, code is compiled
        return await one_after_the_other(cluster, namespace, "job", runs, arrivals)
    finally:
        watching.cancel()


class Played:
    """Nodes and coordinators of all jobs."""

    def __init__(self, cluster: Cluster, port: int) -> None:
        self._cluster = cluster
        self._url = f"https://127.0.0.1:{port}/v1/report"
        self._busy = asyncio.Semaphore(16)
        self._tokens: dict[tuple[str, str], tuple[str, bytes]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.running: set[tuple[str, str]] = set()

    async def pods(self) -> None:
        """Bind and start what comes, take away what is to end, for ever."""
        selector = {"labelSelector": "lockstep.dev/job"}
        listed = await self._cluster.list("Pod", None, selector)
        for pod in listed["items"]:
            self._spawn(self._play(pod))
        async for event in self._cluster.watch("Pod", None, {**selector, "resourceVersion": listed["metadata"]["resourceVersion"]}):
            if event["type"] in ("ADDED", "MODIFIED"):
                self._spawn(self._play(event["object"]))

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _play(self, pod: Object) -> None:
        metadata = pod["metadata"]
        namespace, name = metadata["namespace"], metadata["name"]
        async with self._busy:
            with contextlib.suppress(ApiError):  # gone, or bound already
                if "deletionTimestamp" in metadata:
                    await self._cluster.request("DELETE", path_of("Pod", namespace, name), {"gracePeriodSeconds": 0})
                elif not pod["spec"].get("nodeName"):
                    target = {"apiVersion": "v1", "kind": "Node", "name": f"lockstep-played-{name.rpartition('-')[2]}"}
                    binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": target}
                    await self._cluster.request("POST", path_of("Pod", namespace, name, "binding"), binding)
                    container = {
                        "name": "trainer",
                        "state": {"running": {}},
                        "ready": True,
                        "restartCount": 0,
                        "image": "i",
                        "imageID": "i",
                    }
                    status = {"status": {"phase": "Running", "containerStatuses": [container]}}
                    await self._cluster.request("PATCH", path_of("Pod", namespace, name, "status"), status, content_type=MERGE)
                    self.running.add((namespace, name))

    async def report(self, session: aiohttp.ClientSession, job: Object, state: State) -> int:
        namespace, name, uid = job["metadata"]["namespace"], job["metadata"]["name"], job["metadata"]["uid"]
        token, key = await self.credentials(namespace, name)
        over = state is State.COMPLETE
        report = Report(
            JobIdentity(name, namespace, uid), f"{name}-0", time.time_ns(), 1, 0, state, "all ranks run",
            tuple(NodeReport(node, True, 1) for node in range(NODES)), RankCount(NODES, 0 if over else NODES),
                log=("done",) if over else (),
        )  # fmt: skip
        body = report_body(report)
        headers = {"Authorization": f"Bearer {token}", JOB_HEADER: job_header(report.job), SIGNATURE_HEADER: report_signature(key, body)}
        async with session.post(self._url, data=body, headers=headers, ssl=False) as reply:
            return reply.status

    async def credentials(self, namespace: str, name: str) -> tuple[str, bytes]:
        if (namespace, name) not in self._tokens:
            pod = await self._cluster.get("Pod", namespace, f"{name}-0")
            volumes = (await self._cluster.get("StatefulSet", namespace, name) or {})["spec"]["template"]["spec"]["volumes"]
            named = next(
                v["secret"]["secretName"] for v in volumes if v.get("secret", {}).get("secretName", "").startswith(f"{name}-agents")
            )
            secret = await self._cluster.get("Secret", namespace, named)
            bound = {"apiVersion": "v1", "kind": "Pod", "name": f"{name}-0", "uid": pod["metadata"]["uid"]}
            body = {
                "apiVersion": "authentication.k8s.io/v1",
                "kind": "TokenRequest",
                "spec": {"audiences": [REPORT_AUDIENCE], "boundObjectRef": bound},
            }
            made = await self._cluster.request("POST", path_of("ServiceAccount", namespace, "ml-dev-sa", "token"), body)
            key = parse_key(base64.b64decode(secret["data"]["key"]).decode())
            self._tokens[namespace, name] = (made["status"]["token"], key)
        return self._tokens[namespace, name]

    async def report_all(self, jobs: list[Object], state: State) -> float:
        """One report for every job; the seconds that it took."""
        began = time.monotonic()
        busy = asyncio.Semaphore(8)

        async def one(session: aiohttp.ClientSession, job: Object) -> None:
            async with busy:
                for _ in range(200):
                    with contextlib.suppress(aiohttp.ClientError):  # an operator that lost its lease on a busy machine, say
                        if await self.report(session, job, state) == 200:
                            return
                    if state is State.COMPLETE and await self._is_complete(job):
                        return  # its status was written after the time for the reply: the pods go, and no token of theirs is taken any more
                    await asyncio.sleep(0.5)
                raise SystemExit(f"the operator didn't take the report of {job['metadata']['name']}")

        async with (
            contextlib.AsyncExitStack() as stack
        ):  # the operator bounds what comes from one address: jobs are on as many as nodes would have
            connectors = [aiohttp.TCPConnector(local_addr=(f"127.1.0.{node}", 0)) for node in range(1, ADDRESSES + 1)]
            sessions = [await stack.enter_async_context(aiohttp.ClientSession(connector=connector)) for connector in connectors]
            await asyncio.gather(*(one(sessions[number % ADDRESSES], job) for number, job in enumerate(jobs)))
        return time.monotonic() - began

    async def _is_complete(self, job: Object) -> bool:
        now = await self._cluster.get("TrainingJob", job["metadata"]["namespace"], job["metadata"]["name"])
        return now is not None and reason(now) == "Complete"

    async def report_again(self, jobs: list[Object]) -> None:
        """Report as coordinators do, for ever."""
        while True:
            await asyncio.sleep(REPORT_SECONDS)
            await self.report_all(jobs, State.RUNNING)


async def until_all(cluster: Cluster, what: str, holds: Callable[[Object], bool], count: int, seconds: float = 300) -> list[Object]:
    """The jobs, once `count` of them are so."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        jobs = [job for job in (await cluster.list("TrainingJob"))["items"] if job["metadata"]["namespace"].startswith("lockstep-bench-")]
        done = sum(1 for job in jobs if holds(job))
        if done == count:
            return jobs
        say(f"{what}: {done} of {count}")
        await asyncio.sleep(2)
    raise SystemExit(f"{what}: not all in {seconds:.0f} s")


def reason(job: Object, condition: str = "Progressing") -> str:
    return next((c["reason"] for c in (job.get("status") or {}).get("conditions", []) if c["type"] == condition), "")


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def about_jobs(requests: list[tuple[str, str]]) -> Iterator[tuple[str, str, str]]:
    """(method, kind, "/status" or nothing). Tokens are looked at for every report, the lease for its own sake."""
    plurals = {kind.plural for kind in KINDS.values()}
    for method, path in requests:
        parts = path.strip("/").split("/")
        plural = next((part for part in reversed(parts) if part in plurals), parts[-1])
        if plural not in ("tokenreviews", "leases"):
            yield method, plural, "/status" if parts[-1] == "status" else ""


def by_kind(requests: list[tuple[str, str]]) -> Counter[str]:
    """Writes that concern a job: "POST statefulsets" and the like."""
    return Counter(f"{method} {plural}{part}" for method, plural, part in about_jobs(requests) if method != "GET")


async def in_quiet(proxy: CountingProxy) -> dict[str, int]:
    """Count the requests while nothing happens to any job: writes, and all calls but watches, which are only renewed."""
    proxy.requests.clear()
    watches = proxy.watches
    await asyncio.sleep(QUIET_SECONDS)
    writes, calls = sum(by_kind(proxy.requests).values()), len(list(about_jobs(proxy.requests)))
    return {"writes": writes, "calls": calls - (proxy.watches - watches)}


def imported_megabytes() -> float:
    with subprocess.Popen([sys.executable, "-c", IMPORTED], stdout=subprocess.PIPE, text=True) as process:
        process.stdout.readline()
        try:
            return megabytes(process.pid)
        finally:
            process.kill()


@contextlib.contextmanager
def operator_at(kubeconfig: Path, port: int, log: Path) -> Iterator[OperatorUnderTest]:
    operator = OperatorUnderTest(kubeconfig, port, log)
    try:
        yield operator
    finally:
        operator.end()


async def measure_answers(cluster: Cluster, kubeconfig: Path, port: int, log: Path, namespace: str, runs: int) -> Object:
    before = await floor(cluster, namespace, "before", runs // 2)
    with operator_at(kubeconfig, port, log) as operator:
        await operator.until_synced(cluster)
        mine = await answers(cluster, namespace, runs)
    after = await floor(cluster, namespace, "after", runs // 2)
    return {"apply_to_stateful_set": milliseconds(mine), "floor": milliseconds(before + after)}


async def measure_life(cluster: Cluster, kubeconfig: Path, folder: Path, log: Path, port: int, namespaces: list[str], count: int) -> Object:
    """Every job from its creation to its end, and a restart of the operator in between."""
    memory: Object = {"imported": imported_megabytes()}
    result: Object = {"jobs": count, "pods": count * NODES, "memory_mb": memory}

    def note(when: str, megabytes_then: float) -> None:
        memory[when] = megabytes_then
        say(f"{when}: {megabytes_then} MB")

    with CountingProxy(kubeconfig).running() as proxy:
        through = proxy.kubeconfig(folder)
        with operator_at(through, port, log) as operator:
            await operator.until_synced(cluster)
            note("no_jobs", megabytes(operator.pid))
            played = Played(cluster, port)
            playing = asyncio.create_task(played.pods())
            reviving = asyncio.create_task(operator.revive())
            proxy.requests.clear()
            began = time.monotonic()
            for number in range(count):
                await cluster.create(job_of(f"job{number}", namespaces[number % len(namespaces)], suspend=True))
            await until_all(cluster, "suspended", lambda job: reason(job) == "Suspended", count, 900)
            result["suspended_seconds"] = round(time.monotonic() - began, 1)
            await asyncio.sleep(2)
            note("jobs_suspended", megabytes(operator.pid))
            result["writes_to_suspend_per_job"] = per_job(by_kind(proxy.requests), count)
            result["for_suspended_jobs"] = await in_quiet(proxy)
            began = time.monotonic()
            for number in range(count):
                path = path_of("TrainingJob", namespaces[number % len(namespaces)], f"job{number}")
                await cluster.request("PATCH", path, {"spec": {"suspend": False}}, content_type=MERGE)
            jobs = await until_all(
                cluster, "pods run", lambda job: reason(job) in ("Starting", "Running", "WaitingForReport", "NoReport"), count, 900
            )
            result["pods_running_seconds"] = round(time.monotonic() - began, 1)
            result["reports_per_second"] = round(count / await played.report_all(jobs, State.RUNNING), 1)
            reporting = asyncio.create_task(played.report_again(jobs))
            await until_all(cluster, "running", lambda job: reason(job) == "Running", count, 900)
            note("all_running", megabytes(operator.pid))
            note("peak_rss", peak_megabytes(operator.pid))
            running = proxy.requests.copy()
            reporting.cancel()
            reviving.cancel()
            result["lost_leases"] = operator.ended
        proxy.requests.clear()
        with operator_at(through, port, log) as operator:
            reviving = asyncio.create_task(operator.revive())
            result["restart_seconds"] = round(await operator.until_synced(cluster), 2)
            await asyncio.sleep(10)
            note("after_list", megabytes(operator.pid))
            note("after_list_peak_rss", peak_megabytes(operator.pid))
            result["writes_by_restart"] = dict(by_kind(proxy.requests))
            proxy.requests.clear()
            await played.report_all(jobs, State.RUNNING)
            await played.report_all(jobs, State.COMPLETE)
            await until_all(cluster, "complete", lambda job: reason(job) == "Complete", count, 900)
            finished = proxy.requests.copy()
            await asyncio.sleep(5)
            result["for_finished_jobs"] = await in_quiet(proxy)
            note("all_finished", megabytes(operator.pid))
            playing.cancel()
            reviving.cancel()
            result["lost_leases"] += operator.ended
        result["writes_per_job"] = per_job(by_kind(running) + by_kind(finished), count)
    memory["per_suspended_job_kb"] = round(1024 * (memory["jobs_suspended"] - memory["no_jobs"]) / count, 1)
    memory["per_running_job_with_pods_kb"] = round(1024 * (memory["all_running"] - memory["no_jobs"]) / count, 1)
    return result


def per_job(found: Counter[str], count: int) -> dict[str, float]:
    return {what: round(number / count, 3) for what, number in sorted(found.items())}


async def measure(count: int, runs: int, kubeconfig: Path) -> Object:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        log = Path(tempfile.gettempdir()) / "lockstep-bench-operator.log"
        async with await Cluster.connect() as cluster, prepared(cluster) as namespaces:
            result: Object = {"load_average": os.getloadavg()[0], "cores": os.cpu_count()}
            if runs:
                result |= await measure_answers(cluster, kubeconfig, 18443, log, namespaces[0], runs)
                say(json.dumps(result))
            if count:
                result |= await measure_life(cluster, kubeconfig, folder, log, 18443, namespaces, count)
            return result


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the operator with many jobs.")
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--runs", type=int, default=300, help="of apply→StatefulSet, and as many of the floor")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, control_plane(Path(folder)) as kubeconfig:
        os.environ["KUBECONFIG"] = str(kubeconfig)
        print(json.dumps(asyncio.run(measure(options.jobs, options.runs, kubeconfig)), indent=None if options.json else 1))


if __name__ == "__main__":
    main()
