"""An API server of plain dicts, for what talks to `Cluster`: it keeps what it is given, and says what a test tells it to."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, cast

from lockstep.kube.cluster import ApiError, Cluster

Object = dict[str, Any]


class FakeCluster:
    """`on_create` may raise, or give a new object its status, as controllers would."""

    namespace = "ns"

    def __init__(self, *objects: Object, on_create: Callable[[Object], None] = lambda item: None) -> None:
        self.objects = {(item["kind"], item["metadata"]["name"]): item for item in objects}
        self.on_create = on_create
        self.on_watch: Callable[[], Awaitable[Object]] | None = None
        self.refused: dict[str, ApiError] = {}
        """kind → what reading it is refused with."""

    @property
    def as_cluster(self) -> Cluster:
        return cast(Cluster, self)

    def names(self, kind: str) -> list[str]:
        return sorted(name for found, name in self.objects if found == kind)

    async def get(self, kind: str, namespace: str | None, name: str) -> Object | None:
        if kind in self.refused:
            raise self.refused[kind]
        return self.objects.get((kind, name))

    async def exists(self, kind: str, namespace: str | None, name: str) -> bool:
        return await self.get(kind, namespace, name) is not None

    async def list(self, kind: str, namespace: str | None = None, query: Mapping[str, str] | None = None) -> Object:
        if kind in self.refused:
            raise self.refused[kind]
        name, _, value = (query or {}).get("labelSelector", "").partition("=")
        items = [item for (found, _), item in self.objects.items() if found == kind]
        return {"items": [i for i in items if not name or (i["metadata"].get("labels") or {}).get(name) == value]}

    async def try_out(self, item: Object, *, apply: bool = False) -> tuple[Object, list[str]]:
        return item, []

    async def create(self, item: Object) -> Object:
        item["metadata"].setdefault("uid", f"uid-of-{item['metadata']['name']}")
        item.setdefault("status", {})
        self.on_create(item)
        self.objects[item["kind"], item["metadata"]["name"]] = item
        return item

    async def delete(self, kind: str, namespace: str | None, name: str, uid: str | None = None, grace_seconds: int | None = None) -> None:
        self.objects.pop((kind, name), None)

    async def watch(self, kind: str, namespace: str | None, query: Mapping[str, str]) -> AsyncIterator[Object]:
        """Ends at once, as where it is refused, unless `on_watch` says what happens then."""
        if self.on_watch is not None:
            yield await self.on_watch()

    async def log(self, namespace: str, pod: str, container: str, query: Mapping[str, str]) -> AsyncIterator[str]:
        for line in ():
            yield line
