"""Number of this node, as the program that starts one process a node tells it (pure): srun, mpirun."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.api.errors import ConfigError

AUTO = "auto"


@dataclass(frozen=True)
class Starter:
    """A program that starts the same command on every node, and the variables by which it numbers them."""

    name: str
    index: str
    count: str = ""
    """Variable with the number of nodes; '' where it tells none."""
    local: str = ""
    """Variable that numbers the processes of one node."""
    one_a_node: str = ""
    """Option that starts one process a node."""
    signals_all: bool = False
    """It signals every process that came of it, whatever its session."""


STARTERS = (
    Starter(
        "mpirun (Open MPI)", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", one_a_node="--map-by ppr:1:node"
    ),
    Starter("srun", "SLURM_NODEID", "SLURM_STEP_NUM_NODES", "SLURM_LOCALID", one_a_node="--ntasks-per-node=1", signals_all=True),
    Starter("mpiexec (PMI)", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", one_a_node="-ppn 1"),
    Starter("a starter with PMIx", "PMIX_RANK"),
)
"""In the order in which they count: mpirun within an allocation of Slurm's has the variables of both."""
BY_NUMBER = {"JSM_NAMESPACE_RANK": ("jsrun", "$JSM_NAMESPACE_RANK"), "LSF_PM_TASKID": ("blaunch", "$((LSF_PM_TASKID - 1))")}
"""Variable of a starter that auto doesn't know → its name, and the number of this node as its shell says it."""


@dataclass(frozen=True)
class NodeNumber:
    """Number of this node among all."""

    index: int
    nodes: int | None = None
    """Number of nodes; None: the starter doesn't tell."""
    signals_all: bool = False
    """True if the starter signals every process that came of it, whatever its session."""


def node_number(text: str, environment: Mapping[str, str]) -> NodeNumber:
    """Number from --node: N, or `auto` for what the starter's variables say. Raises ConfigError."""
    if text != AUTO:
        if not text.isascii() or not text.isdecimal():
            raise ConfigError(f"--node is {text!r}, must be the number of this node from 0 on, or {AUTO}")
        return NodeNumber(int(text))
    starter = next((one for one in STARTERS if one.index in environment), None)
    if starter is None:
        for name, value in (one for variable, one in BY_NUMBER.items() if variable in environment):
            raise ConfigError(f"--node {AUTO} doesn't read the numbers of {name}: let a shell on each node say --node {value}")
        names = ", ".join(one.index for one in STARTERS)
        raise ConfigError(
            f"--node {AUTO}: no starter has numbered this process (none of {names} is set): give the number, 0 on the machine of --at"
        )
    index = _number(starter.index, environment)
    if starter.local and _number(starter.local, environment, "0") != 0:
        raise ConfigError(
            f"{starter.name} has started several processes on this node: start one a node ({starter.one_a_node}), it starts a rank for"
            " each GPU"
        )
    count = _number(starter.count, environment) if starter.count in environment else None
    return NodeNumber(index, count, starter.signals_all)


def _number(name: str, environment: Mapping[str, str], default: str = "") -> int:
    text = environment.get(name, default)
    if not text.isascii() or not text.isdecimal():
        raise ConfigError(f"the variable {name} is {text!r}, must be a whole number")
    return int(text)
