"""The environment of a rank: torchrun's variables, so that any script written for torchrun runs unchanged; and what of it the agent itself
has.
"""

from __future__ import annotations

import os
import pkgutil
import sys
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from lockstep_gang.contract.messages import Start
from lockstep_gang.contract.run import Run
from lockstep_machine.limits import usable_cores

_AGENTS = frozenset({"PATH", "HOME", "USER", "LOGNAME", "HOSTNAME", "TMPDIR", "TZ", "LANG", "LANGUAGE"})
_AGENTS_PREFIXES = ("LOCKSTEP_", "LC_")
_given: dict[str, str] = {}


def isolate(environment: MutableMapping[str, str] = os.environ) -> None:
    """Leave this process only the variables that the agent may have: all others are the ranks' (`inherited`).

    A job's SSL_CERT_FILE, OPENSSL_CONF or proxy is meant for its ranks, and would break the agent's reports. What the interpreter and the
    dynamic loader read before comes from nobody else: agents run with `python3 -I`, and a job's LD_* is in run.json.
    """
    _given.update(environment)
    for name in _given.keys() - _AGENTS:
        if not name.startswith(_AGENTS_PREFIXES):
            del environment[name]


def inherited() -> dict[str, str]:
    """The container's variables, as ranks and whatever runs in their place get them."""
    return {**_given, **os.environ}


ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Names under which PyTorch reads the settings of its allocator: of all devices, since 2.9; the older ones go on to be read. Stage3 gathers
tensors of ever other sizes, and segments that can't grow leave holes between them.
"""


THREADS, DEFAULT_THREADS = "OMP_NUM_THREADS", "LOCKSTEP_DEFAULT_THREADS"
"""Threads of a rank, and, where no one states them, the same number: by it the trainer knows that they are a part of the cores."""


SECRET = "secret"  # noqa: S105 (a file's name)
"""Name of the file with the secret of the run's ranks, in the agent's own folder."""


@dataclass(frozen=True)
class RankPlace:
    """Place of a rank on this node, and the files that it and its agent share."""

    node: int
    """Number of the node, which is its pod's."""
    group_rank: int
    """Position of the node in the order of ranks."""
    rank: int
    local_rank: int
    run_path: str
    report_socket: str
    error_file: str
    secret_file: str = ""
    """File of `ranks_secret`; '': this rank has no part in what others of the run prove."""


def rank_environment(run: Run, start: Start, place: RankPlace, inherited: Mapping[str, str]) -> dict[str, str]:
    """The variables of the pod or the machine, over them the run's, over them torchrun's and ours."""
    local_ranks = len(run.ranks_of(place.node))
    # Where a run is started from a shell of another one's pod, what that has from its agent is not stated for this one.
    of_agent = {DEFAULT_THREADS, *([THREADS] if inherited.get(THREADS) == inherited.get(DEFAULT_THREADS) else [])}
    stated = {**{name: value for name, value in inherited.items() if name not in of_agent}, **run.environment}
    threads = {} if THREADS in stated else dict.fromkeys((THREADS, DEFAULT_THREADS), str(threads_of(run, place.node)))
    unstated = run.gpus_per_node > 0 and not any(name in stated for name in ALLOCATOR)
    allocator = {ALLOCATOR[0]: "expandable_segments:True"} if unstated else {}
    torchrun = {
        "RANK": place.rank,
        "LOCAL_RANK": place.local_rank,
        "WORLD_SIZE": run.world_size,
        "LOCAL_WORLD_SIZE": local_ranks,
        "GROUP_RANK": place.group_rank,
        "GROUP_WORLD_SIZE": run.nodes,
        "ROLE_NAME": "default",
        "ROLE_RANK": place.rank,
        "ROLE_WORLD_SIZE": run.world_size,
        "MASTER_ADDR": start.master_address,
        "MASTER_PORT": start.master_port,
        "TORCHELASTIC_RUN_ID": run.job.uid or run.job.name,
        "TORCHELASTIC_RESTART_COUNT": start.restarts,
        "TORCHELASTIC_MAX_RESTARTS": run.restart.max_restarts,
        "TORCHELASTIC_USE_AGENT_STORE": "False",  # "True" would make rank 0 wait for a store that only torchrun hosts
        "TORCHELASTIC_ERROR_FILE": place.error_file,
    }
    ours = {
        "NODE_RANK": place.group_rank,
        "NNODES": run.nodes,
        "GPUS_PER_NODE": run.gpus_of(place.node),
        "LOCKSTEP_RUN": place.run_path,
        "LOCKSTEP_NODE": place.node,
        "LOCKSTEP_ATTEMPT": start.attempt,
        "LOCKSTEP_REPORT_SOCKET": place.report_socket,
        "PYTHONUNBUFFERED": 1,
        **({"LOCKSTEP_SECRET_FILE": place.secret_file} if place.secret_file else {}),
    }
    if run.host is not None and run.training is None and "PATH" not in run.environment:
        stated["PATH"] = (
            f"{Path(sys.executable).parent}{os.pathsep}{stated.get('PATH', os.defpath)}"  # (its Python's programs, as in an image)
        )
    stacks = {"PYTHONFAULTHANDLER": "1"}  # a rank that hangs can be asked where it is, and one that crashes says so
    return {**threads, **allocator, **stacks, **stated, **{name: str(value) for name, value in {**torchrun, **ours}.items()}}


def threads_of(run: Run, node: int) -> int:
    """Return a rank's part of the cores that may be used here, which it shares with the ranks of all nodes at its node's address."""
    here = [other for other, address in enumerate(run.addresses) if address == run.addresses[node]]
    return max(1, int(usable_cores() / sum(len(run.ranks_of(other)) for other in here)))


def place_start(folder: Path) -> str:
    """The folder with which a rank's PYTHONPATH begins (`with_start`), made in `folder`. Raises OSError."""
    place = folder / "python"
    place.mkdir()
    (place / "sitecustomize.py").write_bytes(pkgutil.get_data("lockstep_gang.agent.ranks", "rankstart.py") or b"")
    return str(place)


def place_secret(folder: Path, secret: str) -> None:
    """Write what the run's ranks prove to each other into a file that only this user reads. Raises OSError."""
    path = folder / SECRET
    path.touch(mode=0o600)
    path.write_text(secret, encoding="ascii")


def with_start(environment: Mapping[str, str], place: str) -> dict[str, str]:
    """The environment with a PYTHONPATH in which `rankstart` comes first, then what it has always had."""
    return {**environment, "PYTHONPATH": os.pathsep.join(filter(None, [place, environment.get("PYTHONPATH", "")]))}
