"""status.fabric: what NCCL's own log says that the ranks use."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from lockstep.api.model import Model

Text = Annotated[str, Field(max_length=1024)]
Count = Annotated[int, Field(ge=0)]
Name = Annotated[str, Field(max_length=64)]


class FabricDifference(Model):
    """Ranks of one node that are not as asked, or not as the others."""

    node: Count
    """The node's index in the job, which is the pod's too."""
    node_name: Text | None = None
    """The Node it runs on."""
    ranks: Name
    """Which of its ranks, for example 4–7."""
    why: Text
    """How they differ, and why if NCCL says so."""


class FabricStatus(Model):
    """What the ranks of the newest attempt use, from NCCL's own log. Condition FabricVerified judges it."""

    transport: Name | None = None
    """RDMA, TCP, NVLink, Plugin or gloo."""
    network: Name | None = None
    """NCCL's name of it, for example IB, Socket or a plugin's."""
    hcas: Annotated[list[Name], Field(max_length=64)] = []
    """RDMA devices that NCCL listed."""
    link: Name | None = None
    """IB or RoCE, with its speed where NCCL says it."""
    interfaces: Annotated[list[Name], Field(max_length=64)] = []
    """Network interfaces in use: of the data with TCP, else by which ranks find each other."""
    gpu_direct: Name | None = None
    """How NICs reach GPU memory: DMA-BUF, nvidia-peermem, On (NCCL does not say how) or Off."""
    nccl_version: Name | None = None
    """The version that rank 0 or the first other one logged."""
    ranks_heard: Count = 0
    """Ranks whose log has named their network."""
    differing: Annotated[list[FabricDifference], Field(max_length=32)] = []
    """Ranks that differ, by node."""
