"""Variables of a job's ranks on a machine that is no pod: one order of precedence for hosts, launched machines and processes here."""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.plan.render.resolved import Resolved


def socket_variables(interface: str) -> dict[str, str]:
    """Return the variables by which ranks talk over this interface."""
    return {"NCCL_SOCKET_IFNAME": f"={interface}", "GLOO_SOCKET_IFNAME": interface}


def machine_variables(resolved: Resolved, found: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a node's ranks, without those that come from a Secret or a ConfigMap.

    The strongest first: spec.env, the machine's `own`, nccl.env of the cluster file, what was `found` there, and the
    rest of the cluster file. A pod has the same order without the machine's two. Threads are no part of it: the agent shares the cores that
    no one has divided.
    """
    nccl = {name: layered.value for name, layered in resolved.nccl.items()}
    of_cluster = {variable.name: nccl[variable.name] for variable in resolved.profile.spec.nccl.env if variable.name in nccl}
    stated = {variable.name: variable.value or "" for variable in resolved.spec.env if variable.value_from is None}
    return {**nccl, **found, **of_cluster, **own, **stated}
