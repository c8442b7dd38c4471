"""The commands of docs/how-to/home-cluster.md, typed on the bed as its reader would: from a list of hosts to training.

Every host pretends to have eight GPUs. They compute nothing, so the last command, which starts the job, takes CPUs in their place.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lockstep.cli.clusters.demo import demo_folder
from lockstep.devcluster.hosts.bed import host_key
from support.checkout import ROOT
from support.clusters.bed_hosts import BedHosts, eventually
from support.clusters.bed_jobs import BedJobs

PAGE = (ROOT / "docs/how-to/home-cluster.md").read_text()
COMMANDS_MAX = 6
ON_CPUS = ("--set", "gpusPerNode=0", "--set", "ranksPerNode=1")
"""Options of a start alone: the GPUs of the bed are pretended."""
GPUS = 8
SAMPLES = 16_000
BATCH = "global batch 32 (by tokens)"
"""Words of the trainer for the batch of CONFIG on 16 GPUs, computed by two ranks on CPUs."""
TOKEN = "/home/ada/token"
CONFIG = """\
model: {name_or_path: /workspace/models/GLM-4.5-Air}
data: {dataset_path: /workspace/dataset/all_data.jsonl, max_length: 64}
training:
  num_train_epochs: 3
  learning_rate: 2.0e-5
  per_device_train_batch_size: 1
  gradient_accumulation_steps: 2
  eval_dataset_type: "subset"
  eval_subset_size: 4
  eval_steps: 50
  checkpoint_mode: "lite"
  save_steps: 100
  save_total_limit: 10
lora: {r: 16, lora_alpha: 32, target_modules: ["q_proj", "k_proj", "v_proj", "o_proj"]}
"""
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


def commands(section: str, number: int = 0) -> list[list[str]]:
    """Words of each command in a block of a section of the page, without `lockstep`."""
    text = re.search(rf"^## {section}.*?(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    block = re.findall(r"^```\n(.*?)^```", text[0], re.MULTILINE | re.DOTALL)[number]
    return [line.removeprefix("$ lockstep ").split() for line in block.splitlines()]


@pytest.fixture
def laptop(bed: BedHosts, tmp_path: Path) -> Iterator[BedJobs]:
    (tmp_path / "scripts").mkdir()
    for name in ("train_distributed.py", "train.py"):
        (tmp_path / "scripts" / name).write_text(SCRIPT)
    laptop = BedJobs(bed, tmp_path)
    with bed.pretended_gpus(GPUS):
        yield laptop
        laptop.clear()


def as_on_the_bed(laptop: BedJobs, file: Path) -> None:
    """Write what ssh's own configuration says at home, and the Python that `hosts setup` would have to fetch from an index."""
    bed = laptop.bed.layout
    text = file.read_text() if "\ndefaults:\n" in file.read_text() else f"{file.read_text()}\ndefaults:\n"
    text = text.replace("defaults:\n", f"defaults:\n  user: ada\n  identity: {bed.identity}\n  python: /opt/env/bin/python\n")
    for host in laptop.bed.hosts:
        text = re.sub(rf"name: {host.name}\b", f"name: {host.name}, address: {host.address}", text)
    file.write_text(text)


def on_host(laptop: BedJobs, number: int, *words: str, stdin: bytes = b"") -> str:
    """Type `lockstep WORDS` in ada's terminal on the host, in the workspace, and return what it prints."""
    ada = (
        "setpriv",
        "--reuid=ada",
        "--regid=ada",
        "--clear-groups",
        "env",
        "HOME=/home/ada",
        "sh",
        "-c",
        'cd ~/lockstep/workspace && exec "$@" 2>&1',
        "sh",
    )
    return laptop.bed.console(number, *ada, "/opt/env/bin/python", "-m", "lockstep.cli.main", *words, stdin=stdin)


def by_address(laptop: BedJobs, words: list[str], count: int = 3) -> list[str]:
    """Names of the bed's hosts as the page's line names its own: the first by its address, the others by name."""
    assert len(words) == count and re.fullmatch(r"[\d.]+", words[0]) and not any(word[0].isdigit() for word in words[1:])
    first, *others = laptop.bed.hosts[:count]
    return [first.address, *(host.name for host in others)]


def fingerprints(laptop: BedJobs, names: Sequence[str]) -> list[str]:
    keys = [host_key(host).split()[1] for host in laptop.bed.hosts[: len(names)]]
    digests = {name: hashlib.sha256(base64.b64decode(key)).digest() for name, key in zip(names, keys, strict=True)}
    return [
        word
        for name, digest in digests.items()
        for word in ("--fingerprint", f"{name}=SHA256:{base64.b64encode(digest).decode().rstrip('=')}")
    ]


@pytest.mark.long
def test_a_script_of_unlike_machines_at_home_trains_after_five_commands(laptop: BedJobs) -> None:
    init, setup, check, sync, run = commands("Unlike desktops")
    file, names = laptop.folder / "home.yaml", by_address(laptop, init[3:])
    laptop.type(*init[:3], *names, "--output", str(file))
    as_on_the_bed(laptop, file)
    laptop.type(*setup[:2], str(file), *fingerprints(laptop, names))
    laptop.type(*check[:2], str(file), check=False)
    assert (sync[2], run[:3]) == ("./scripts", ["run", "--hosts", "home"])
    laptop.type(*sync[:2], str(laptop.folder / "scripts"), "--cluster", str(file))
    assert "epoch 3/3: 3 ranks" in laptop.type("run", "--hosts", str(file), *ON_CPUS, *run[3:]).stdout
    laptop.type("delete", "train-distributed", "--yes", "--cluster", str(file))


def two_servers(laptop: BedJobs) -> tuple[Path, Path]:
    """Type the commands of the section up to the start. Return the cluster file and the job file."""
    init, job, setup, model, data, _ = commands("Two servers")
    file, names, demo = laptop.folder / "pair.yaml", by_address(laptop, init[3:], 2), demo_folder()
    (laptop.folder / "config.yaml").write_text(CONFIG)
    laptop.type(*init[:3], *names, "--output", str(file))
    as_on_the_bed(laptop, file)
    laptop.type(*setup[:2], str(file), *fingerprints(laptop, names))
    job_file = laptop.folder / "glm.yaml"
    laptop.type(*job[:4], str(laptop.folder / "config.yaml"), "--cluster", str(file), "--output", str(job_file))
    for (verb, _, target, *_), source in ((model, demo / "models/tiny-base"), (data, demo / "datasets/demo.jsonl")):
        laptop.type(verb, str(source), target, "--cluster", str(file))
    return file, job_file


@pytest.mark.long
def test_two_servers_of_eight_gpus_train_with_the_batch_of_their_configuration_after_six_commands(laptop: BedJobs) -> None:
    run, (file, job_file) = commands("Two servers")[-1], two_servers(laptop)
    assert "globalBatchSize: 32\n" in job_file.read_text(), "1 sample x 2 x 16 GPUs"
    planned = laptop.type("plan", "-f", str(job_file), "--cluster", str(file), "--samples", str(SAMPLES), "-o", "json", check=False)
    plan = json.loads(planned.stdout)
    assert {name: plan["figures"][name] for name in ("globalBatchSize", "accumulation", "steps")} == {
        "globalBatchSize": 32, "accumulation": 2, "steps": 1470,
    }  # fmt: skip
    assert "nothing to do in any step" not in planned.stdout + planned.stderr, "every rank has samples"
    taken = [one["message"] for one in plan["lines"] if one["section"] == "hosts"]
    assert [message.count("(NVIDIA H100 80GB HBM3)") for message in taken] == [GPUS, GPUS], taken
    assert run[:3] == ["run", "-f", "glm.yaml"]
    told = laptop.type("run", "-f", str(job_file), "--cluster", str(file), *ON_CPUS, "--set", "training.optimization.maxSteps=3")
    assert BATCH in told.stdout and "Step 3/3" in told.stdout and "Complete: all ranks are done" in told.stdout
    laptop.type("delete", "glm", "--yes", "--cluster", str(file))


@pytest.mark.long
def test_two_servers_train_the_same_by_a_command_in_a_terminal_of_each_without_ssh_between_them(laptop: BedJobs) -> None:
    (launch, join), (_, job_file) = commands("Two servers", 1), two_servers(laptop)
    place, home = f"{laptop.bed.host(0).address}:29600", "/home/ada/lockstep"
    on_cpus = (*ON_CPUS, "--set", "training.optimization.maxSteps=3", "--token-file", TOKEN, "--cluster", home)
    words = {0: [*launch[:1], "--at", place, "-f", f"{home}/workspace/glm.yaml", *launch[5:], *on_cpus], 1: [join[0], place]}
    laptop.put(0, "glm.yaml", job_file.read_bytes())
    for path in ("clusters/local.yaml", "manifests/crds/crd.yaml"):  # as a checkout has them
        laptop.put(0, path, (ROOT / "clusters/local.yaml").read_bytes())
    with ThreadPoolExecutor() as terminals:
        typed = terminals.submit(on_host, laptop, 0, *words[0])
        assert (
            eventually(lambda: typed.done() or laptop.bed.console(0, "sh", "-c", f"cat {TOKEN} 2>/dev/null || true")) and not typed.done()
        ), typed.exception()
        token = laptop.bed.console(0, "cat", TOKEN)
        joined = terminals.submit(on_host, laptop, 1, *words[1], "--cluster", home, stdin=token.encode())
        assert BATCH in typed.result() and "Complete: all ranks are done" in typed.result()
        assert "this machine is node 1 of 2" in joined.result()


@pytest.mark.long
def test_a_hostfile_trains_after_four_commands(laptop: BedJobs, monkeypatch: pytest.MonkeyPatch) -> None:
    imported, setup, check, run = commands("A hostfile")
    file, hostfile = laptop.folder / "lab.yaml", laptop.folder / "hostfile"
    hostfile.write_text("".join(f"{host.name} slots={GPUS}\n" for host in laptop.bed.hosts))
    laptop.type(*imported[:4], str(hostfile), "--output", str(file))
    as_on_the_bed(laptop, file)
    laptop.type(*setup[:2], str(file), *fingerprints(laptop, [host.name for host in laptop.bed.hosts]))
    laptop.type(*check[:2], str(file), check=False)
    monkeypatch.chdir(laptop.folder / "scripts")
    assert run[:2] == ["run", "--hosts"]
    told = laptop.type("run", "--hosts", str(file), *ON_CPUS, *run[3:], check=False)
    assert "epoch 1/1: 3 ranks" in told.stdout, told
    laptop.type("delete", "train", "--yes", "--cluster", str(file))


def test_no_guide_takes_more_commands() -> None:
    counts = [len(commands(section)) for section in ("Unlike desktops", "Two servers", "A hostfile")]
    assert all(0 < count <= COMMANDS_MAX for count in counts)
