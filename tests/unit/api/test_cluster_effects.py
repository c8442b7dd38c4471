"""No key of a cluster file is read in vain: each changes the objects of a job, or is shown to people."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.api.files.clusterfile import parse_cluster_file
from lockstep.api.files.clusterkeys import PROFILE_KEYS
from lockstep.api.files.yamltext import dump_yaml
from lockstep.api.job import TrainingJob
from lockstep.plan.render.objects import render
from lockstep.plan.render.resolve import resolve
from support.cluster_file_cases import given, left_out, written

# What the command line alone shows: `lockstep deploy` the first, `lockstep cluster list` the second.
SHOWN = {"notes", "gpus.type"}

# What else must be said for a key to matter: RDMA's are for RDMA jobs, and a claim's size is for claims that are made.
RDMA = {"network.rdma.enabled": True, "security.ipc_lock": True, "gpus.per_node": 4}
CONTEXT: dict[str, dict[str, Any]] = {
    "network.mtu": RDMA,
    "storage.class_rwo": {"storage.mode": "volumeClaimTemplates"},
    "pod.volumes[].size": {"pod.volumes[].class": "c"},
    "network.tcp.interface_exclude": {"gpus.per_node": 4},
    "network.tcp.p2p_level": {"gpus.per_node": 4},
    "nccl.debug": {"gpus.per_node": 4},
    "pod.runtime_class": {"gpus.per_node": 4},
    "nccl.env[].name": {"gpus.per_node": 4},
    "nccl.env[].value": {"gpus.per_node": 4},
} | {key.file: RDMA for key in PROFILE_KEYS if key.file.startswith("network.rdma.") and key.file != "network.rdma.memlock"}


def objects(keys: dict[str, Any], **spec: Any) -> list[dict[str, Any]]:
    job = TrainingJob.model_validate({"metadata": {"name": "x"}, "spec": {"script": {"path": "a.py"}} | spec})
    return render(resolve(job, parse_cluster_file(dump_yaml(written({"image": "i"} | keys)), "c.yaml").profile))


ORDINARY = [
    key.file for key in PROFILE_KEYS if key.file not in SHOWN | {"network.rdma.enabled", "network.rdma.memlock", "security.ipc_lock"}
]


@pytest.mark.parametrize("key", ORDINARY)
def test_a_key_changes_the_objects_of_a_job(key: str) -> None:
    context = CONTEXT.get(key, {})
    assert objects(context | given(key)) != objects(context | left_out(key))


@pytest.mark.parametrize("key", sorted(SHOWN))
def test_a_key_that_is_for_people_changes_no_object(key: str) -> None:
    assert objects({"gpus.per_node": 4} | given(key)) == objects({"gpus.per_node": 4} | left_out(key))


def test_rdma_changes_the_objects_of_a_job() -> None:
    assert objects(RDMA) != objects(RDMA | {"network.rdma.enabled": False})


def test_memlock_and_ipc_lock_decide_between_them_how_memory_is_locked() -> None:
    unlimited = RDMA | {"security.ipc_lock": False, "network.rdma.memlock": "unlimited"}
    assert objects(RDMA) != objects(unlimited)
