"""Choice of the cluster that a command is about, of all that name one."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

VARIABLE = "LOCKSTEP_CLUSTER"
"""Environment variable that names a cluster."""


class By(StrEnum):
    """Source of a cluster's name, the one that counts first on top."""

    OPTION = "--cluster"
    ENVIRONMENT = f"${VARIABLE}"
    FOLDER = ".lockstep/cluster of this folder"
    USE = "lockstep use"


@dataclass(frozen=True)
class Choice:
    """A cluster, and what names it."""

    cluster: str
    """Name of a cluster, path of its file, or folder of a workspace on this machine."""
    by: By

    @property
    def is_typed(self) -> bool:
        """True if this command line or its environment names it, and not what was remembered before."""
        return self.by in (By.OPTION, By.ENVIRONMENT)


def choices(option: str | None, environment: str | None, folder: str | None, used: str | None) -> list[Choice]:
    """Return all that name a cluster, the one that counts first; none where nothing does. The order is that of `By`."""
    return [Choice(cluster, by) for by, cluster in zip(By, (option, environment, folder, used), strict=True) if cluster]
