""".venv/bin/python tests/bench/watching.py [--handlers]: what watching costs the operator, beside a stub API server with 10,000 pods.

--handlers      with kopf's own handlers and lists instead of the session's middleware
start_cpu       seconds of processor time until the pods are watched and taken in
event_cpu_ms    processor time of an event; 2,000 at 100 a second
lag_ms          from a change to the operator
"""

from __future__ import annotations

import sys

sys.path[0] = __file__.rsplit("/", 2)[0]  # tests/ has what it stands on

import argparse
import asyncio
import json
import os
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import kopf
from aiohttp import web

from bench.operator_scale import milliseconds
from lockstep.kube.cluster import Cluster
from lockstep.kube.connection import headers_of, server_of, session_to
from lockstep.kube.kinds import type_meta
from lockstep.platforms.operator.memory.inventory import WATCHED, Inventory
from lockstep.platforms.operator.watching import kopf_settings, registry
from support.api_stub import kubeconfig
from unit.platforms.operator.test_watching import discovery

PODS, EVENTS, PER_SECOND, SETTLING_SECONDS = 10_000, 2_000, 100, 30.0
STAMP = "lockstep.dev/stamp"


def pod(number: int, version: int, **annotations: str) -> bytes:
    """One of 6 kB."""
    variables = [{"name": f"V{each}", "value": "x" * 40} for each in range(20)]
    metadata = {
        "name": f"job{number // 2}-{number % 2}", "namespace": "ns", "uid": f"u{number}", "resourceVersion": str(version),
        "labels": {"lockstep.dev/job": f"job{number // 2}"}, "annotations": annotations,
        "managedFields": [{"manager": "kubelet", "fieldsV1": {"f:status": {f"f:{each}": {} for each in range(100)}}}],
    }  # fmt: skip
    spec = {"nodeName": "n", "containers": [{"name": "trainer", "env": variables, "resources": {"requests": {"cpu": "1"}}}]}
    conditions = [{"type": f"C{each}", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"} for each in range(5)]
    return json.dumps({"metadata": metadata, "spec": spec, "status": {"phase": "Running", "conditions": conditions}}).encode()


class Stub:
    """An API server that has pods only."""

    def __init__(self) -> None:
        self.pods = [pod(number, number + 1) for number in range(PODS)]
        self.stream: asyncio.Future[web.StreamResponse] = asyncio.get_running_loop().create_future()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if (found := discovery(request.path)) is not None:
            return web.json_response(found)
        is_of_pods = request.path.endswith("/pods")
        if "watch" not in request.query:
            items = self.pods if is_of_pods and "!" not in request.query.get("labelSelector", "") else []
            begin, limit = int(request.query.get("continue", 0)), int(request.query.get("limit", PODS))
            token = f'"continue":"{begin + limit}",' if begin + limit < len(items) else ""
            head = f'{{"kind":"List","apiVersion":"v1","metadata":{{{token}"resourceVersion":"{PODS}"}},"items":['.encode()
            return web.Response(body=head + b",".join(items[begin : begin + limit]) + b"]}", content_type="application/json")
        stream = web.StreamResponse()
        await stream.prepare(request)
        if is_of_pods and not self.stream.done():
            self.stream.set_result(stream)
        await asyncio.Event().wait()
        return stream

    async def change(self) -> None:
        stream = await self.stream
        await asyncio.sleep(SETTLING_SECONDS)
        for number in range(EVENTS):
            item = pod(number * 7 % PODS, PODS + number + 1, **{STAMP: repr(time.monotonic())})
            await stream.write(b'{"type":"MODIFIED","object":' + item + b"}\n")
            await asyncio.sleep(1 / PER_SECOND)


async def serve(url_file: Path, command: list[str]) -> None:
    stub, application = Stub(), web.Application()
    application.router.add_route("GET", "/{path:.*}", stub.answer)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    environment = {**os.environ, "KUBECONFIG": str(kubeconfig(url_file, f"http://127.0.0.1:{runner.addresses[0][1]}"))}
    process = await asyncio.create_subprocess_exec(sys.executable, __file__, "--child", *command, env=environment)
    changing = asyncio.create_task(stub.change())
    try:
        await process.wait()
    finally:
        changing.cancel()
        if process.returncode is None:
            process.kill()
        await runner.cleanup()


def with_handlers(observe: Any) -> tuple[kopf.OperatorRegistry, kopf.OperatorSettings]:
    """kopf as it comes, but for scanning, selectors and pages."""
    handlers, settings = kopf.OperatorRegistry(), kopf.OperatorSettings()
    settings.scanning.disabled, settings.watching.chunk_size = True, 100

    @kopf.on.login(registry=handlers)  # type: ignore[untyped-decorator]
    async def login(**_: Any) -> kopf.AiohttpSession:
        server = server_of(None)
        return kopf.AiohttpSession(server=server.url, aiohttp_session=session_to(server, headers=await headers_of(server), limit=0))

    @kopf.on.event("pods", registry=handlers)  # type: ignore[untyped-decorator]
    async def handle(type: str | None, body: kopf.Body, **_: Any) -> None:
        observe("Pod", dict(body) | type_meta("Pod"), type == "DELETED")

    return handlers, settings


async def watch(is_with_handlers: bool) -> None:
    inventory, lags, started = Inventory(), list[float](), list[float]()
    done = asyncio.Event()

    def observe(kind: str, item: dict[str, Any], deleted: bool) -> None:
        stamp = item["metadata"].get("annotations", {}).get(STAMP)
        if stamp:
            started.extend([] if started else [time.process_time()])
            lags.append(time.monotonic() - float(stamp))
        inventory.observe(kind, item, deleted=deleted)
        if len(lags) == EVENTS:
            done.set()

    async with await Cluster.connect() as cluster:
        inventory.begin_lists()
        async for page in cluster.pages("Pod", None, limit=100, bounded=True):
            inventory.take_in("Pod", page["items"])
    kinds = [one for one in WATCHED if one.kind == "Pod"]
    ours = registry(kinds, observe, lambda: None, lambda plural: None), kopf_settings()
    handlers, settings = with_handlers(observe) if is_with_handlers else ours
    watching = asyncio.create_task(kopf.operator(registry=handlers, settings=settings, clusterwide=True, standalone=True, identity="bench"))
    await done.wait()
    print(
        json.dumps(
            {
                "start_cpu": round(started[0], 1),
                "event_cpu_ms": round(1000 * (time.process_time() - started[0]) / EVENTS, 2),
                "lag_ms": milliseconds(lags),
                "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
            }
        )
    )
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what watching costs.")
    parser.add_argument("--handlers", action="store_true", help="with kopf's own handlers")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        asyncio.run(watch(options.handlers))
        return
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(serve(Path(folder), ["--handlers"] if options.handlers else []))


if __name__ == "__main__":
    main()
