""".venv/bin/python tests/bench/reports/jobs.py --json: are all of 5,000 jobs heard, with connections that stay, and without?

The report server, its TLS port and what comes over it are real, in a process of their own; the cluster, the tokens' review and the
coordinators are played, with the coordinators' own times and an address for each. The operator has just begun, so everybody is new to it.

all_heard_seconds     from the start until each job was heard
longest_silence       of any job after it was first heard, s
turned_away           share of the connections
server_cores, pss_mb  of the server's process, which holds no more of a job than its report, so without the operator's objects
"""

from __future__ import annotations

import sys

sys.path[0] = __file__.rsplit("/", 3)[0]  # tests/ has what it stands on

import argparse
import asyncio
import json
import os
import random
import resource
import ssl
import time
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from bench.operator_scale import megabytes
from bench.report_storm import cpu_seconds
from lockstep.api.names import REPORT_AUDIENCE
from lockstep.platforms.operator.authenticate import POD_NAME_CLAIM, POD_UID_CLAIM
from lockstep.platforms.operator.certificate import make_certificates
from lockstep.platforms.operator.memory.inventory import Inventory
from lockstep.platforms.operator.report_server import PATH, ReportServer, tls_context
from lockstep.platforms.operator.secrets import job_key
from lockstep.platforms.operator.tls_port import REPORTS, serving
from lockstep_gang.contract.proof import parse_key, report_signature
from lockstep_gang.contract.report import JOB_HEADER, SIGNATURE_HEADER, RankCount, Report, State, job_header, report_body
from lockstep_gang.contract.run import JobIdentity
from lockstep_gang.coordinator.reporter import PERIOD_SECONDS, RETRY_SECONDS

MASTER, NAMESPACES = b"m" * 32, 10
BUSY = 64
"""Coordinators that connect at one time: they all have this process's core, where in a cluster each has its own."""


def identity(number: int) -> JobIdentity:
    return JobIdentity(f"job{number}", f"ns{number % NAMESPACES}", f"uid-{number}")


def inventory(jobs: int) -> Inventory:
    """So many jobs of one node, each with its StatefulSet and pod."""
    made = Inventory()
    for job in map(identity, range(jobs)):

        def put(kind: str, name: str, uid: str, owner: str, job: JobIdentity = job, **more: Any) -> None:
            metadata = {"name": name, "namespace": job.namespace, "uid": uid, "labels": {"lockstep.dev/job": job.name}}
            owners = [{"kind": "o", "name": "o", "uid": owner, "controller": True}]
            made.observe(kind, {"kind": kind, "metadata": {**metadata, "ownerReferences": owners}, **more}, deleted=False)

        put("TrainingJob", job.name, job.uid, "", spec={"nodes": 1})
        put("StatefulSet", job.name, f"{job.uid}-set", job.uid, spec={"replicas": 1})
        runs = {"phase": "Running", "containerStatuses": [{"name": "trainer", "state": {"running": {}}}]}
        put("Pod", f"{job.name}-0", f"{job.uid}-pod", f"{job.uid}-set", spec={"nodeName": "n"}, status=runs)
    return made


async def serve(jobs: int) -> None:
    """Print the port, and serve until the input ends."""

    async def review(token: str) -> dict[str, Any]:
        await asyncio.sleep(0.005)
        job = identity(int(token))
        extra = {POD_NAME_CLAIM: [f"{job.name}-0"], POD_UID_CLAIM: [f"{job.uid}-pod"]}
        user = {"username": f"system:serviceaccount:{job.namespace}:sa", "extra": extra}
        return {"authenticated": True, "audiences": [REPORT_AUDIENCE], "user": user}

    server = ReportServer(MASTER, review, inventory(jobs), lambda key: None)
    context = tls_context(make_certificates(("localhost",), datetime.now(UTC)))
    async with serving(server.application(), "", 0, context, REPORTS) as port:
        print(port, flush=True)
        await asyncio.to_thread(sys.stdin.read)


class Coordinators:
    """What all jobs' coordinators do; `stays`: as this version's do, otherwise as those of the version before."""

    def __init__(self, port: int, stays: bool) -> None:
        self._port, self._stays = port, stays
        self._tls = ssl._create_unverified_context()  # noqa: S323 (its certificate is made for this run)
        self._busy = asyncio.Semaphore(BUSY)
        self._chance = random.Random(1)  # noqa: S311 (the same times in each run)
        self.heard: dict[int, float] = {}
        self.silence = 0.0
        self.counts: Counter[str] = Counter()

    async def of(self, number: int) -> None:
        await asyncio.sleep(self._chance.uniform(0, PERIOD_SECONDS))
        job, streams, wait = identity(number), None, RETRY_SECONDS[0]
        key = parse_key(job_key(MASTER, job.uid))
        report = Report(job, f"{job.name}-0", 0, 1, 0, State.RUNNING, "", (), RankCount(1, 1))
        while True:
            body = report_body(replace(report, sequence=time.time_ns()))
            head = (
                f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\nAuthorization: Bearer {number}\r\n"
                f"{JOB_HEADER}: {job_header(job)}\r\n{SIGNATURE_HEADER}: {report_signature(key, body)}\r\n\r\n"
            )
            try:
                if streams is None:
                    address = f"127.{10 + number // 65000}.{number // 250 % 250}.{1 + number % 250}"
                    async with self._busy, asyncio.timeout(10):
                        streams = await asyncio.open_connection("127.0.0.1", self._port, ssl=self._tls, local_addr=(address, 0))
                    self.counts["connections"] += 1
                async with asyncio.timeout(10):
                    streams[1].write(head.encode() + body)
                    answer = (await streams[0].readuntil(b"\r\n\r\n")).decode().lower()
                    await streams[0].readexactly(int(answer.partition("content-length: ")[2].partition("\r\n")[0]))
                    is_taken = answer.split()[1] == "200"
            except (OSError, EOFError, TimeoutError):
                answer, is_taken = "connection: close", False
            if streams is not None and ("connection: close" in answer or not self._stays):
                streams[1].transport.abort()
                streams = None
            if is_taken:
                now, wait = time.monotonic(), RETRY_SECONDS[0]
                self.silence = max(self.silence, now - self.heard.get(number, now))
                self.heard[number] = now
                await asyncio.sleep(PERIOD_SECONDS)
            else:
                self.counts["turned away"] += 1
                await asyncio.sleep(wait * self._chance.uniform(0.5, 1.0))
                wait = min(2 * wait, RETRY_SECONDS[1])


async def measure(jobs: int, seconds: float, stays: bool) -> dict[str, Any]:
    arguments = (sys.executable, __file__, "--serve", "--jobs", str(jobs))
    server = await asyncio.create_subprocess_exec(*arguments, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE)
    played = Coordinators(int(await server.stdout.readline()), stays)
    before, cpu, began, all_heard = megabytes(server.pid), cpu_seconds(server.pid), time.monotonic(), None
    tasks = [asyncio.ensure_future(played.of(number)) for number in range(jobs)]
    while time.monotonic() < began + seconds:
        await asyncio.sleep(0.5)
        if all_heard is None and len(played.heard) == jobs:
            all_heard = round(time.monotonic() - began, 1)
    ended = time.monotonic()
    silence = max([played.silence, *(ended - at for at in played.heard.values())])
    result = {
        "jobs": jobs, "stay": stays, "heard": len(played.heard), "all_heard_seconds": all_heard, "longest_silence": round(silence, 1),
        "turned_away": round(played.counts["turned away"] / max(1, played.counts["connections"] + played.counts["turned away"]), 2),
        "server_cores": round((cpu_seconds(server.pid) - cpu) / (ended - began), 2), "pss_mb": round(megabytes(server.pid) - before),
        "load_average": round(os.getloadavg()[0], 1),
    }  # fmt: skip
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    server.stdin.close()
    await server.wait()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure how soon all of many jobs are heard.")
    parser.add_argument("--jobs", type=int, default=5000)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    if options.serve:
        asyncio.run(serve(options.jobs))
        return
    found = [asyncio.run(measure(options.jobs, options.seconds, stays)) for stays in (True, False)]
    print(json.dumps(found, indent=None if options.json else 1))


if __name__ == "__main__":
    main()
