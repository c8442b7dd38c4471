"""Objects that anybody with the role `edit` can make: too deep, too large, too many. A real API server has them, and the operator serves the other jobs.

The process's memory is limited, too: its pod has 512 MiB, and an operator that is killed for memory at each list never leads.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client

from cluster_jobs import Jobs, prepare
from lockstep.api.names import job_labels
from lockstep.plan.observed import DEPTH_MAX
from operator_faults import Rig, rig_in
from played_job import PlayedJob

MEMORY_MAX_BYTES = 256 << 20
LARGE = 1_000_000
_rng = random.Random(12)  # noqa: S311 (no secret)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with rig_in(tmp_path_factory.mktemp("hostile")) as found:
        yield found


NOISE = tuple(map(chr, range(0x20000, 0x2A6D0)))
"""Of four bytes each: what the API limits by characters has four times as many bytes."""


def noise(characters: int) -> str:
    """Text that no compression makes small."""
    return "".join(_rng.choices(NOISE, k=characters))


def training_job(name: str, **spec: Any) -> dict[str, Any]:
    metadata = {"name": name, "labels": {"team": "hostile"}}
    return {"apiVersion": "lockstep.dev/v1alpha1", "kind": "TrainingJob", "metadata": metadata, "spec": {"nodes": 1, **spec}}


def deep_job(name: str, levels: int, shape: tuple[str, str] = ('{"a":', "}")) -> str:
    training = {"model": {"name": "/workspace/model"}, "data": {"path": "/datasets/x.jsonl"}, "deepspeed": {"z": "DEEP"}}
    text = json.dumps(training_job(name, training=training))
    return text.replace('"DEEP"', shape[0] * levels + "1" + shape[1] * levels)


def large_job(name: str) -> str:
    """As large as its CRD lets it be: 120 kB of characters of four bytes in each of two fields."""
    env = [{"name": f"V{number}", "value": noise(8000)} for number in range(15)]
    return json.dumps(training_job(name, script={"path": "/x.py", "args": [noise(4000) for _ in range(30)]}, env=env, suspend=True))


def dense_job(name: str) -> str:
    """Whose text is small beside what it takes as Python objects."""
    training = {"model": {"name": "/workspace/model"}, "data": {"path": "/datasets/x.jsonl"}, "deepspeed": {"z": "DENSE"}}
    return json.dumps(training_job(name, training=training)).replace('"DENSE"', "[" + ",".join(["{}"] * (LARGE // 3)) + "]")


def labelled(kind: str, name: str, **content: Any) -> str:
    version = {"ConfigMap": "v1", "Service": "v1", "Pod": "v1"}[kind]
    return json.dumps({"apiVersion": version, "kind": kind, "metadata": {"name": name, "labels": job_labels("x")}, **content})


def event(name: str, namespace: str) -> str:
    about = {"kind": "StatefulSet", "name": "x", "namespace": namespace, "uid": "u"}
    body = {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": name},
        "involvedObject": about,
        "type": "Warning",
        "reason": "FailedCreate",
    }
    return json.dumps({**body, "message": noise(LARGE // 4)})


PATHS = {
    "TrainingJob": "/apis/lockstep.dev/v1alpha1/namespaces/{}/trainingjobs", "ConfigMap": "/api/v1/namespaces/{}/configmaps",
    "Event": "/api/v1/namespaces/{}/events", "ServiceAccount": "/api/v1/namespaces/{}/serviceaccounts",
}  # fmt: skip


def send(api: client.ApiClient, path: str, text: str) -> None:
    """As text: the client's own JSON is not for such depths."""
    url, headers = api.configuration.host + path, {"Content-Type": "application/json", "Accept": "application/json"}
    api.update_params_for_auth(headers, [], ["BearerToken"], url, "POST", None)
    api.rest_client.pool_manager.connection_pool_kw["maxsize"] = 8
    reply = api.rest_client.pool_manager.request("POST", url, body=text.encode(), headers=headers)
    assert reply.status == 201, reply.data[:500]


def make(rig: Rig, namespace: str, kind: str, texts: Iterator[str]) -> None:
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda text: send(rig.api.client, PATHS[kind].format(namespace), text), texts))


def peak_bytes(rig: Rig) -> int:
    """Of the operator's process, all that it ever had in memory."""
    text = Path(f"/proc/{rig.operator.pid}/status").read_text()
    return int(next(line.split()[1] for line in text.splitlines() if line.startswith("VmHWM:"))) << 10


def served(job: PlayedJob) -> None:
    job.fail_and_start_again()
    job.until("another job is served", job.runs)


@pytest.fixture
def hostile(rig: Rig) -> Iterator[Jobs]:
    core = client.CoreV1Api(rig.api.client)
    namespace = core.create_namespace({"metadata": {"generateName": "lockstep-hostile-"}}).metadata.name
    yield prepare(rig.api, namespace)
    core.delete_namespace(namespace)


def survives(rig: Rig, make_them: Callable[[], None]) -> int:
    """Make them beside a job that runs: it is served by the operator that watches, and by the next one, which lists. The memory of both at most."""
    with rig.job() as job:
        job.create()
        job.until("running", job.runs)
        starts, peaks = rig.operator.starts, []
        make_them()
        served(job)
        peaks.append(peak_bytes(rig))
        rig.operator.start()
        served(job)
        job.fail_and_start_again()
        job.until("served after a while, too", job.runs)
        peaks.append(peak_bytes(rig))
        assert rig.operator.starts == starts + 1, "the operator ended by itself"
    print(f"peak memory {max(peaks) / 2**20:.0f} MiB")
    return max(peaks)


def test_a_job_of_any_depth_says_so_of_itself_and_all_others_are_served(rig: Rig, hostile: Jobs) -> None:
    depths = {"deep-90": 90, "deep-900": 900, "deep-1500": 1500, "deep-4500": 4500}
    texts = [deep_job(name, levels) for name, levels in depths.items()] + [deep_job("lists-3000", 3000, ("[", "]"))]
    survives(rig, lambda: make(rig, hostile.namespace, "TrainingJob", iter(texts)))
    with rig.job() as job:
        for name in (*depths, "lists-3000"):
            told = job.until(f"{name} says so", lambda name=name: accepted(rig, hostile.namespace, name))
            assert f"nested deeper than {DEPTH_MAX} levels" in told


def accepted(rig: Rig, namespace: str, name: str) -> str:
    """The message of condition Accepted, where that is False; by a table, since Python can't read the object."""
    api = rig.api.client
    url = f"{api.configuration.host}{PATHS['TrainingJob'].format(namespace)}/{name}/status"
    headers: dict[str, str] = {}
    api.update_params_for_auth(headers, [], ["BearerToken"], url, "GET", None)
    text = api.rest_client.pool_manager.request("GET", url, headers=headers).data.decode()
    _, found, rest = text.partition('"message":"the job can\'t be used: ')
    return rest.partition('"')[0] if found else ""


def test_large_jobs_configmaps_and_events_take_little_memory(rig: Rig, hostile: Jobs) -> None:
    assert survives(rig, lambda: fill(rig, hostile.namespace, jobs=20, config_maps=30)) < MEMORY_MAX_BYTES


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_hundreds_of_them_take_little_memory_too(rig: Rig, hostile: Jobs) -> None:
    assert survives(rig, lambda: fill(rig, hostile.namespace, jobs=200, config_maps=300)) < MEMORY_MAX_BYTES


def fill(rig: Rig, namespace: str, jobs: int, config_maps: int) -> None:
    make(rig, namespace, "TrainingJob", (large_job(f"large-{number}") for number in range(jobs)))
    make(rig, namespace, "TrainingJob", (dense_job(f"dense-{number}") for number in range(jobs // 10)))
    text = noise(LARGE // 4)
    make(rig, namespace, "ConfigMap", (labelled("ConfigMap", f"large-{number}", data={"a": text}) for number in range(config_maps)))
    make(rig, namespace, "Event", (event(f"large-{number}", namespace) for number in range(config_maps // 3)))
