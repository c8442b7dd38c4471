"""`lockstep devcluster hosts`: hosts with a systemd, an sshd and users each, on this one machine and without Docker."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.api.errors import ConfigError
from lockstep.cli.shared.embedded import machine_failures
from lockstep.cli.shared.folders import state_folder
from lockstep.cli.shared.jobargs import Form, FormOption
from lockstep.cli.shared.trainer import in_full_environment
from lockstep.platforms.output import put, put_json

if TYPE_CHECKING:
    from lockstep.devcluster.hosts.layout import BedLayout

BED = "hosts.yaml"
"""Copy of the hosts' cluster file, in the folder of what is remembered: the cluster that is meant after quickstart --hosts."""
app = typer.Typer(help="Run hosts to reach over ssh on this machine.", no_args_is_help=True)


def _bed() -> BedLayout:
    from lockstep.devcluster.hosts.layout import default_bed

    return default_bed()


def say(text: str) -> None:
    put(f"devcluster: {text}", flush=True)


@app.command("up")
def hosts_up(hosts: Annotated[int, typer.Option(min=1, max=99, help="How many hosts.")] = 3) -> None:
    """Bring the hosts up and print their cluster file.

    Hosts that have power are left alone.

    Example: lockstep devcluster hosts up --hosts 2
    """
    put(bring_hosts_up(hosts))


def bring_hosts_up(hosts: int) -> Path:
    """Bring up so many hosts, and return the cluster file that describes them. Raises ConfigError where this machine can't have any."""
    bed = _bed()
    from lockstep.devcluster.hosts.bed import up
    from lockstep.devcluster.hosts.needs import ensure_bed

    with machine_failures():
        in_full_environment(check=lambda: ensure_bed(bed, say))
        return up(bed, hosts, say)


@app.command("down")
def hosts_down(purge: Annotated[bool, typer.Option(help="Remove the hosts' disks and keys, too.")] = False) -> None:
    """Take the hosts' power and remove their network.

    Their disks are kept for the next `up`.

    Example: lockstep devcluster hosts down --purge
    """
    if os.geteuid() != 0:
        raise ConfigError("only root can remove the hosts: sudo lockstep devcluster hosts down")
    bed = _bed()
    from lockstep.devcluster.hosts.bed import down

    with machine_failures():
        down(bed, say, purge=purge)
    (state_folder() / BED).unlink(missing_ok=True)


@app.command("status")
def hosts_status(output: FormOption = Form.TEXT) -> None:
    """Say which hosts have power.

    Exit code 1: a host has no power, or there are no hosts.

    Example: lockstep devcluster hosts status -o json
    """
    bed = _bed()
    from lockstep.devcluster.hosts.bed import status

    powered = status(bed)
    if output is Form.JSON:
        put_json({"name": bed.name, "clusterFile": str(bed.cluster_file), "hosts": powered})
    else:
        for name, on in powered.items():
            put(f"{name:32} {'on' if on else 'off'}")
        if not powered:
            put("there are no hosts: lockstep devcluster hosts up")
    if not powered or not all(powered.values()):
        raise typer.Exit(1)
