"""Inputs, and the volume that ranks save to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from lockstep_gang.contract.preflight import Finding, Kind, PathFact, VolumeFacts
from lockstep_gang.lifecycle.preflight.findings import Nodes, error, shown_bytes, warning, where
from lockstep_spec.choices import StorageMode

FREE_BYTES_FLOOR = 256 * 1024**2
"""Below it nothing can be recorded any more."""
CHECKPOINT_BYTES_UNKNOWN = 1024**3
"""Room that should be there while no checkpoint tells what one needs."""
_SHM_SHARE = 0.95  # a tmpfs is rounded to pages


def paths(nodes: Nodes) -> Iterator[Finding]:
    expected = nodes.run.preflight.paths if nodes.run.preflight is not None else ()
    for node, looked in nodes.looked.items():
        facts = {fact.path: fact for fact in looked.paths}
        for item in expected:
            fact = facts.get(item.path, PathFact(item.path, error="it was not looked at"))
            kinds = [item.kind, Kind.FOLDER] if item.or_folder else [item.kind]
            seen = _path_problem(fact, [kind.value for kind in kinds])
            if seen and "paths" not in looked.unfinished:
                message = f"{item.field}: {seen} {item.path} on {where(nodes.run, node)}"
                fix = "put it there, or correct the path" if not fact.error else "look at the volume and at the file's rights"
                yield replace(error("paths", node, message, fix), final=not fact.error)


def _path_problem(fact: PathFact, kinds: Sequence[str]) -> str:
    if fact.error:
        return f"{fact.error}:"
    return "" if fact.found in kinds else f"there is no {' or '.join(kinds).lower()}"


def writable(nodes: Nodes) -> Iterator[Finding]:
    for node, volume in _volumes(nodes):
        if volume.error:
            message = f"{where(nodes.run, node)} can't write in {nodes.run.run_dir}: {volume.error}"
            yield error("writable", node, message, "look at the volume: is it full, read-only, or another user's?")


def shared(nodes: Nodes) -> Iterator[Finding]:
    claimed = nodes.run.storage is StorageMode.SHARED
    if nodes.looked[0].volume is None or nodes.looked[0].volume.error:
        return  # then nobody can see what node 0 wrote
    for node, met in nodes.met.items():
        if met.sees_marker is None or met.sees_marker is claimed:
            continue
        run_dir, name = nodes.run.run_dir, where(nodes.run, node)
        if claimed:
            message = f"{name} does not see what node 0 writes to {run_dir}, though storage is Shared"
            fix = "use a ReadWriteMany claim that all nodes mount, or set storage.mode to PerPod"
        else:
            message = f"{name} sees what node 0 writes to {run_dir}, though storage is PerPod"
            fix = "give every pod a volume of its own, or set storage.mode to Shared"
        yield replace(error("shared", node, message, fix), final=True)


def space(nodes: Nodes) -> Iterator[Finding]:
    for node, volume in _volumes(nodes):
        if volume.error or (node and nodes.run.storage is StorageMode.SHARED):
            continue  # one volume, told once
        free, needed = volume.free_bytes, volume.checkpoint_bytes or CHECKPOINT_BYTES_UNKNOWN
        message = f"{shown_bytes(free)} are free in {nodes.run.run_dir} on {where(nodes.run, node)}"
        if free < FREE_BYTES_FLOOR:
            yield error(
                "space", node, f"{message}, at least {shown_bytes(FREE_BYTES_FLOOR)} are needed", "delete what is no longer needed there"
            )
        elif free < needed:
            known = "the newest checkpoint has" if volume.checkpoint_bytes else "a checkpoint may need"
            yield warning(
                "space", node, f"{message}, {known} {shown_bytes(needed)}", "make room, or saves will fail and the job run on without"
            )


def _volumes(nodes: Nodes) -> Iterator[tuple[int, VolumeFacts]]:
    return ((node, looked.volume) for node, looked in nodes.looked.items() if looked.volume is not None)


def shared_memory(nodes: Nodes) -> Iterator[Finding]:
    asked = nodes.run.preflight.shm_bytes if nodes.run.preflight is not None else None
    for node, looked in nodes.looked.items():
        if asked is not None and looked.shm_bytes is not None and looked.shm_bytes < asked * _SHM_SHARE:
            message = f"shared memory (/dev/shm) has {shown_bytes(looked.shm_bytes)} on {where(nodes.run, node)}, the cluster asks for {shown_bytes(asked)}"
            yield warning(
                "sharedMemory", node, message, "raise the pods' memory limit or the cluster's shm_size: NCCL and data loaders end by SIGBUS"
            )
