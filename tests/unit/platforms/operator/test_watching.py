"""kopf watches a real HTTP server that does what API servers and strangers do to a watch: each time the next event comes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import repeat
from pathlib import Path
from typing import Any

import kopf
import pytest
from aiohttp import web

from lockstep.api.objects import TOO_DEEP
from lockstep.kube.kinds import KINDS
from lockstep.platforms.operator import watching
from lockstep.platforms.operator.memory.inventory import WATCHED, Watched
from support.api_stub import kubeconfig
from unit.kube.test_reading import deep, depth_of, text_of

KIND_OF = {KINDS[one.kind].plural: one for one in WATCHED} | {
    "namespaces": Watched("Namespace"),
    "customresourcedefinitions": Watched("CustomResourceDefinition"),
}
ERROR = '{"type":"ERROR","object":{"kind":"Status","metadata":{},"code":%d,"message":"m"}}'


def discovery(path: str) -> Any:
    """Return the API server's versions, groups, or the kinds of one of them; None for another path."""
    if path == "/api":
        return {"versions": ["v1"]}
    if path == "/apis":
        parts = [KINDS[one.kind].api_version.split("/") for one in KIND_OF.values() if "/" in KINDS[one.kind].api_version]
        return {
            "groups": [{"name": name, "versions": [{"version": v}], "preferredVersion": {"version": v}} for name, v in dict(parts).items()]
        }
    kinds = {plural: KINDS[one.kind] for plural, one in KIND_OF.items() if path.endswith(f"/{KINDS[one.kind].api_version}")}
    verbs = {"verbs": ["list", "watch"], "singularName": "", "kind": ""}
    resources = [{"name": plural, "namespaced": kind.namespaced, **verbs} for plural, kind in kinds.items()]
    return {"resources": resources} if resources else None


class ApiServer:
    """Discovery, and for each watch of pods the next of `scripts`: a status, or lines after which it stays open."""

    def __init__(self) -> None:
        self.scripts: list[list[str] | int] = []
        self.lists: list[web.Request] = []
        self.watches: dict[str, web.Request] = {}
        self.all_watched = asyncio.Event()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if (found := discovery(request.path)) is not None:
            return web.json_response(found)
        if "watch" not in request.query:
            self.lists.append(request)
            return web.json_response({"metadata": {"resourceVersion": "7"}, "items": []})
        plural = request.path.rpartition("/")[2]
        self.watches[plural] = request
        if len(self.watches) == len(WATCHED):
            self.all_watched.set()
        script = self.scripts.pop(0) if plural == "pods" and self.scripts else []
        if isinstance(script, int):
            return web.json_response({"kind": "Status", "code": script, "message": "m"}, status=script)
        return await self._stay(request, script)

    async def _stay(self, request: web.Request, lines: list[str]) -> web.StreamResponse:
        stream = web.StreamResponse()
        await stream.prepare(request)
        for line in lines:
            await stream.write(line.encode())
        if not lines or lines[-1].endswith("\n"):
            await asyncio.Event().wait()
        return stream


@asynccontextmanager
async def served(server: ApiServer) -> AsyncIterator[str]:
    application = web.Application()
    application.router.add_route("GET", "/{path:.*}", server.answer)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


class Seen:
    """Events, signs of life and lost events that the operator is told of."""

    def __init__(self) -> None:
        self.objects: asyncio.Queue[tuple[str, dict[str, Any], bool]] = asyncio.Queue()
        self.missed = 0
        self.plurals: set[str] = set()

    def miss(self) -> None:
        self.missed += 1


def watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: ApiServer, until: Callable[[Seen], Any]) -> Seen:
    """Let kopf watch until `until` has returned."""

    async def story() -> Seen:
        seen = Seen()
        async with served(server) as url:
            monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path, url)))
            registry = watching.registry(WATCHED, lambda *event: seen.objects.put_nowait(event), seen.miss, seen.plurals.add)
            settings = watching.kopf_settings()
            settings.networking.error_backoffs, settings.watching.reconnect_backoff = repeat(0.01), 0.01
            watched = asyncio.create_task(kopf.operator(registry=registry, settings=settings, clusterwide=True, standalone=True))
            try:
                await until(seen)
            finally:
                watched.cancel()
                await asyncio.gather(watched, return_exceptions=True)
        return seen

    return asyncio.run(asyncio.wait_for(story(), 30))


def event(name: str, type: str = "MODIFIED", deepspeed: str = "{}") -> str:
    return f'{{"type":"{type}","object":{text_of(name, deepspeed=deepspeed)}}}\n'


async def names(seen: Seen, count: int) -> list[str]:
    return [(await seen.objects.get())[1]["metadata"]["name"] for _ in range(count)]


INTERRUPTIONS = [
    [ERROR % 410], [ERROR % 410 + "\n"], [ERROR % 500 + "\n"], ['{"type":"MODIFIED","obj\n'], ["[]\n"], ['{"type":"MODIFIED","obj'],
    403, 429, 500, 503,
]  # fmt: skip


def test_events_come_after_each_interruption_of_a_watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server, taken = ApiServer(), list[str]()
    for number, one in enumerate(INTERRUPTIONS):
        server.scripts += [[event(f"e{number}"), *one]] if isinstance(one, list) else [one, [event(f"e{number}"), ERROR % 410]]
    server.scripts.append([event("end")])

    async def come(seen: Seen) -> None:
        taken.extend(await names(seen, len(INTERRUPTIONS) + 1))

    watch(tmp_path, monkeypatch, server, come)
    assert taken == [*(f"e{number}" for number in range(len(INTERRUPTIONS))), "end"]


def test_an_object_that_is_too_deep_is_taken_as_far_as_it_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server, taken = ApiServer(), list[Any]()
    server.scripts = [[event("a", "ADDED", deep(3000)), event("b", "DELETED")]]

    async def come(seen: Seen) -> None:
        taken.extend([await seen.objects.get(), await seen.objects.get()])

    watch(tmp_path, monkeypatch, server, come)
    assert [(kind, item["metadata"]["name"], deleted) for kind, item, deleted in taken] == [("Pod", "a", False), ("Pod", "b", True)]
    assert TOO_DEEP in json.dumps(taken[0][1]) and depth_of(taken[0][1]) <= 67
    assert taken[0][1]["apiVersion"] == "v1", "a watch of metadata says PartialObjectMetadata"


def test_kopf_lists_nothing_and_each_watch_that_begins_says_that_something_was_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = ApiServer()
    server.scripts = [500, [event("a")]]

    async def begun(seen: Seen) -> None:
        await names(seen, 1)
        await server.all_watched.wait()

    seen = watch(tmp_path, monkeypatch, server, begun)
    assert len(server.lists) == len(WATCHED) and {request.query["labelSelector"] for request in server.lists} == {watching.NOTHING}
    assert seen.missed == len(WATCHED) + 1, "a watch that fails may have missed something, too"
    assert seen.plurals == server.watches.keys()
    for plural, request in server.watches.items():
        one = KIND_OF[plural]
        assert ("PartialObjectMetadata" in request.headers["Accept"]) == one.metadata_only
        assert one.query.items() <= dict(request.query).items() and request.query["resourceVersion"] == "7"
