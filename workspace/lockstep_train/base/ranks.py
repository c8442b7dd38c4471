"""The process group: gloo between CPUs, NCCL between GPUs, and a small store for what must not be a collective."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import DistStoreError, PrefixStore, TCPStore, distributed_c10d  # type: ignore[attr-defined]

from lockstep_spec.choices import Timeouts
from lockstep_spec.handshake import mac
from lockstep_train.base.errors import (
    TRIED_AGAIN,
    ConfigError,
    OutOfMemoryError,
    Problem,
    TrainerError,
    first_line,
    gravest,
    lasts_on_this_device,
    out_of_memory,
    problem_of,
)
from lockstep_train.base.runfile import SECRET_FILE, RankEnvironment
from lockstep_train.base.store import SignedStore, Store

PATIENCE = timedelta(seconds=30)
"""Time limit of one question to the store, in a wait that has no end of its own."""
REFUSED_PATIENCE = timedelta(seconds=10)
"""Wait of rank 0 for the others to have met the same refusal."""
BACKLOG = 2048
"""Connections that wait to be taken, as TCPStore has it: all ranks come at once."""


@dataclass(frozen=True)
class Ranks:
    """Position of this rank among the others. `store` is TCP key-value storage beside the collectives: it can't deadlock them."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node: int
    nodes: int
    device: torch.device
    store: Store
    secret: bytes = b""
    """Secret of this attempt's ranks (`_secret`)."""

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def first_of_node(self) -> bool:
        return self.local_rank == 0

    def gather(self, key: str, value: Any) -> list[Any] | None:
        """Every rank's JSON value, in rank order, on rank 0; None elsewhere. `key` is used once."""
        self.store.set(f"{key}/{self.rank}", json.dumps(value))
        if not self.first:
            return None
        return [json.loads(self.store.get(f"{key}/{rank}")) for rank in range(self.world_size)]

    def wait_for(self, key: str) -> None:
        """Wait for a key of the store for as long as it takes: a rank that dies ends all, which is the agent's to see."""
        while True:
            try:
                self.store.wait([key], PATIENCE)
                return
            except DistStoreError:
                continue

    def publish(self, key: str, value: Any = None) -> Any:
        """Rank 0's JSON value on every rank. `key` is used once."""
        if self.first:
            self.store.set(key, json.dumps(value))
            return value
        return json.loads(self.store.get(key))

    def decide(self, key: str, choose: Callable[[], Any]) -> Any:
        """Choose a JSON value on rank 0, for as long as that takes, and return it on every rank. `key` is used once.

        Raises, on all of them alike, the TrainerError that rank 0 has met.
        """
        if self.first:
            self.store.set(key, json.dumps(attempted(choose)))
        self.wait_for(key)
        return results([json.loads(self.store.get(key))])[0]


def attempted(work: Callable[[], Any]) -> dict[str, Any]:
    """Outcome of `work` as JSON: its result, which is JSON, too, or the problem that prevented one."""
    try:
        return {"result": work()}
    except TrainerError as error:
        return {"problem": problem_of(error)}


def results(outcomes: Sequence[dict[str, Any]]) -> list[Any]:
    """Results of all outcomes. Raises the gravest problem, one that is final before others."""
    problem = gravest(Problem(*outcome["problem"]) for outcome in outcomes if "problem" in outcome)
    if problem is not None:
        raise problem.error()
    return [outcome["result"] for outcome in outcomes]


def join(environment: RankEnvironment, timeout_seconds: int = Timeouts.collective_seconds) -> Ranks:
    """Meet the other ranks at MASTER_ADDR:MASTER_PORT. `timeout_seconds`: how long a collective waits for the others.

    Raises ConfigError where the node holds GPUs that this image can never use, TrainerError where they can't be used now.
    """
    timeout = timedelta(seconds=timeout_seconds)
    cuda = torch.cuda.is_available()
    if environment.gpus_per_node > 0 and not cuda:
        raise _unusable_gpus(environment.gpus_per_node)
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if cuda else "cpu")
    for name, value in (("RANK", environment.rank), ("WORLD_SIZE", environment.world_size), ("LOCAL_RANK", environment.local_rank)):
        os.environ.setdefault(name, str(value))  # DeepSpeed reads them even for a lone process
    device = torch.device("cuda", environment.local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    _set_default_timeout(timeout)
    listening = _listening(environment.master_address, environment.master_port) if environment.rank == 0 else None
    store = TCPStore(
        environment.master_address,
        environment.master_port,
        environment.world_size,
        is_master=environment.rank == 0,
        timeout=timeout,
        master_listen_fd=listening,
    )
    secret = _secret(environment, store)
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        store=PrefixStore("collectives", store),
        rank=environment.rank,
        world_size=environment.world_size,
        timeout=timeout,
    )
    return Ranks(
        rank=environment.rank,
        world_size=environment.world_size,
        local_rank=environment.local_rank,
        local_world_size=environment.local_world_size,
        node=environment.node,
        nodes=environment.nodes,
        device=device,
        store=SignedStore(PrefixStore("lockstep", store), secret, timeout),
        secret=secret,
    )


def _secret(environment: RankEnvironment, store: Store) -> bytes:
    """Secret of this attempt's ranks, derived from the agent's file. Without an agent of Lockstep, rank 0 draws one, which whoever reaches
    the store can read.
    """
    if environment.secret_file is None:
        if environment.rank == 0:
            store.set("lockstep/secret", secrets.token_hex(32))
        return bytes.fromhex(store.get("lockstep/secret").decode())
    try:
        content = Path(environment.secret_file).read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise TrainerError(f"the secret of the run's ranks can't be read ({SECRET_FILE}={environment.secret_file}): {error}") from error
    return bytes.fromhex(mac(content.encode(), f"attempt {environment.attempt}".encode()))


def _listening(address: str, port: int) -> int | None:
    """Listen for the store at the address by which the others know this node: TCPStore's own listens on all interfaces, rails included.

    None where that address isn't this node's own, or the port is taken: TCPStore then says what is wrong.
    """
    if port == 0:  # a lone process: TCPStore chooses
        return None
    try:
        places = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError:
        return None
    for family, kind, protocol, _, place in places:
        store = socket.socket(family, kind, protocol)
        try:
            store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            store.bind(place)
            store.listen(BACKLOG)
        except OSError:
            store.close()
        else:
            return store.detach()
    return None


def _set_default_timeout(timeout: timedelta) -> None:
    """Set the time limit of groups that are made without one, as DeepSpeed makes all of its own: torch reads these names whenever it makes
    a group.
    """
    distributed_c10d.default_pg_timeout = timeout
    distributed_c10d.default_pg_nccl_timeout = timeout  # type: ignore[attr-defined]


def _unusable_gpus(gpus: int) -> TrainerError:
    """Error to raise: training on CPUs would hold the GPUs for nothing, and say so nowhere.

    Only an image that doesn't fit the driver ends the job. GPUs may still be starting, be busy or be lost to this pod alone.
    """
    found_gpus = f"this node holds {gpus} GPUs (GPUS_PER_NODE), but torch {torch.__version__}"
    if torch.version.cuda is None:
        return ConfigError(
            f"{found_gpus} of this image is built without CUDA; use an image whose torch is built with it, or set gpusPerNode to 0"
        )
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        reason = "torch.cuda.is_available() is False"
    except Exception as error:  # whatever torch raises: it is reported
        reason = first_line(error)
    unusable = f"{found_gpus} can't use them: {reason}"
    if out_of_memory(reason):
        return OutOfMemoryError(f"{unusable}; run nvidia-smi on the node to see which process holds their memory")
    if lasts_on_this_device(reason):
        needs = f"CUDA {torch.version.cuda} needs a driver that is new enough (nvidia-smi on the node)"
        return ConfigError(f"{unusable}; {needs}; or use an image with an older CUDA, or set gpusPerNode to 0")
    needs = "the GPUs must be visible in the pod and ready (nvidia-smi in it; with NVSwitch also nvidia-fabricmanager on the node)"
    return TrainerError(f"{unusable}; {needs}; {TRIED_AGAIN}")


def vote(asks: bool, ranks: Ranks) -> bool:
    """Return True, on all ranks alike, if any rank asks."""
    asking = torch.tensor(float(asks), device=ranks.device)
    dist.all_reduce(asking, op=dist.ReduceOp.MAX)
    return bool(asking.item())


def leave(all_arrived: Callable[[], None] = lambda: None) -> None:
    """Tear the group down after everyone has arrived: a rank that just exits can abort its peers while they clean up.

    `all_arrived` is called once they have: from then on rank 0, and the store with it, may be gone at any moment.
    """
    dist.barrier()
    all_arrived()
    dist.destroy_process_group()


@contextlib.contextmanager
def refused_together(ranks: Ranks, key: str) -> Iterator[None]:
    """Let all ranks end by a TrainerError that each of them raises, and none by the loss of its peers. Rank 0 has the store: it goes last,
    when the others have read from it.
    """
    try:
        yield
    except TrainerError:
        with contextlib.suppress(dist.DistStoreError, dist.DistNetworkError):
            ranks.store.set(f"{key}/refused/{ranks.rank}", "1")
            if ranks.first:
                ranks.store.wait([f"{key}/refused/{rank}" for rank in range(ranks.world_size)], REFUSED_PATIENCE)
        raise
