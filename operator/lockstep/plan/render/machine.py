"""The ranks' variables in every place, in one order of precedence."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from lockstep.api.shared import VariableSource
from lockstep.plan.render.resolved import Resolved

NOTHING: Mapping[str, str] = MappingProxyType({})


def socket_variables(interface: str) -> dict[str, str]:
    """Return the variables by which ranks talk over this interface."""
    return {"NCCL_SOCKET_IFNAME": f"={interface}", "GLOO_SOCKET_IFNAME": interface}


def rank_variables(
    resolved: Resolved, found: Mapping[str, str] = NOTHING, own: Mapping[str, str] = NOTHING
) -> dict[str, str | VariableSource]:
    """Return the variables of a node's ranks: each value, or where the kubelet finds it.

    The strongest first: spec.env, the machine's `own`, nccl.env of the cluster file, what was `found` there, and the rest of the cluster
    file. A pod has none of the machine's two, and pod.env below all. Threads are no part of it: the agent shares the cores that no one has
    divided.
    """
    nccl = {name: layered.value for name, layered in resolved.nccl.items()}
    of_cluster = {variable.name: nccl[variable.name] for variable in resolved.profile.spec.nccl.env if variable.name in nccl}
    stated = {variable.name: variable.value_from or variable.value or "" for variable in resolved.spec.env}
    return {**nccl, **found, **of_cluster, **own, **stated}


def machine_variables(resolved: Resolved, found: Mapping[str, str] = NOTHING, own: Mapping[str, str] = NOTHING) -> dict[str, str]:
    """Return the variables of a machine's ranks: those without the ones that only a kubelet can find."""
    return {name: value for name, value in rank_variables(resolved, found, own).items() if isinstance(value, str)}
