"""The commands of docs/how-to/home-cluster.md, typed on the bed as its reader would: from a list of hosts to training."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

import pytest

from lockstep.devcluster.hosts.bed import host_key
from support.checkout import ROOT
from support.clusters.bed_hosts import BedHosts
from support.clusters.bed_jobs import BedJobs

PAGE = (ROOT / "docs/how-to/home-cluster.md").read_text()
COMMANDS_MAX = 6
SCRIPT = """\
import argparse, os
import torch, torch.distributed as dist
parser = argparse.ArgumentParser()
parser.add_argument("--num-epochs", type=int, default=1)
epochs = parser.parse_args().num_epochs
dist.init_process_group("gloo")
for epoch in range(epochs):
    total = torch.ones(1)
    dist.all_reduce(total)
    print(f"epoch {epoch + 1}/{epochs}: {int(total.item())} ranks", flush=True)
dist.destroy_process_group()
"""


def commands(section: str) -> list[list[str]]:
    """Words of each command in the first block of a section of the page, without `lockstep`."""
    block = re.search(rf"^## {section}.*?^```\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert block is not None
    return [line.removeprefix("$ lockstep ").split() for line in block[1].splitlines()]


@pytest.fixture
def laptop(bed: BedHosts, tmp_path: Path) -> BedJobs:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/train_distributed.py").write_text(SCRIPT)
    return BedJobs(bed, tmp_path)


def as_on_the_bed(laptop: BedJobs, file: Path) -> None:
    """Write what ssh's own configuration says at home, and the Python that `hosts setup` would have to fetch from an index."""
    bed = laptop.bed.layout
    text = file.read_text().replace("defaults:\n", f"defaults:\n  user: ada\n  identity: {bed.identity}\n  python: /opt/env/bin/python\n")
    for host in laptop.bed.hosts:
        text = text.replace(f"{{name: {host.name}}}", f"{{name: {host.name}, address: {host.address}}}")
    file.write_text(text)


def fingerprints(laptop: BedJobs) -> list[str]:
    digests = {host.name: hashlib.sha256(base64.b64decode(host_key(host).split()[1])).digest() for host in laptop.bed.hosts}
    return [
        word
        for name, digest in digests.items()
        for word in ("--fingerprint", f"{name}=SHA256:{base64.b64encode(digest).decode().rstrip('=')}")
    ]


@pytest.mark.long
def test_a_script_of_unlike_machines_at_home_trains_after_six_commands(laptop: BedJobs) -> None:
    init, trust, setup, check, sync, run = commands("Unlike desktops")
    file, names = laptop.folder / "home.yaml", [host.name for host in laptop.bed.hosts]
    laptop.type(*init[:3], *names, "--output", str(file))
    as_on_the_bed(laptop, file)
    laptop.type(*trust[:2], str(file), *fingerprints(laptop))
    laptop.type(*setup[:2], str(file), seconds=300)
    laptop.type(*check[:2], str(file), check=False)
    assert (sync[2], run[:3]) == ("./scripts", ["run", "--hosts", "home"])
    laptop.type(*sync[:2], str(laptop.folder / "scripts"), "--cluster", str(file))
    on_cpus = ("--set", "gpusPerNode=0", "--set", "ranksPerNode=1")  # (the bed has no GPUs)
    assert "epoch 3/3: 3 ranks" in laptop.type("run", "--hosts", str(file), *on_cpus, *run[3:]).stdout
    laptop.type("delete", "train-distributed", "--yes", "--cluster", str(file))


def test_no_guide_takes_more_commands() -> None:
    counts = [len(commands(section)) for section in ("Unlike desktops", "Two servers", "A hostfile")]
    assert all(0 < count <= COMMANDS_MAX for count in counts)
