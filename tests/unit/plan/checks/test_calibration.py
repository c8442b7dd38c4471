"""An all-reduce sweep as a job: what is started, what its lines say, and what becomes of the cluster file."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from lockstep.api.errors import ConfigError, Failed
from lockstep.api.files.clusterfile import parse_cluster_file
from lockstep.api.shared import FabricMode
from lockstep.cli.main import main
from lockstep.plan.cluster.calibration import (
    Point,
    Sweep,
    calibration_of,
    is_done,
    point_in,
    replaced,
    suggested_threshold,
    sweep_job,
    with_section,
)
from lockstep.plan.render.resolve import resolve
from lockstep.platforms.jobs import shortresults
from lockstep.platforms.kubernetes.objects import prepare
from lockstep.platforms.kubernetes.shortruns import without_agents, without_claims
from lockstep_gang.agent.main import main as agent
from lockstep_gang.agent.preflight.allreduce_rank import sizes
from support.api_stub import kubeconfig
from support.checkout import ROOT

MIB = 2**20
POINTS = (Point(MIB, 1000, 8), Point(8 * MIB, 4000, 8), Point(256 * MIB, 2_500, 8))
RDMA_FILE = """cluster: {name: c, namespace: n}
gpus: {per_node: 4}
security: {ipc_lock: true}
image: i
network: {rdma: {enabled: true, rails: [{network: a, resource: x.com/a}]}}
"""


@pytest.fixture(autouse=True)
def _of_some_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kubeconfig of a cluster that no test reaches."""
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path, "https://api.nobody.example.com:6443")))


def lockstep(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["lockstep", "cluster", "calibrate", *arguments])
    try:
        return main()
    except SystemExit as ended:
        return int(ended.code or 0)


def test_bus_bandwidth_is_that_of_nccl_tests_in_decimal_gigabytes() -> None:
    point = Point(bytes=10**9, microseconds=10_000, ranks=4)
    assert (point.algorithm_gbs, point.bus_gbs) == (100.0, 150.0)


def test_points_are_found_in_a_log_with_prefixes_of_ranks() -> None:
    assert point_in('[node 0 rank 0] sweep point: {"bytes": 4, "microseconds": 5, "ranks": 2}') == Point(4, 5, 2)
    assert point_in("NCCL INFO something") is None
    assert is_done("[node 0 rank 0] sweep done") and not is_done("sweep point: 1")


@pytest.mark.parametrize(
    ("mode", "transport", "gpus", "most"),
    [(FabricMode.AUTO, "RDMA", 4, 2**30), (FabricMode.TCP, "TCP", 4, 2**30), (FabricMode.TCP, "TCP", 0, 2**24)],
)
def test_the_job_runs_the_agents_own_sweep_on_the_profiles_nodes(mode: FabricMode, transport: str, gpus: int, most: int) -> None:
    profile = parse_cluster_file(RDMA_FILE.replace("per_node: 4", f"per_node: {gpus}"), "c").profile
    resolved = resolve(sweep_job(profile.spec, None, mode), profile)
    assert resolved.command == ("python3", "/lockstep/agent.pyz", "sweep", "--least", str(MIB), "--most", str(most))
    assert (resolved.nodes, resolved.gpus_per_node, resolved.transport.value) == (2, gpus, transport)


def test_its_pods_get_onto_tainted_nodes_with_private_images_and_the_gpus_runtime() -> None:
    said = 'pod: {tolerations: [{key: team, operator: Exists}], image_pull_secrets: "login", runtime_class: nvidia}\n'
    profile = parse_cluster_file(RDMA_FILE + said, "c").profile
    pod = json.loads(prepare(sweep_job(profile.spec, 2, FabricMode.AUTO), profile, "n").frozen.template)["pod"]["spec"]
    assert pod["tolerations"][0] == {"key": "team", "operator": "Exists"}
    assert (pod["imagePullSecrets"], pod["runtimeClassName"]) == ([{"name": "login"}], "nvidia")


def test_it_leaves_no_claim_behind() -> None:
    profile = parse_cluster_file(RDMA_FILE, "c").profile
    run = without_claims(prepare(sweep_job(profile.spec, 2, FabricMode.AUTO), profile, "n"))
    template = json.loads(run.frozen.template)
    volumes = {volume["name"]: volume for volume in template["pod"]["spec"]["volumes"]}
    mounted = {mount["name"] for mount in template["pod"]["spec"]["containers"][0]["volumeMounts"]}
    assert template["claims"] == [] and mounted - volumes.keys() == {"lockstep-run"}  # its name is known later
    assert [name for name, volume in volumes.items() if "persistentVolumeClaim" in volume] == []


def test_pods_for_measurements_of_pairs_wait_without_an_agent_and_end_at_once() -> None:
    profile = parse_cluster_file(RDMA_FILE, "c").profile
    run = without_agents(without_claims(prepare(sweep_job(profile.spec, 2, FabricMode.AUTO), profile, "n")))
    (container,) = json.loads(run.frozen.template)["pod"]["spec"]["containers"]
    assert "agent.pyz" not in json.dumps(container["command"])
    process = subprocess.Popen(
        [*container["command"][:-1], container["command"][-1].replace("signal.pause", "print('waits', flush=True); signal.pause")],
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stdout.readline() == b"waits\n"
    process.terminate()
    assert process.wait(10) == 0  # (-15 would be the kernel's default, which a pod's first process doesn't have)
    process.stdout.close()


@pytest.mark.parametrize("name", ["barcelona", "nerc-production", "local", "template"])
def test_only_the_section_of_the_file_changes(name: str) -> None:
    text = (ROOT / "clusters" / f"{name}.yaml").read_text()
    before = parse_cluster_file(text, name)
    measured = calibration_of(POINTS, "TCP", 2, "2026-11-21")
    once = with_section(text, "calibration", replaced(before.calibration, measured))
    after = parse_cluster_file(once, name)
    assert (after.cluster, after.profile) == (before.cluster, before.profile)
    assert measured in after.calibration and len(after.calibration) == len(before.calibration) + 1
    assert with_section(once, "calibration", after.calibration) == once
    kept = text[: text.index("\ncalibration:")] if "\ncalibration:" in text else text
    assert once.startswith(kept.rstrip("\n"))


def test_a_section_in_the_middle_keeps_what_is_behind_it() -> None:
    text = (
        "cluster: {name: c, namespace: n}\ncalibration:\n- {transport: RDMA, nodes: 2, ranks: 2, day: '2026-01-01', sweep: [{bytes: 1,"
        " busbw: '1'}]}\n\n# GPUs\ngpus: {per_node: 4}\n"
    )
    found = parse_cluster_file(text, "c")
    measured = replaced(found.calibration, calibration_of(POINTS, "TCP", 2, "2026-11-21"))
    changed = with_section(text, "calibration", measured)
    after = parse_cluster_file(changed, "c")
    assert [one.transport.value for one in after.calibration] == ["RDMA", "TCP"]
    assert changed.endswith("\n\n# GPUs\ngpus: {per_node: 4}\n") and after.profile == found.profile


def test_a_new_figure_takes_the_place_of_the_one_of_its_transport() -> None:
    old, new = calibration_of(POINTS, "TCP", 2, "2026-11-20"), calibration_of(POINTS[:1], "TCP", 3, "2026-11-21")
    assert replaced([old], new) == [new]


def test_the_threshold_that_is_offered_is_at_the_size_that_preflight_takes() -> None:
    assert suggested_threshold(POINTS, gpus=True) == "150"
    assert suggested_threshold(POINTS, gpus=False) == "2.9"
    assert suggested_threshold(POINTS[:1], gpus=False) is None
    source = (ROOT / "workspace/lockstep_gang/agent/preflight/allreduce_rank.py").read_text()
    assert "GPU_BYTES = 256 * 1024 * 1024" in source and re.search(r"CPU_BYTES = 8 \* 1024 \* 1024", source)


def measuring(points: tuple[Point, ...]) -> Any:
    async def sweep(runs: Any, job: Any, show: Any) -> Sweep:
        for point in points:
            show(point)
        return Sweep(points, "RDMA", 2)

    return sweep


def test_the_table_is_printed_and_the_file_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shortresults, "sweep", measuring(POINTS))
    path = tmp_path / "c.yaml"
    path.write_text(RDMA_FILE)
    assert lockstep(monkeypatch, str(path), "--save") == 0
    told = capsys.readouterr().out
    assert "all-reduce over 8 ranks" in told and re.search(r"256 MiB +2500 us +107\.4 +187\.9\n", told)
    assert 'network.minimum_busbw: "150" in the cluster file' in told
    stored = parse_cluster_file(path.read_text(), "c").calibration[0]
    assert (stored.ranks, stored.sweep[-1].bytes, stored.sweep[-1].busbw) == (8, 256 * MIB, "187.9")


def test_unless_it_is_asked_for_the_file_stays_as_it_is_and_how_to_ask_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shortresults, "sweep", measuring(POINTS))
    path = tmp_path / "c.yaml"
    path.write_text(RDMA_FILE)
    assert lockstep(monkeypatch, str(path)) == 0
    assert path.read_text() == RDMA_FILE and f"Nothing was stored; --save writes it into {path}" in capsys.readouterr().out
    assert lockstep(monkeypatch, str(path), "-o", "json") == 0
    assert path.read_text() == RDMA_FILE and json.loads(capsys.readouterr().out)["transport"] == "RDMA"


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (Failed("the sweep ended"), 1, "the sweep ended"),
        (ConfigError("no account"), 2, "no account"),
    ],
)
def test_how_it_ends_badly(
    error: BaseException, code: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def sweep(*_: Any) -> Sweep:
        raise error

    monkeypatch.setattr(shortresults, "sweep", sweep)
    path = tmp_path / "c.yaml"
    path.write_text(RDMA_FILE)
    assert lockstep(monkeypatch, str(path)) == code
    assert words in capsys.readouterr().err and path.read_text() == RDMA_FILE


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--mode", "ib"), ""),
    ],
)
def test_what_can_not_be_asked(
    arguments: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert lockstep(monkeypatch, "barcelona", *arguments) == 2
    assert words in capsys.readouterr().err


def test_one_node_has_no_network_to_measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.yaml").write_text("cluster: {name: c, namespace: n}\nimage: i\ngpus: {default_nodes: 1}\n")
    assert lockstep(monkeypatch, str(tmp_path / "c.yaml")) == 2
    assert "crosses no network: use --nodes 2" in capsys.readouterr().err


class Tensor(list[float]):
    """As much of a tensor as the sweep asks for."""

    is_cuda = False

    def numel(self) -> int:
        return len(self)

    def item(self) -> float:
        return self[0]


def test_a_rank_measures_every_size_and_rank_zero_tells(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    ended: list[str] = []
    dist = types.SimpleNamespace(
        ReduceOp=types.SimpleNamespace(MAX="max"), init_process_group=ended.append, barrier=lambda: None,
        all_reduce=lambda tensor, op: None, get_world_size=lambda: 2, get_rank=lambda: 0,
            destroy_process_group=lambda: ended.append("ended"),
    )  # fmt: skip
    torch = types.SimpleNamespace(
        device=lambda *_: "cpu", ones=lambda count, device: Tensor([1.0] * count), tensor=lambda values, **_: Tensor(values), float64=None
    )
    monkeypatch.setitem(sys.modules, "torch", torch)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "torch.distributed", dist)  # type: ignore[arg-type]
    monkeypatch.setenv("GPUS_PER_NODE", "0")
    assert agent(["sweep", "--least", "1024", "--most", "4096"]) == 0
    lines = capsys.readouterr().out.splitlines()
    points = [point_in(line) for line in lines]
    assert [point.bytes for point in points if point] == [1024, 2048, 4096] and is_done(lines[-1]) and ended == ["gloo", "ended"]


def test_sizes_double() -> None:
    assert list(sizes(1, 9)) == [1, 2, 4, 8]
