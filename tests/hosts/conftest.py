"""Fixtures of the tests that need hosts: a bed of three that is theirs alone, brought up once and removed at the end."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.devcluster.hosts.bed import up
from support.clusters.bed_hosts import BedHosts
from support.clusters.bed_jobs import BedJobs
from support.clusters.bed_ssh import Ways
from support.clusters.own_cluster import own_bed

HOSTS = 3


@pytest.fixture(scope="session")
def own_hosts() -> Iterator[BedHosts]:
    with own_bed() as layout:
        up(layout, HOSTS, print)
        yield BedHosts(layout, HOSTS)


@pytest.fixture
def bed(own_hosts: BedHosts) -> Iterator[BedHosts]:
    """The bed, with all hosts on; what a test took from a host is given back to it afterwards."""
    yield own_hosts
    own_hosts.mend()


@pytest.fixture
def laptop(bed: BedHosts, tmp_path: Path) -> BedJobs:
    return BedJobs(bed, tmp_path)


@pytest.fixture
def ways(bed: BedHosts) -> Iterator[Ways]:
    """Ways to the hosts, over one connection each."""
    folder = Path(tempfile.mkdtemp(prefix="ls-"))  # (short: sockets are in it)
    ways = Ways(bed, folder)
    yield ways
    asyncio.run(ways.close())
    shutil.rmtree(folder, ignore_errors=True)  # (a connection that ends removes its own socket)
