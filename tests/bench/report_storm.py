""".venv/bin/python tests/bench/report_storm.py --json: what strangers who can reach the report server cost the operator.

API server and the operator's process are real, in a control plane of its own; jobs' nodes are played, their reports are real ones. All
senders are on this machine, each kind with loopback addresses of its own, as pods would have. For --seconds each, beside 1,000 clients that
each hold an idle TLS connection or ask for one again a second after it was closed:

connections   10,000 times a second a connection that sends an unsigned report without TLS, from 20 addresses
pipelined     10,000 unsigned reports a second over TLS, 250 in each connection, from 20 addresses
large         2 unsigned reports of half a megabyte a second over TLS, from one address: before, each cost half a second of the loop
signed        one tenant's six pods with 16 connections each send as fast as they are answered, signed by their jobs' keys; every second
              report has a token that is no good
good          the same with good tokens only
probes        10,000 connections a second to the port of the kubelet's probes, from 20 addresses

offered_per_second    what was sent, or whose connection was asked for; written_per_second: for which there was a connection
open_idle             idle connections that the operator held, on the average
probes                the kubelet's, two a second: answered, failed, and the slowest
reports               of 10 jobs, one a second each: taken, seconds from the first attempt to the answer, and attempts that were turned away
and repeated lease_kept            the same process led all the time; lease_age_seconds: the oldest that the Lease became growth_mb
PSS of the operator's process at its highest, less that before cpu_cores             that the operator's process used
"""

from __future__ import annotations

import sys

sys.path[0] = __file__.rsplit("/", 2)[0]  # tests/ has what it stands on

import argparse
import asyncio
import contextlib
import json
import os
import resource
import socket
import ssl
import struct
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp

from bench.operator_scale import (
    HEALTH_PORT,
    OperatorUnderTest,
    Played,
    job_of,
    megabytes,
    milliseconds,
    operator_at,
    prepared,
    reason,
    say,
    until_all,
)
from lockstep.api.names import OPERATOR_NAME, OPERATOR_NAMESPACE
from lockstep.kube.cluster import Cluster
from lockstep_gang.contract.proof import report_signature
from lockstep_gang.contract.report import JOB_HEADER, SIGNATURE_HEADER, RankCount, Report, State, report_body
from lockstep_gang.contract.run import JobIdentity
from support.clusters.control_plane import control_plane

IDLE, JUNK_PER_SECOND, PIPELINED, ADDRESSES, JOBS, LARGE_BYTES = 1000, 10_000, 250, 20, 10, 500_000
HEAD = b"POST /v1/report HTTP/1.1\r\nHost: x\r\nX-Lockstep-Job: ns/x/0\r\nX-Lockstep-Signature: 0\r\nContent-Length: %d\r\n\r\n"
JUNK = HEAD % 100 + b"x" * 100
TICKS = 100
"""A second."""
PORT = 18443
KINDS = ("connections", "pipelined", "large", "signed", "good", "probes")
PODS, CONNECTIONS = 6, 16


def tls() -> ssl.SSLContext:
    return ssl._create_unverified_context()  # noqa: S323 (a stranger doesn't care)


async def hold_idle(seconds: float, clients: int) -> dict[str, float]:
    """So many clients, each with a connection that says nothing, if it gets one."""
    open_now, samples, context = [0], list[int](), tls()

    async def hold(number: int) -> None:
        address = f"127.3.0.{1 + number % 50}"
        while True:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection(
                    "127.0.0.1", PORT, ssl=context, local_addr=(address, 0), ssl_handshake_timeout=30
                )
                open_now[0] += 1
                try:
                    with contextlib.suppress(OSError):
                        await reader.read()
                finally:
                    open_now[0] -= 1
                    writer.close()
            await asyncio.sleep(1)

    holding = [asyncio.ensure_future(hold(number)) for number in range(clients)]
    for _ in range(int(seconds)):
        await asyncio.sleep(1)
        samples.append(open_now[0])
    for task in holding:
        task.cancel()
    return {"open": sum(samples) / max(1, len(samples))}


def flood_connections(seconds: float, port: int) -> dict[str, float]:
    """One connection a request, plain bytes that no port understands."""
    began, sent, written = time.monotonic(), 0, 0
    while (passed := time.monotonic() - began) < seconds:
        for _ in range(max(0, min(int(passed * JUNK_PER_SECOND) - sent, JUNK_PER_SECOND // 10))):
            with contextlib.suppress(OSError), socket.socket() as one:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                one.bind((f"127.4.0.{1 + sent % ADDRESSES}", 0))
                one.setblocking(False)  # where the operator's backlog is full, the next one is offered all the same
                one.connect_ex(("127.0.0.1", port))
                written += one.send(JUNK) == len(JUNK)
            sent += 1
        time.sleep(1 / TICKS)
    return {"sent": sent, "written": written}


async def flood_tls(seconds: float, per_second: float, request: bytes, count: int, addresses: int) -> dict[str, float]:
    """So many connections a second with `count` times the request in each. Sent: those that a connection was there for, or was asked
    for.
    """
    began, sent, written, context = time.monotonic(), 0, [0], tls()
    sending: set[asyncio.Task[None]] = set()

    async def send(number: int) -> None:
        with contextlib.suppress(OSError):
            address = (f"127.5.0.{1 + number % addresses}", 0)
            reader, writer = await asyncio.open_connection("127.0.0.1", PORT, ssl=context, local_addr=address)
            try:
                writer.write(request * count)
                written[0] += count
                await asyncio.wait_for(reader.read(), 10)
            finally:
                writer.close()

    while (passed := time.monotonic() - began) < seconds:
        while sent < passed * per_second:
            task = asyncio.ensure_future(send(sent))
            sending.add(task)
            task.add_done_callback(sending.discard)
            sent += 1
        await asyncio.sleep(1 / TICKS)
    for task in sending:
        task.cancel()
    return {"sent": sent * count, "written": written[0]}


async def flood_signed(seconds: float, signers: list[tuple[str, str, str, str, str]], bad: bool) -> dict[str, float]:
    """What the pods of one tenant can do with the keys and tokens that they have; `bad`: each second token is none."""
    counts, tls_of_all = Counter[str](), tls()

    async def send(signer: tuple[str, str, str, str, str], address: str) -> None:
        namespace, name, uid, key, token = signer
        report, streams = Report(JobIdentity(name, namespace, uid), f"{name}-0", 0, 1, 0, State.RUNNING, "", (), RankCount(2, 2)), None
        while True:
            counts["sent"] += 1
            body = report_body(replace(report, sequence=time.time_ns()))
            shown = token if counts["sent"] % 2 or not bad else f"bad{counts['sent']}"
            head = (
                f"POST /v1/report HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\nAuthorization: Bearer {shown}\r\n"
                f"{JOB_HEADER}: {namespace}/{name}/{uid}\r\n{SIGNATURE_HEADER}: {report_signature(bytes.fromhex(key), body)}\r\n\r\n"
            )
            try:
                if streams is None:
                    streams = await asyncio.open_connection("127.0.0.1", PORT, ssl=tls_of_all, local_addr=(address, 0))
                streams[1].write(head.encode() + body)
                answer = (await streams[0].readuntil(b"\r\n\r\n")).decode().lower()
                await streams[0].readexactly(int(answer.partition("content-length: ")[2].partition("\r\n")[0]))
                counts["written"] += 1
            except (OSError, EOFError):
                answer = "connection: close"
                await asyncio.sleep(0.02)
            if streams is not None and "connection: close" in answer:
                streams[1].transport.abort()
                streams = None

    tasks = [asyncio.ensure_future(send(one, f"127.6.0.{1 + pod}")) for pod, one in enumerate(signers) for _ in range(CONNECTIONS)]
    await asyncio.sleep(seconds)
    for task in tasks:
        task.cancel()
    return {"sent": counts["sent"], "written": counts["written"]}


def flood(kind: str, seconds: float) -> dict[str, float]:
    """Flood from a process of its own. Keys and tokens come from its input."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (8192, 8192))
    if kind == "idle":
        return asyncio.run(hold_idle(seconds, IDLE))
    if kind in ("connections", "probes"):
        return flood_connections(seconds, PORT if kind == "connections" else HEALTH_PORT)
    if kind == "pipelined":
        return asyncio.run(flood_tls(seconds, JUNK_PER_SECOND / PIPELINED, JUNK, PIPELINED, ADDRESSES))
    if kind in ("signed", "good"):
        return asyncio.run(flood_signed(seconds, json.loads(sys.stdin.readline()), kind == "signed"))
    return asyncio.run(flood_tls(seconds, 2, HEAD % LARGE_BYTES + b'{"order":[' + b"1," * (LARGE_BYTES // 2), 1, 1))


@contextlib.contextmanager
def flooding(kind: str, seconds: float, signers: object = ()) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, __file__, "--flood", kind, "--seconds", str(seconds)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    process.stdin.write(json.dumps(signers) + "\n")
    process.stdin.flush()
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


class Reporting:
    """Each job from an address of its own, a report a second; as a coordinator it repeats what was turned away."""

    def __init__(self, played: Played) -> None:
        self._played = played
        self.seconds: list[float] = []
        self.repeated: Counter[str] = Counter()
        """Reasons, and how many seconds later."""

    async def of(self, job: dict[str, Any], number: int) -> None:
        while True:
            began, wait = time.monotonic(), 0.2
            while True:
                tried, why = time.monotonic(), ""
                connector = aiohttp.TCPConnector(local_addr=(f"127.2.0.{1 + number}", 0), force_close=True)
                try:
                    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(10)) as session:
                        why = str(await self._played.report(session, job, State.RUNNING))
                except (aiohttp.ClientError, TimeoutError) as error:
                    why = type(error).__name__
                if why == "200":
                    break
                self.repeated[f"{why} after {time.monotonic() - tried:.1f} s"] += 1
                await asyncio.sleep(wait)
                wait = min(2 * wait, 30.0)
            self.seconds.append(time.monotonic() - began)
            await asyncio.sleep(max(0.0, 1.0 - self.seconds[-1]))


class Probing:
    """The kubelet: a probe twice a second, with a connection each."""

    def __init__(self) -> None:
        self.answered = self.failed = 0
        self.slowest = 0.0

    async def run(self) -> None:
        while True:
            began = time.monotonic()
            try:
                async with asyncio.timeout(5):
                    reader, writer = await asyncio.open_connection("127.0.0.1", HEALTH_PORT, local_addr=("127.7.0.1", 0))
                    writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
                    is_healthy = b" 200 " in await reader.readline()
                    writer.transport.abort()
            except (OSError, TimeoutError):
                is_healthy = False
            self.answered, self.failed = self.answered + is_healthy, self.failed + (not is_healthy)
            self.slowest = max(self.slowest, time.monotonic() - began)
            await asyncio.sleep(0.5)


class Watching:
    """The operator's memory and its Lease, a few times a second."""

    def __init__(self, cluster: Cluster, operator: OperatorUnderTest) -> None:
        self._cluster, self._operator = cluster, operator
        self.megabytes = self.lease_age = 0.0
        self.holders: set[tuple[str, int]] = set()

    async def run(self) -> None:
        while True:
            spec = (await self._cluster.get("Lease", OPERATOR_NAMESPACE, OPERATOR_NAME) or {})["spec"]
            self.holders.add((spec["holderIdentity"], spec.get("leaseTransitions", 0)))
            age = datetime.now(UTC) - datetime.fromisoformat(spec["renewTime"])
            self.lease_age = max(self.lease_age, age.total_seconds())
            self.megabytes = max(self.megabytes, megabytes(self._operator.pid))
            await asyncio.sleep(0.25)


async def storm(
    kind: str, seconds: float, cluster: Cluster, operator: OperatorUnderTest, jobs: list[dict[str, Any]], played: Played, signers: object
) -> dict[str, Any]:
    pid = operator.pid
    reporting, watching, probing = Reporting(played), Watching(cluster, operator), Probing()
    tasks = [asyncio.ensure_future(reporting.of(job, number)) for number, job in enumerate(jobs)]
    tasks += [asyncio.ensure_future(watching.run()), asyncio.ensure_future(probing.run())]
    await asyncio.sleep(3)
    reporting.seconds, reporting.repeated, watching.megabytes, watching.lease_age = [], Counter(), 0.0, 0.0
    before, cpu, began = megabytes(operator.pid), cpu_seconds(operator.pid), time.monotonic()
    with flooding("idle", seconds + 2) as idle, flooding(kind, seconds, signers) as junk:
        texts = await asyncio.gather(*(asyncio.to_thread(process.communicate) for process in (idle, junk)))
    passed = time.monotonic() - began
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    held, sent = (json.loads(text) for text, _ in texts)
    is_kept = operator.ended == 0 and operator.pid == pid and len(watching.holders) == 1
    return {
        "offered_per_second": round(sent["sent"] / seconds), "written_per_second": round(sent["written"] / seconds),
        "open_idle": round(held["open"]), "lease_kept": is_kept, "lease_age_seconds": round(watching.lease_age, 1),
        "growth_mb": round(watching.megabytes - before, 1), "before_mb": before,
        "probes": {"answered": probing.answered, "failed": probing.failed, "slowest": round(probing.slowest, 2)},
            "cpu_cores": round((cpu_seconds(pid) - cpu) / passed, 2) if is_kept else None,
        "reports": milliseconds(reporting.seconds) | {"max": round(1000 * max(reporting.seconds)),
            "repeated": reporting.repeated} if reporting.seconds else None,
    }  # fmt: skip


async def signer(played: Played, job: dict[str, Any]) -> tuple[str, str, str, str, str]:
    """Its namespace, name, uid, key and token."""
    metadata = job["metadata"]
    token, key = await played.credentials(metadata["namespace"], metadata["name"])
    return metadata["namespace"], metadata["name"], metadata["uid"], key.hex(), token


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(seconds: float, kubeconfig: Path, folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = {"load_average": os.getloadavg()[0], "cores": os.cpu_count(), "idle_clients": IDLE}
    async with await Cluster.connect() as cluster, prepared(cluster) as namespaces:
        with operator_at(kubeconfig, PORT, folder / "operator.log") as operator:
            await operator.until_synced(cluster)
            played = Played(cluster, PORT)
            tasks = [asyncio.ensure_future(work) for work in (played.pods(), operator.revive())]
            for number in range(JOBS):
                await cluster.create(job_of(f"job{number}", namespaces[number % (len(namespaces) - 1)]))
            for number in range(PODS):
                await cluster.create(job_of(f"flood{number}", namespaces[-1]))
            there = await until_all(
                cluster, "pods run", lambda job: reason(job) in ("Starting", "Running", "WaitingForReport"), JOBS + PODS
            )
            await played.report_all(there, State.RUNNING)
            jobs = [job for job in there if job["metadata"]["namespace"] != namespaces[-1]]
            signers = [await signer(played, job) for job in there if job not in jobs]
            for kind in KINDS:
                await asyncio.sleep(10)  # what the last one left is closed
                result[kind] = await storm(kind, seconds, cluster, operator, jobs, played, signers)
                say(f"{kind}: {json.dumps(result[kind])}")
            for task in tasks:
                task.cancel()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the report server under a flood.")
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--flood", choices=("idle", *KINDS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.flood:
        print(json.dumps(flood(options.flood, options.seconds)))
        return
    with tempfile.TemporaryDirectory() as name, control_plane(Path(name)) as kubeconfig:
        os.environ["KUBECONFIG"] = str(kubeconfig)
        print(json.dumps(asyncio.run(measure(options.seconds, kubeconfig, Path(name))), indent=None if options.json else 1))


if __name__ == "__main__":
    main()
