"""What the API server sends is read whatever stands in one object: nothing deep, large or unknown stops a list, a watch or the process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from lockstep.api.objects import TOO_DEEP, Object
from lockstep.kube.cluster import Cluster, Unreachable
from lockstep.kube.kubeconfig import Server
from lockstep.kube.reading import cut_depths, loads
from lockstep.plan.observed import Observed
from lockstep.plan.reconcile.accept import accept
from lockstep.plan.render.objects import RenderContext
from lockstep.platforms.operator.memory.inventory import Inventory
from lockstep.platforms.operator.memory.objects import StoredObject

DEPTH_MAX = 64
PAGE_BYTES_MAX = 1 << 20
CONTENTS_MAX = 4
EVENTS_MAX = 500
LABELS_MAX = 64
OTHER_BYTES_MAX = 64 << 10
PACKED_BYTES_MAX = 32 << 10

KEY = ("ns", "x")


def deep(levels: int) -> str:
    return '{"a":' * levels + "1" + "}" * levels


def job(name: str = "x", version: int = 5, deepspeed: str = "{}") -> Object:
    metadata = f'{{"name":"{name}","namespace":"ns","uid":"u-{name}","resourceVersion":"{version}"}}'
    text = f'{{"metadata":{metadata},"spec":{{"training":{{"deepspeed":{deepspeed}}}}}}}'
    return loads(text.encode())


def depth_of(value: Any) -> int:
    levels, level = 0, [value]
    while level := [
        inner for outer in level if isinstance(outer, dict | list) for inner in (outer.values() if isinstance(outer, dict) else outer)
    ]:
        levels += 1
    return levels


@pytest.mark.parametrize("levels", [1500, 9000])
@pytest.mark.parametrize("shape", [deep, lambda n: "[" * n + "]" * n, lambda n: '{"a":[' * n + "1" + "]}" * n])
def test_text_of_any_depth_is_read_and_cut(levels: int, shape: Any) -> None:
    value = loads(f'{{"before":"a{{[\\"}}","deep":{shape(levels)},"after":[1]}}'.encode())
    assert (value["before"], value["after"]) == ('a{["}', [1])
    assert depth_of(value) <= DEPTH_MAX + 3
    json.dumps(value)


def test_what_is_not_too_deep_is_untouched() -> None:
    value = json.loads(deep(DEPTH_MAX))
    assert not cut_depths(value, DEPTH_MAX) and value == json.loads(deep(DEPTH_MAX))
    value = json.loads(deep(DEPTH_MAX + 1))
    assert cut_depths(value, DEPTH_MAX) and TOO_DEEP in json.dumps(value)


class Reply:
    """A response with a body, as aiohttp's."""

    status = 200

    def __init__(self, body: bytes) -> None:
        self.body, self.headers, self.closed, self.sent_bytes = body, {}, False, 0

    @property
    def content(self) -> Reply:
        return self

    async def __aenter__(self) -> Reply:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    async def iter_chunked(self, size: int) -> AsyncIterator[bytes]:
        for begin in range(0, len(self.body), size):
            if self.closed:
                return
            self.sent_bytes += len(self.body[begin : begin + size])
            yield self.body[begin : begin + size]

    async def read(self) -> bytes:
        return self.body

    def close(self) -> None:
        self.closed = True


class Listing:
    """An API server that lists objects by pages."""

    def __init__(self, items: list[str], version: int = 7) -> None:
        self.server = Server("https://cluster")
        self.items, self.version = items, version
        self.limits: list[int] = []
        self.replies: list[Reply] = []
        self.headers: dict[str, str] = {}
        self.accepted: list[str] = []
        self.watch = b""

    async def request(self, method: str, url: str, *more: Any, **named: Any) -> Reply:
        query = {name: values[0] for name, values in parse_qs(urlsplit(url).query).items()}
        headers = named["headers"] if named else more[1]
        self.accepted.append(headers.get("Accept", ""))
        if "watch" in query:
            return self._reply(self.watch)
        begin, limit = int(query.get("continue", 0)), int(query["limit"])
        self.limits.append(limit)
        end = begin + limit
        token = f'"continue":"{end}",' if end < len(self.items) else ""
        return self._reply(
            f'{{"metadata":{{{token}"resourceVersion":"{self.version}"}},"items":[{",".join(self.items[begin:end])}]}}'.encode()
        )

    def _reply(self, body: bytes) -> Reply:
        self.replies.append(Reply(body))
        return self.replies[-1]


def text_of(name: str, padding: int = 0, deepspeed: str = "{}") -> str:
    item = {"metadata": {"name": name, "namespace": "ns", "uid": f"u-{name}", "resourceVersion": "5"}, "spec": {"script": "x" * padding}}
    return json.dumps(item)[:-2] + f',"deepspeed":{deepspeed}}}}}'


async def listed(cluster: Cluster, **how: Any) -> list[str]:
    return [item["metadata"]["name"] async for page in cluster.pages("TrainingJob", **how) for item in page["items"]]


def test_a_list_with_an_object_that_is_too_deep_has_all_the_others() -> None:
    cluster = Cluster(Listing([text_of("a"), text_of("deep", deepspeed=deep(1500)), text_of("b")]))
    assert asyncio.run(listed(cluster)) == ["a", "deep", "b"]


def test_pages_of_large_objects_are_small_and_those_of_small_ones_large_again() -> None:
    size = PAGE_BYTES_MAX // 3
    server = Listing([text_of(f"large-{number}", size) for number in range(12)] + [text_of(f"small-{number}") for number in range(500)])
    names = asyncio.run(listed(Cluster(server), limit=100, bounded=True))
    assert len(names) == len(set(names)) == 512
    assert min(server.limits) <= 2
    assert server.limits[-1] == 100
    assert all(reply.closed for reply in server.replies if len(reply.body) > 2 * PAGE_BYTES_MAX)


def test_several_objects_come_in_pages_of_at_most_a_mebibyte_and_of_a_larger_page_little_more_is_read() -> None:
    mebibyte = 1 << 20
    server = Listing([text_of(f"large-{number}", 400 << 10) for number in range(8)])
    asyncio.run(listed(Cluster(server), limit=100, bounded=True))
    refused = [reply for reply in server.replies if reply.closed]
    assert len(refused) == 3 and max(len(reply.body) for reply in server.replies if not reply.closed) <= mebibyte
    assert all(mebibyte < reply.sent_bytes <= mebibyte + mebibyte // 4 for reply in refused)


def test_one_object_is_read_however_large_it_is() -> None:
    server = Listing([text_of("huge", 2 * PAGE_BYTES_MAX), text_of("b")])
    assert asyncio.run(listed(Cluster(server), limit=100, bounded=True)) == ["huge", "b"]


def test_a_reply_that_is_no_json_is_a_server_that_can_t_be_reached() -> None:
    server = Listing(["<html>"])
    with pytest.raises(Unreachable, match="not JSON"):
        asyncio.run(listed(Cluster(server)))


def test_an_empty_list_of_metadata_has_no_items() -> None:
    """It says `"items":null`."""
    server = Listing([])
    server._reply = lambda body: Reply(b'{"metadata":{"resourceVersion":"7"},"items":null}')  # type: ignore[method-assign]
    assert asyncio.run(listed(Cluster(server), metadata_only=True)) == []


@pytest.mark.parametrize("levels", [DEPTH_MAX, 900, 1500, 9000])
def test_a_job_that_is_too_deep_says_so_of_itself(levels: int) -> None:
    inventory = Inventory()
    inventory.observe("TrainingJob", job(deepspeed=deep(levels)), deleted=False)
    refusal = accept(inventory.observed(KEY) or pytest.fail("no job"), RenderContext())
    assert "nested deeper than 64 levels" in refusal.message  # type: ignore[union-attr]


@pytest.mark.parametrize("content", ["x" * (1 << 20), [{}] * 300_000])
def test_a_job_that_is_too_large_says_so_of_itself_and_little_of_it_is_kept(content: Any) -> None:
    item = job()
    item["spec"] |= {"suspend": True, "env": content}
    kept = StoredObject("TrainingJob", item)
    assert kept.item["spec"]["suspend"] is True and len(json.dumps(kept.item)) < 4096
    refusal = accept(Observed(kept.item), RenderContext())
    assert "make it smaller" in refusal.message  # type: ignore[union-attr]


def test_a_profile_that_is_too_deep_is_refused_by_its_name() -> None:
    profile = {"metadata": {"name": "p", "uid": "p", "resourceVersion": "1"}, "spec": json.loads(deep(100))}
    observed = Observed(
        {**job(), "apiVersion": "lockstep.dev/v1alpha1", "spec": {"cluster": "p", "script": {"path": "x.py"}}},
        profiles=(StoredObject("TrainingCluster", profile).item,),
    )
    observed.job["kind"] = "TrainingJob"
    assert "TrainingCluster p can't be used: it has a field" in accept(observed, RenderContext()).message  # type: ignore[union-attr]


def test_what_others_write_into_metadata_is_not_kept() -> None:
    item = job()
    item["metadata"] |= {
        "managedFields": [{"fieldsV1": "x" * 10**6}], "finalizers": ["x"] * 1000,
            "labels": {f"l{number}": "x" for number in range(LABELS_MAX + 1)},
        "annotations": {"kubectl.kubernetes.io/last-applied-configuration": "x" * 200_000, "lockstep.dev/is-default-cluster": "true"},
        "ownerReferences": [{"uid": str(number), "kind": "Pod", "name": "x"} for number in range(1000)], "deletionTimestamp": "t",
    }  # fmt: skip
    item["metadata"]["labels"]["lockstep.dev/job"] = "x"
    metadata = StoredObject("TrainingJob", item).item["metadata"]
    assert metadata["annotations"] == {"lockstep.dev/is-default-cluster": "true"} and metadata["labels"] == {"lockstep.dev/job": "x"}
    assert len(metadata["finalizers"]) == 4 and len(metadata["ownerReferences"]) == 8
    assert len(json.dumps(metadata)) < 4096


@pytest.mark.parametrize("kind", ["Pod", "Node", "PersistentVolumeClaim", "Service", "NetworkPolicy", "StatefulSet", "Event"])
def test_little_is_kept_of_any_large_object(kind: str) -> None:
    noise = "".join(map(chr, range(0x4E00, 0x9FA5))) * 20
    item = {
        **job("y"),
        "spec": {"replicas": 3, "nodeName": "n", "noise": [noise], "affinity": {"a": noise}},
        "status": {"phase": "Running", "noise": noise},
    }
    item |= {"message": noise, "reason": "FailedCreate", "involvedObject": {"kind": "Pod", "name": noise}}
    kept = StoredObject(kind, item)
    assert len(json.dumps(kept.item, ensure_ascii=False)) <= OTHER_BYTES_MAX
    if kind == "StatefulSet":
        assert kept.item["spec"]["replicas"] == 3 and kept.is_cut


def test_events_of_a_namespace_are_bounded_and_the_newest_stay() -> None:
    inventory = Inventory()
    inventory.observe("TrainingJob", job(), deleted=False)
    for number in range(3 * EVENTS_MAX):
        metadata = {"name": f"e{number}", "namespace": "ns", "uid": f"e{number}", "resourceVersion": str(number + 10)}
        inventory.observe("Event", {"metadata": metadata, "reason": "FailedCreate", "involvedObject": {}}, deleted=False)
    events = (inventory.observed(KEY) or pytest.fail("no job")).warnings
    assert len(events) <= EVENTS_MAX
    assert f"e{3 * EVENTS_MAX - 1}" in {event["metadata"]["name"] for event in events}


def test_an_object_that_can_t_be_taken_in_is_skipped() -> None:
    inventory = Inventory()
    inventory.begin_lists()
    broken = {"metadata": {"name": "broken", "namespace": "ns"}, "spec": None}
    inventory.take_in("TrainingJob", [broken, job()])
    assert inventory.jobs() == [KEY]


def owned(kind: str, name: str, uid: str = "u-x", **content: Any) -> Object:
    owner = {"kind": "TrainingJob", "name": "x", "uid": uid, "controller": True}
    metadata = {
        "name": name,
        "namespace": "ns",
        "uid": f"{kind}-{name}",
        "resourceVersion": "9",
        "labels": {"lockstep.dev/job": "x"},
        "ownerReferences": [owner],
    }
    return {"kind": kind, "metadata": metadata, **content}


def test_only_what_a_decision_needs_is_read_again() -> None:
    inventory = Inventory()
    inventory.observe("TrainingJob", job(), deleted=False)
    pod = owned("Pod", "x-0", spec={}, status={})
    pod["metadata"]["annotations"] = {"lockstep.dev/run-hash": "abc"}
    inventory.observe("Pod", pod, deleted=False)
    runs = [owned("ConfigMap", f"x-run-{number}") for number in range(100)]
    for item in (*runs, owned("ConfigMap", "x-run-abc"), owned("ConfigMap", "x-run-of-another", uid="another"), owned("ConfigMap", "any")):
        inventory.observe("ConfigMap", item, deleted=False)
    asked = inventory.to_read(KEY)
    assert asked[0] == ("ConfigMap", "x-run-abc") and len(asked) == CONTENTS_MAX
    assert not {("ConfigMap", "any"), ("ConfigMap", "x-run-of-another")} & set(asked)
    inventory.observe("ConfigMap", owned("ConfigMap", "x-run-abc", data={"run.json": "{}"}), deleted=False)
    assert ("ConfigMap", "x-run-abc") not in inventory.to_read(KEY)
    inventory.observe("ConfigMap", owned("ConfigMap", "x-run-abc"), deleted=False)  # the same version, by a watch of metadata
    assert (inventory.observed(KEY) or pytest.fail("no job")).objects["ConfigMap", "x-run-abc"]["data"] == {"run.json": "{}"}


def test_a_frozen_run_that_is_too_large_to_keep_is_read_each_time() -> None:
    import random

    noise = "".join(random.Random(1).choices("abcdefghijklmnopqrstuvwxyz0123456789", k=4 * PACKED_BYTES_MAX))  # noqa: S311
    kept = StoredObject("ConfigMap", owned("ConfigMap", "x-run-abc", data={"run.json": noise}))
    assert kept.is_cut and "data" not in kept.item


async def test_an_event_of_a_watch_without_an_end_is_read_no_further_than_sixteen_mebibytes() -> None:
    taken: list[int] = []

    class Endless(Reply):
        async def iter_any(self) -> AsyncIterator[bytes]:
            while len(taken) < 40:
                taken.append(1)
                yield b"x" * (1 << 20)

    server = Listing([])
    server._reply = lambda body: Endless(b"")  # type: ignore[method-assign]
    with pytest.raises(Unreachable, match="not JSON"):
        async for _ in Cluster(server).watch("Pod", "ns", {}):
            pass
    assert len(taken) == 17
