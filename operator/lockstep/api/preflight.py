"""spec.preflight: what is checked on all nodes before ranks start."""

from __future__ import annotations

from enum import StrEnum

from lockstep.api.model import Model


class PreflightMode(StrEnum):
    """Extent of the checks before an attempt."""

    FULL = "Full"
    BASIC = "Basic"
    OFF = "Off"


class Preflight(Model):
    """Checks of all nodes before the ranks start. An error stops the start and spends no restart."""

    mode: PreflightMode = PreflightMode.FULL
    """Full: every check, and a short all-reduce where the cluster states network.minimumBusbw. Basic: without the all-reduce. Off: nothing."""
    all_reduce: bool = False
    """true: with mode Full, measure the all-reduce where the cluster states no threshold, too; status.preflight then has the figure."""
