"""`lockstep cluster calibrate --pairs` as people type it; the measurement itself is a stand-in."""

from __future__ import annotations

import json
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from lockstep.api.files.clusterfile import parse_cluster_file
from lockstep.api.job import TrainingJob
from lockstep.cli.main import main
from lockstep.plan.cluster.hardware import MeasuredRail, NodeHardware, RailEnd
from lockstep.plan.cluster.pairs import PairRate, PairsMeasured, Way
from support.api_stub import kubeconfig

FILE = "cluster: {name: c, namespace: n, platform: kubernetes}\nimage: i\ngpus: {per_node: 4, default_nodes: 3}\n"
RDMA = "security: {ipc_lock: true}\nnetwork: {rdma: {enabled: true, rate: 400, gid_index: 3, rails: [{network: a}]}}\n"

NODE = NodeHardware("h", None, (), (), ())


class Asked:
    """Jobs and choices of the measurements that were asked for."""

    def __init__(self) -> None:
        self.jobs: list[TrainingJob] = []
        self.ways: list[Way] = []


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Asked:
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path, "https://api.nobody.example.com:6443")))
    asked = Asked()

    async def measure(runs: Any, job: TrainingJob, way: Way) -> PairsMeasured:
        asked.jobs.append(job)
        asked.ways.append(way)
        runs._say("lockstep: working")
        rates = tuple(PairRate("net1", one, other, 5.0 if 1 in (one, other) else 23.0, 25.0) for one, other in permutations(range(3), 2))
        rail = MeasuredRail("net1", {node: RailEnd("net1", f"10.1.0.{node}", 25.0, 9000) for node in range(3)})
        return PairsMeasured(
            {node: f"lab{node}" for node in range(3)},
            dict.fromkeys(range(3), NODE),
            (rail,),
            rates,
            "sockets",
        )

    monkeypatch.setattr("lockstep.platforms.kubernetes.shortruns.PodRuns.pairs", measure)
    return asked


def lockstep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str, *arguments: str, text: str = FILE) -> int:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    monkeypatch.setattr("sys.argv", ["lockstep", "cluster", verb, str(path), *arguments])
    try:
        return main()
    except SystemExit as ended:
        return int(ended.code or 0)


def test_the_slow_node_is_told_and_only_a_stated_share_fails(
    asked: Asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert lockstep(tmp_path, monkeypatch, "calibrate", "--pairs") == 0
    out, err = capsys.readouterr()
    assert (
        "warning  net1: lab1 (net1): 5 Gb/s, 20% of the line rate to and from 2 other nodes; the other pairs 23 Gb/s\n         → look at"
        in out
    )
    assert "lockstep: working" in err and "lockstep: working" not in out
    assert asked.jobs[0].spec.nodes == 3 and asked.ways == [Way()]
    assert lockstep(tmp_path, monkeypatch, "calibrate", "--pairs", "--fail-below", "0.15") == 0
    capsys.readouterr()
    assert lockstep(tmp_path, monkeypatch, "calibrate", "--pairs", "--fail-below", "0.5") == 1
    assert "4 of 6 measurements are below 50% of the line rate" in capsys.readouterr().out


def test_scripts_get_json_and_the_same_exit_code(
    asked: Asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert lockstep(tmp_path, monkeypatch, "calibrate", "--pairs", "--fail-below", "0.5", "-o", "json") == 1
    values = json.loads(capsys.readouterr().out)
    assert (values["failBelow"], values["below"], len(values["pairs"]), values["findings"][0]["subject"]) == (0.5, 4, 6, "net1")


def test_an_rdma_cluster_states_tool_line_rate_and_gid(asked: Asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert lockstep(tmp_path, monkeypatch, "calibrate", "--pairs", text=FILE + RDMA) == 0
    assert lockstep(tmp_path, monkeypatch, "calibrate", "--pairs", "--mode", "tcp", "--line-rate", "25", text=FILE + RDMA) == 0
    assert asked.ways == [Way(True, 400.0, 3), Way(False, 25.0, 3)]


@pytest.mark.parametrize("option", [("--fail-below", "0.8"), ("--line-rate", "25")])
def test_options_of_the_other_measurement_are_refused(
    asked: Asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: tuple[str, str]
) -> None:
    assert lockstep(tmp_path, monkeypatch, "calibrate", *option) == 2
    assert f"{option[0]} needs --pairs" in capsys.readouterr().err and asked.jobs == []


def test_the_figures_are_kept_for_plan_in_one_section_of_the_file(
    asked: Asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f"# mine\n{FILE}# the end\n"
    assert lockstep(tmp_path, monkeypatch, "calibrate", "--pairs", "--save", text=text) == 0
    stored = (tmp_path / "c.yaml").read_text()
    (figure,) = parse_cluster_file(stored, "c.yaml").pairs
    assert (figure.transport.value, figure.nodes, figure.least_gigabits, figure.usual_gigabits) == ("TCP", 3, "5", "23")
    assert stored.startswith(text) and "Stored in " in capsys.readouterr().out
    assert lockstep(tmp_path, monkeypatch, "calibrate", "--pairs", "--save", text=stored) == 0
    assert (tmp_path / "c.yaml").read_text() == stored


def test_sockets_over_rdma_rails_are_not_kept_as_what_a_job_gets(
    asked: Asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert lockstep(tmp_path, monkeypatch, "calibrate", "--pairs", "--save", text=FILE + RDMA) == 1
    assert "nothing was stored: sockets over RDMA rails" in capsys.readouterr().err
    assert lockstep(tmp_path, monkeypatch, "calibrate", "--pairs", "--save", "--mode", "tcp", text=FILE + RDMA) == 0
    assert parse_cluster_file((tmp_path / "c.yaml").read_text(), "c.yaml").pairs[0].transport.value == "TCP"


def test_one_node_has_no_pair(asked: Asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text = FILE.replace("default_nodes: 3", "default_nodes: 1")
    assert lockstep(tmp_path, monkeypatch, "calibrate", "--pairs", text=text) == 2
    assert "one node has no pair: use --nodes 2" in capsys.readouterr().err
