"""One rank's fabric by its log: the transport, whether GPUDirect is used, and why not (pure)."""

from __future__ import annotations

from lockstep_gang.contract.fabric import RankFabric, are_whole_names

RDMA, TCP, NVLINK, PLUGIN = "RDMA", "TCP", "NVLink", "Plugin"
_RDMA_NETWORKS = ("IB", "gIB", "NCCL RDMA Plugin")
_RDMA_PROVIDERS = ("efa", "verbs", "cxi", "psm", "opx")
_TCP_PROVIDERS = ("tcp", "sockets", "udp", "net")


def has_spoken(rank: RankFabric | None) -> bool:
    """Return True if NCCL has named its network."""
    return rank is not None and bool(rank.networks)


def has_traffic(rank: RankFabric | None) -> bool:
    """Return True if a channel to another node is there."""
    return rank is not None and (bool(rank.traffic) or crosses_by_nvlink(rank))


def crosses_by_nvlink(rank: RankFabric) -> bool:
    return "P2P/MNNVL" in rank.inside


def transport_of(rank: RankFabric) -> str | None:
    """Transport over which this rank reaches other nodes; of several communicators the slowest. None: not said yet."""
    kinds = {_kind(rank, network) for network in (*rank.networks, *(t.network for t in rank.traffic))}
    if not rank.traffic and crosses_by_nvlink(rank):
        return NVLINK
    return next((kind for kind in (TCP, PLUGIN, RDMA) if kind in kinds), None)


def _kind(rank: RankFabric, network: str) -> str:
    """Transport by NCCL's name of a network. A plugin of another name may run over anything, unless it says what, or reaches GPU memory."""
    if network == "Socket":
        return TCP
    if network.startswith(_RDMA_NETWORKS) or rank.provider.startswith(_RDMA_PROVIDERS):
        return RDMA
    if rank.provider.startswith(_TCP_PROVIDERS):
        return TCP
    direct = any(t.network == network and (t.received_direct or t.sent_direct) for t in rank.traffic)
    return RDMA if direct else PLUGIN


def uses_direct(rank: RankFabric) -> bool | None:
    """Return True if what it receives goes straight into GPU memory. Older GPUs never send that way, so sending alone proves no lack."""
    if transport_of(rank) == TCP:
        return None
    received = sum(t.received for t in rank.traffic)
    if received:
        return sum(t.received_direct for t in rank.traffic) == received
    return True if any(t.sent_direct for t in rank.traffic) else None


def direct_by(rank: RankFabric) -> str:
    """Way of GPUDirect, if it is used. A GPU with DMA-BUF says so at its start: without that word it is the other way, unless a plugin has
    its own.
    """
    return rank.direct_by or ("nvidia-peermem" if rank.direct_able and not rank.provider else "")


def setting(rank: RankFabric, name: str) -> str | None:
    """The value of one of NCCL's variables, if it echoed it."""
    prefix = f"NCCL_{name}="
    return next((s.removeprefix(prefix) for s in rank.settings if s.startswith(prefix)), None)


def why_sockets(rank: RankFabric) -> str:
    """Reason why sockets are used, as far as NCCL says."""
    if setting(rank, "IB_DISABLE") not in (None, "0"):
        return f"NCCL_IB_DISABLE is {setting(rank, 'IB_DISABLE')}"
    if (setting(rank, "NET") or "").lower() == "socket":
        return "NCCL_NET is Socket"
    if rank.plugin_failed:
        return rank.plugin_failed
    named = setting(rank, "IB_HCA")
    if rank.no_devices:
        return rank.no_devices + (f" that NCCL_IB_HCA={named} names" if named and "no RDMA device" in rank.no_devices else "")
    return f"the plugin's provider is {rank.provider}" if rank.provider else ""


def why_not_direct(rank: RankFabric) -> str:
    level = setting(rank, "NET_GDR_LEVEL")
    if level in ("LOC", "0"):
        return f"NCCL_NET_GDR_LEVEL is {level}"
    off = rank.direct_off
    if off and "DMA-BUF" in off and setting(rank, "DMABUF_ENABLE") == "0":
        return f"{off}, and NCCL_DMABUF_ENABLE is 0"
    received = sum(t.received for t in rank.traffic)
    direct = sum(t.received_direct for t in rank.traffic)
    return off or (f"{direct} of {received} channels have it" if direct else "")


def missing_hcas(rank: RankFabric, asked: tuple[str, ...]) -> tuple[str, ...]:
    """Entries of NCCL_IB_HCA that no listed device fits: `=name` exactly, `name` as a beginning, both with or without `:port`."""
    if not rank.hcas_whole or not rank.hcas:
        return ()
    return tuple(entry.removeprefix("=") for entry in asked if not any(_fits(entry, hca.name, hca.port) for hca in rank.hcas))


def extra_hcas(rank: RankFabric, asked: tuple[str, ...]) -> tuple[str, ...]:
    """Listed devices that nobody named. Without `=` NCCL takes mlx5_1 for a beginning and mlx5_10 with it, which no one who writes it
    means.
    """
    meant = tuple(entry if entry.startswith("=") or not are_whole_names([entry]) else f"={entry}" for entry in asked)
    return tuple(hca.name for hca in rank.hcas if meant and not any(_fits(entry, hca.name, hca.port) for entry in meant))


def _fits(entry: str, name: str, port: int) -> bool:
    stated, _, rest = entry.removeprefix("=").partition(":")
    stated_port = rest.partition(":")[0]
    if stated_port and stated_port != str(port):
        return False
    return name.removesuffix("_dma") == stated if entry.startswith("=") else name.startswith(stated)
