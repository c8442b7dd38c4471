"""Verbs that measure hosts over ssh and leave nothing there: preflight, calibrate, and a few steps of a training."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest
import yaml

from lockstep.cli.clusters.demo import demo_folder
from support.checkout import ROOT
from support.clusters.bed_hosts import eventually, limited
from support.clusters.bed_jobs import BedJobs

SAMPLE = ROOT / "manifests/samples/trainingjob.yaml"


def left_on(laptop: BedJobs) -> list[str]:
    """Files of short runs and agents that any host still has."""
    script = (
        "ls -A /home/ada/.local/state/lockstep/jobs /home/ada/lockstep/workspace/runs 2>/dev/null | grep '^\\.' ; pgrep -af '[a]gent.pyz'"
        " || true"
    )
    return [line for number in range(laptop.bed.count) for line in laptop.bed.console(number, "sh", "-c", script).split("\n") if line]


def test_a_preflight_names_what_a_host_lacks_and_leaves_nothing_there(laptop: BedJobs) -> None:
    path = laptop.job("checked")
    passed = laptop.type("preflight", "-f", str(path), "--cluster", str(laptop.cluster))
    assert "10 checks on 2 nodes passed" in passed.stdout
    laptop.bed.console(1, "rm", "/home/ada/lockstep/workspace/rank.py")
    lacking = laptop.type("preflight", "-f", str(path), "--cluster", str(laptop.cluster), "-o", "json", check=False)
    findings = [(one["check"], one["node"]) for one in json.loads(lacking.stdout)["findings"]]
    assert lacking.returncode == 1 and findings == [("paths", 1)]
    assert left_on(laptop) == []
    assert laptop.type("get", "--cluster", str(laptop.cluster)).stdout.count("checked") == 0, "a preflight is no job"


def test_a_preflight_whose_laptop_dies_ends_on_all_hosts(laptop: BedJobs) -> None:
    path = laptop.job("orphan", nodes=3)
    laptop.bed.console(2, "sh", "-c",
        "nft add table ip t && nft add chain ip t i '{ type filter hook input priority 0 ; }' && "
        "nft add rule ip t i tcp dport 29400-29499 drop && nft add chain ip t o '{ type filter hook output priority 0 ; }' && "
        "nft add rule ip t o tcp dport 29400-29499 drop")  # fmt: skip
    try:
        command = [sys.executable, "-m", "lockstep.cli.main", "preflight", "-f", str(path), "--cluster", str(laptop.cluster)]
        typed = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert eventually(lambda: len([line for line in left_on(laptop) if "agent.pyz" in line]) >= 3), "its agents run"
        typed.send_signal(signal.SIGKILL)
        typed.communicate()
        assert eventually(lambda: left_on(laptop) == []), left_on(laptop)
    finally:
        laptop.bed.console(2, "nft", "delete", "table", "ip", "t")


def test_a_host_with_a_slow_cable_is_named_and_what_all_reach_is_kept_in_the_file(laptop: BedJobs) -> None:
    with limited("100mbit", laptop.bed.host(1).link):
        done = laptop.type("cluster", "calibrate", str(laptop.cluster), "--pairs", "--save")
    slow = {
        tuple(line.split()[:2])
        for line in done.stdout.splitlines()
        if line.startswith("bed") and "eth0" in line and float(line.split()[3]) < 0.12
    }
    assert slow == {("bed0", "bed1"), ("bed2", "bed1")}, "its cable is limited towards it"
    assert "bed1" in done.stdout.partition("Gb/s from")[2].partition("\n\n")[2], "the finding names the host"
    figure = yaml.safe_load(laptop.cluster.read_text())["pairs"][0]
    assert 0.08 < float(figure["least_gigabits"]) < 0.12 and figure["transport"] == "TCP" and figure["nodes"] == 3


@pytest.mark.long
def test_a_sweep_measures_the_all_reduce_and_a_few_steps_show_what_a_second_host_brings(laptop: BedJobs) -> None:
    sweep = laptop.type("cluster", "calibrate", str(laptop.cluster), "--nodes", "2", "-o", "json")
    assert [point["bytes"] for point in json.loads(sweep.stdout)["sweep"]] == [1 << power for power in range(20, 25)]
    folder = demo_folder()
    where = ["--cluster", str(laptop.cluster)]
    laptop.type("cp", str(folder / "models/tiny-base"), "demo:/workspace/models/tiny-base", *where)
    laptop.type("cp", str(folder / "datasets/demo.jsonl"), "demo:/datasets/demo.jsonl", *where)
    words = [
        "--steps",
        "2",
        "--nodes",
        "1,2",
        "--set",
        "training.optimization.globalBatchSize=4",
        "--set",
        "training.optimization.microBatchSize=2",
    ]
    bench = laptop.type("bench", "scaling", "-f", str(SAMPLE), *where, *words, "-o", "json")
    rows = json.loads(bench.stdout)["runs"]
    assert [(one["nodes"], one["ranks"], one["steps"]) for one in rows] == [(1, 1, 2), (2, 2, 2)] and all(
        one["tokensPerSecond"] > 0 for one in rows
    )
    assert left_on(laptop) == []


def test_a_plan_says_what_a_start_would_find_and_a_slow_network_is_refused(laptop: BedJobs) -> None:
    where = ["--cluster", str(laptop.cluster)]
    lacking = laptop.type("plan", "-f", str(SAMPLE), *where, "--set", "training.model.name=/workspace/models/none", check=False)
    assert (
        lacking.returncode == 1
        and "there is no folder" in lacking.stdout
        and "models/none on hosts bed0, bed1: lockstep cp" in lacking.stdout
    )
    folder = demo_folder()
    laptop.type("cp", str(folder / "models/tiny-base"), "demo:/workspace/models/tiny-base", *where)
    laptop.type("cp", str(folder / "datasets/demo.jsonl"), "demo:/datasets/demo.jsonl", *where)
    plan = laptop.type("plan", "-f", str(SAMPLE), *where)
    assert "bed1 is node 1 at " in plan.stdout and "bed1's memory (" in plan.stdout and plan.stdout.endswith("fits now\n")
    assert not any(word in plan.stdout for word in ("namespace", "image", "quota", "StatefulSet"))
    figure = '\npairs: [{transport: TCP, nodes: 3, day: "2026-11-24", least_gigabits: "0.00001", usual_gigabits: "0.9"}]\n'
    laptop.cluster.write_text(laptop.cluster.read_text() + figure)
    refused = laptop.type("run", "-f", str(SAMPLE), *where, "--set", "training.zeroStage=Stage3", "--detach", check=False)
    assert (
        refused.returncode == 2 and "too slow for Stage3" in refused.stderr and "the slowest pair of nodes on 2026-11-24" in refused.stderr
    )
    assert laptop.traces(0, "demo") == ""
