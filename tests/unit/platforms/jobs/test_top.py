"""`lockstep top`: what is shown of a job, and how its nodes are asked."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lockstep.cli.jobs.top import Form, Looks, _show, within
from lockstep.cli.main import app, main
from lockstep.kube import exec as kube_exec
from lockstep.kube.cluster import ApiError
from lockstep.kube.exec import NotRunning, PodPlace
from lockstep.plan.pages.top import overview, snapshot, sparkline, top_page
from lockstep.platforms.files.reader import NoReader
from lockstep.platforms.jobs import top as module
from lockstep.platforms.jobs.top import NodesWatch, Question, curve_on_volume, nodes_at, nodes_in_pods, of_hosts, of_job, window_of
from lockstep.programs import NotStarted
from lockstep_gang.contract.report import Metric, TrainerReport, report_file_text
from lockstep_gang.contract.run import JobIdentity
from support.fake_cluster import FakeCluster
from support.process_place import ProcessPlace
from unit.plan.reconcile.test_reconcile import report
from unit.platforms.jobs.test_logs import local  # noqa: F401 (a fixture)

OPEN_MAX = 64

Object = dict[str, Any]
NOW = datetime.fromisoformat("2026-11-21T12:00:00+00:00").timestamp()
STATUS: Object = {
    "conditions": [
        {"type": "Progressing", "status": "True", "reason": "Running", "message": "all ranks run"},
        {"type": "FabricVerified", "status": "True", "reason": "RDMA", "message": "IB over 4 HCAs on every rank"},
    ],
    "ranks": {"desired": 8, "ready": 8, "order": [1, 0]},
    "attempts": 2,
    "restarts": 1,
    "goodput": {"percentage": 93},
    "cluster": {"name": "barcelona", "transport": "RDMA"},
    "fabric": {"transport": "RDMA"},
    "checkpoint": {"lastCommittedStep": 100, "lastCommitTime": "2026-11-21T11:58:00Z"},
    "trainer": {
        "step": 120, "totalSteps": 400, "progressPercentage": 30, "estimatedRemainingSeconds": 720,
        "metrics": [{"name": "loss", "value": "1.84"}, {"name": "stepSeconds", "value": "1.23"},
            {"name": "tokensPerSecond", "value": "8123"},
                    {"name": "peakMemoryBytes", "value": "36721970381"}],
    },
}  # fmt: skip
JOB: Object = {"metadata": {"name": "x", "namespace": "ns", "uid": "u"}, "spec": {"nodes": 2}, "status": STATUS}
PODS = [{"metadata": {"name": f"x-{node}"}, "spec": {"nodeName": f"gpu-{node}"}} for node in (1, 0)]
ANSWERS: dict[int, Object] = {
    0: {
        "curve": {"1": {"loss": 2.31}, "60": {"loss": 2.0}, "120": {"loss": 1.84}},
        "gigabits": {"eth0": [0.0001, 0.0001], "net1": [88.24, 87.9], "mlx5_6": [0.512, 0.25]},
        "memory": {"bytes": 12 << 30, "limitBytes": 64 << 30},
        "cpu": {"cores": 7.25, "limitCores": 32.0},
        "gpus": [
            {"index": 0, "bytes": 34 << 30, "limitBytes": 80 << 30, "percentage": 97, "celsius": 71, "watts": 655, "limitWatts": 700},
            {"index": 1, "bytes": 0, "limitBytes": 80 << 30},
        ],
        "rankLoads": [{"rank": 4, "cores": 1.04, "bytes": 3 << 30, "gpu": 0}],
        "ranks": [4, 5, 6, 7],
    },
    1: {"problem": "Forbidden"},
}


def shown(job: Object = JOB, answers: dict[int, Object] | None = None) -> str:
    return "\n".join(top_page(snapshot(job, PODS, ANSWERS if answers is None else answers), NOW))


@pytest.mark.parametrize(
    "part",
    [
        "x  Running  step 120/400, 30%, 12m left, 8 of 8 ranks",
        "2.31 at step 1, 1.84 at step 120, least 1.84",
        "1.23 s a step, 8123 tokens/s, peak memory 34.2 GiB",
        "fabric      RDMA, verified: IB over 4 HCAs on every rank",
        "checkpoint  step 100, 2m ago",
        "goodput     93% of the pods' time was training; attempt 2, 1 restart",
        "x-0   gpu-0   4-7     7.2 of 32   12 GiB of 64 GiB   net1     88.2      87.9",
        "4      0      1.0   3 GiB    0     97%    34 GiB of 80 GiB   71 °C   655 W of 700",
        "-      0      -     -        1     -      0 B of 80 GiB      -       -",
        "mlx5_6   0.512     0.250",
        "x-1   gpu-1   0-3 ",
        "not seen: x-1: Forbidden",
    ],
)
def test_a_page_has_all_that_is_known_of_a_job_and_its_nodes(part: str) -> None:
    assert part in shown()


def test_a_narrow_terminal_has_fewer_columns_and_every_line_fits() -> None:
    for width in (120, 90, 70, 50):
        lines = list(top_page(snapshot(JOB, PODS, ANSWERS), NOW, width))
        tables = lines[lines.index("") :]
        assert max(map(len, tables)) <= width, width
    assert "TEMP" not in "\n".join(tables) and "LOAD" in "\n".join(tables) and "gpu-0" not in "\n".join(tables)


def test_of_many_ranks_those_that_differ_are_named_first() -> None:
    loads = [{"rank": rank, "cores": 1.0 + rank, "bytes": 1, "gpu": rank % 8} for rank in range(16)]
    gpus = [{"index": index, "bytes": 1, "limitBytes": 2, "percentage": 90 + index, "celsius": 60 + index} for index in range(8)]
    answers = {node: {"rankLoads": loads[8 * node : 8 * node + 8], "gpus": gpus} for node in range(2)}
    assert (
        "of 16 ranks: load 90% (rank 0) to 97% (rank 15), temperature at most 67 °C (rank 15), CPU 1.0 (rank 0) to 16.0 cores (rank 15)"
        in shown(answers=answers)
    )


def test_a_tool_that_is_absent_is_named_with_the_nodes_that_lack_it() -> None:
    text = shown(answers={node: {"gpuProblem": "nvidia-smi is not on the PATH"} for node in range(2)})
    assert "x-0, x-1: nvidia-smi is not on the PATH" in text


def test_a_page_beyond_the_terminal_says_how_much_is_missing() -> None:
    assert within(["a", "b", "c"], 3) == ["a", "b", "c"]
    assert within(["a", "b", "c", "d"], 3) == ["a", "b", "… and 2 lines: enlarge the terminal, or use --once"]


def test_of_a_complete_job_nothing_is_left_and_no_rank_is_missed() -> None:
    ended = [{"type": "Progressing", "status": "False", "reason": "Complete", "message": "the job is complete"}]
    assert shown({**JOB, "status": {**STATUS, "conditions": ended}}).startswith("x  Complete  step 120/400, 30%\n")


def test_losses_of_an_attempt_that_came_further_than_this_one_are_not_shown() -> None:
    again = {**JOB, "status": {**STATUS, "trainer": {**STATUS["trainer"], "step": 70}}}
    assert "2.31 at step 1, 2 at step 60, least 2" in shown(again)


def test_an_idle_nic_is_left_out_beside_busy_ones_and_shown_when_all_are() -> None:
    assert "eth0" not in shown()
    assert "eth0   0         0" in shown(answers={0: {"gigabits": {"eth0": [0.0, 0.0]}}})


def test_a_rank_that_does_not_run_is_named_where_it_should() -> None:
    assert "4-7 (2 not running)" in shown(answers={0: {"ranks": [4, 5]}})


def test_a_job_of_which_nothing_is_known_yet_has_a_page_too() -> None:
    bare = {"metadata": {"name": "x", "namespace": "ns"}, "spec": {}}
    text = "\n".join(top_page(snapshot(bare, (), {}), NOW))
    assert "Unknown" in text and "no status yet" in text and "fabric      not known yet" in text


def test_a_snapshot_is_json_and_keeps_every_nic() -> None:
    found = json.loads(json.dumps(snapshot(JOB, PODS, ANSWERS)))
    assert [node["node"] for node in found["nodes"]] == [0, 1]
    assert found["nodes"][0]["gigabits"]["eth0"] == [0.0001, 0.0001] and found["loss"][-1] == [120, 1.84]
    assert found["nodes"][0]["ranks"] == [4, 5, 6, 7] == found["nodes"][0]["ranksRunning"]


@pytest.mark.parametrize(
    ("values", "width", "bars"),
    [
        ([], 10, ""),
        ([2.0], 10, "▁"),
        ([1.0, 1.0, 1.0], 10, "▁▁▁"),
        ([8, 7, 6, 5, 4, 3, 2, 1], 8, "█▇▆▅▄▃▂▁"),
        ([8, 8, 1, 1], 2, "█▁"),
    ],
)
def test_a_curve_is_drawn_from_its_least_to_its_greatest(values: list[float], width: int, bars: str) -> None:
    assert sparkline(values, width) == bars


def test_ten_thousand_steps_fit_the_width() -> None:
    assert len(sparkline([float(number) for number in range(10_001)], 57)) == 57


def test_the_overview_has_jobs_that_run_first() -> None:
    other = {"metadata": {"name": "a", "namespace": "ns"}, "spec": {}}
    header, first, second = overview([other, JOB])
    assert header.startswith("NAME") and second.startswith("a ")
    assert first.split() == ["x", "Running", "120/400", "1.84", "1.23", "s", "8123", "12m", "1", "93%", "RDMA"]


QUESTION = of_job("x", "/workspace/runs/x")


class Asked:
    """Programs in pods: `broken` ones don't start, and are told why."""

    def __init__(self, broken: dict[int, Exception]) -> None:
        self.broken, self.started, self.closed = broken, list[int](), 0

    async def start(self, place: PodPlace, question: Question, node: int) -> Asked:
        self.started.append(node)
        if node in self.broken:
            raise self.broken[node]
        return self

    async def answer(self, points: int) -> Object:
        return {"points": points}

    async def close(self) -> None:
        self.closed += 1


def ask(monkeypatch: pytest.MonkeyPatch, asked: Asked, cluster: FakeCluster, times: int = 1) -> list[dict[int, Object]]:
    monkeypatch.setattr(module, "_NodeProgram", asked)
    monkeypatch.setattr(module, "FIRST_SECONDS", 0.0)

    async def look() -> list[dict[int, Object]]:
        async with NodesWatch(nodes_in_pods(cluster.as_cluster, "ns", "x"), QUESTION) as nodes:
            return [await nodes.ask(7) for _ in range(times)]

    return asyncio.run(look())


def running(*names: str) -> FakeCluster:
    status = {"phase": "Running", "containerStatuses": [{"name": "trainer", "state": {"running": {}}}]}
    return FakeCluster(
        *({"kind": "Pod", "metadata": {"name": name, "labels": {"lockstep.dev/job": "x"}}, "spec": {}, "status": status} for name in names)
    )


def test_each_node_has_one_program_for_all_looks_and_the_curve_is_node_0_s(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked({})
    found = ask(monkeypatch, asked, running("x-0", "x-1"), times=3)
    assert found == [{0: {"points": 7}, 1: {"points": 0}}] * 3
    assert (sorted(asked.started), asked.closed) == ([0, 1], 2)


async def test_what_is_measured_is_said_before_it_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, said = Asked({}), list[tuple[str, int]]()
    monkeypatch.setattr(module, "_NodeProgram", asked)
    find = nodes_in_pods(running("x-0", "x-1").as_cluster, "ns", "x")
    async with NodesWatch(find, QUESTION, lambda line: said.append((line, len(asked.started)))) as nodes:
        await nodes.ask(7)
        await nodes.ask(7)
    assert said == [("measuring 2 nodes of job x for 1 s, for their rates", 0)]


def test_a_node_that_cannot_be_asked_says_why_and_the_others_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked({1: NotStarted("you may not run programs in pods")})
    first, second = ask(monkeypatch, asked, running("x-0", "x-1"), times=2)
    assert first[0] == second[0] == {"points": 7}
    assert first[1] == {"problem": "you may not run programs in pods"}
    assert asked.started.count(1) == 2  # and is tried again


@pytest.mark.parametrize("count", [1, 64, 65, 200, 1024])
def test_every_node_of_a_large_job_is_asked_in_its_turn(count: int) -> None:
    turns = [window_of(range(count), turn, OPEN_MAX) for turn in range(-(-(count - 1) // (OPEN_MAX - 1)) or 1)]
    assert set().union(*turns) == set(range(count))
    assert all(len(turn) == min(count, OPEN_MAX) == len(set(turn)) and turn[0] == 0 for turn in turns)


def test_the_nodes_of_a_large_job_are_asked_in_turn_and_the_others_keep_their_last_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked({})
    first, second, third = ask(monkeypatch, asked, running(*(f"x-{node}" for node in range(100))), times=3)
    assert [answer.get("notAsked", False) for answer in first.values()] == [False] * 64 + [True] * 36
    assert not any("notAsked" in answer for answer in second.values()) and {"points": 0} == second[99] == third[40]
    assert second[50] == {"points": 0, "ageSeconds": second[50]["ageSeconds"]}
    assert asked.started.count(0) == 1  # which has the curve
    assert len(asked.started) == asked.closed  # those whose turn is over, too


def test_a_look_that_is_the_only_one_asks_all_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked({})
    monkeypatch.setattr(module, "_NodeProgram", asked)
    monkeypatch.setattr(module, "FIRST_SECONDS", 0.0)

    async def look() -> dict[int, Object]:
        find = nodes_in_pods(running(*(f"x-{node}" for node in range(150))).as_cluster, "ns", "x")
        async with NodesWatch(find, QUESTION) as nodes:
            return await nodes.ask_all(7)

    answers = asyncio.run(look())
    assert len(answers) == 150 and not any("notAsked" in answer for answer in answers.values())
    assert answers[0] == {"points": 7}  # the curve isn't lost with the later rounds


def test_few_programs_are_started_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Asked):
        now = most = 0

        async def start(self, place: PodPlace, question: Question, node: int) -> Asked:
            self.now += 1
            self.most = max(self.most, self.now)
            await asyncio.sleep(0)
            self.now -= 1
            return await super().start(place, question, node)

    asked = Slow({})
    ask(monkeypatch, asked, running(*(f"x-{node}" for node in range(64))))
    assert (len(asked.started), asked.most) == (64, 32)


def test_hosts_are_asked_by_real_programs_and_one_that_breaks_is_no_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_SECONDS", 0.0)
    broken = tmp_path / "python3"
    broken.write_text("#!/bin/sh\necho 'no space left on device' >&2\nexit 1\n")
    broken.chmod(0o755)
    places = [ProcessPlace("host lab0"), ProcessPlace("host lab1", python=(str(broken),))]
    question = of_hosts("lab", [(str(tmp_path / "workspace"), "/datasets"), ("~/x", "~/y")])

    async def look() -> tuple[dict[int, Object], dict[int, Object]]:
        async with NodesWatch(nodes_at(places), question) as nodes:
            return await nodes.ask(0), await nodes.ask(0)

    for answers in asyncio.run(look()):
        assert answers[0]["memory"]["limitBytes"] > 0 and answers[0]["cpu"]["limitCores"] >= 1
        assert answers[0]["disks"][0]["path"] == str(tmp_path / "workspace")
        assert "host lab1" in answers[1]["problem"]


def test_without_the_right_to_see_pods_the_rest_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = running("x-0")
    cluster.refused["Pod"] = ApiError(403, "Forbidden", "no")
    assert ask(monkeypatch, Asked({}), cluster) == [{}]


def curve(monkeypatch: pytest.MonkeyPatch, *problems: Exception) -> tuple[Object, list[str]]:
    """What is read of the volume of a job that has ended, and what is said. `problems`: those of the first looks."""
    left = list(problems)

    @contextlib.asynccontextmanager
    async def beside(*_: object, **__: object) -> AsyncIterator[PodPlace]:
        if left:
            raise left.pop(0)
        yield PodPlace(None, "ns", "x-reader-1", "reader")  # type: ignore[arg-type]

    async def measured(*_: object) -> Object:
        return {"1": {"loss": 2.5}}

    monkeypatch.setattr(module, "beside", beside)
    monkeypatch.setattr(module, "measured", measured)
    said: list[str] = []
    return asyncio.run(curve_on_volume(FakeCluster().as_cluster, "ns", "x", 60, said.append)), said


def test_the_curve_of_a_job_without_pods_comes_from_its_volume(monkeypatch: pytest.MonkeyPatch) -> None:
    assert curve(monkeypatch) == ({"1": {"loss": 2.5}}, [])


def test_a_container_that_has_just_ended_is_looked_at_again_for_its_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kube_exec, "AGAIN_POLL_SECONDS", 0.0)
    assert curve(monkeypatch, NotRunning("it has ended")) == ({"1": {"loss": 2.5}}, [])


def test_a_curve_that_cannot_be_read_leaves_the_page_without_one_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    assert curve(monkeypatch, NoReader("no room")) == ({}, ["the loss curve of x can't be read: no room"])


async def test_one_look_has_closed_all_that_it_opened_when_it_is_over(capsys: pytest.CaptureFixture[str]) -> None:
    order: list[str] = []

    async def looks() -> Looks:
        try:
            yield {}, ["a line"], False
        finally:
            order.append("closed")

    await _show(looks(), Form.TEXT, live=False)
    order.append("over")
    assert order == ["closed", "over"] and capsys.readouterr().out == "a line\n"


def test_a_local_run_is_shown_from_its_folder(local: Path) -> None:  # noqa: F811
    logs = local / "workspace/runs/x/logs"
    (logs / "train_log.jsonl").write_text('{"step": 1, "loss": 3.0}\n{"step": 2, "loss": 2.5, "stepSeconds": 0.25}\n')
    trainer = TrainerReport(step=2, metrics=(Metric("stepSeconds", "0.25"),))
    written = replace(report(trainer=trainer).report, job=JobIdentity("x", "local", "u"))
    (local / "workspace/runs/x/gang/report.json").write_text(report_file_text(written, "2026-01-01T00:00:00Z"))
    done = CliRunner().invoke(app, ["top", "x", "--cluster", str(local)])
    assert done.exit_code == 0, done.exception
    assert (
        "x  Failed  step 2, 0 of 2 ranks\n" in done.output
        and "fabric" not in done.output
        and "3 at step 1, 2.5 at step 2" in done.output
        and "0.25 s a step" in done.output
    )
    told = json.loads(CliRunner().invoke(app, ["top", "x", "--cluster", str(local), "-o", "json"]).output)
    assert told["loss"] == [[1, 3.0], [2, 2.5]] and told["ranks"] == {"desired": 2, "ready": 0}


def test_this_machine_is_shown_without_a_job(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["top", "--cluster", str(tmp_path), "-o", "json"])
    assert done.exit_code == 0, done.exception
    (host,) = json.loads(done.output)["hosts"]
    assert len(host["load"]) == 3 and host["cpu"]["cores"] >= 0 and host["disks"][0]["freeBytes"] > 0
    shown = CliRunner().invoke(app, ["top", "--cluster", str(tmp_path)]).output
    assert shown.startswith("HOST ") and host["host"] in shown


@pytest.mark.parametrize("color", [True, False], ids=["with colors", "NO_COLOR"])
def test_in_a_terminal_it_is_live_until_ctrl_c(local: Path, color: bool) -> None:  # noqa: F811
    (local / "workspace/runs/x/gang/end.json").unlink()
    terminal, other = pty.openpty()
    environment = (
        {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
        | {"TERM": "xterm-256color"}
        | ({} if color else {"NO_COLOR": "1"})
    )
    command = [sys.executable, "-m", "lockstep.cli.main", "top", "x", "--cluster", str(local)]
    with (local / "workspace/runs/x/local.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as a run that lives does
        process = subprocess.Popen(command, stdin=other, stdout=other, stderr=other, env=environment, start_new_session=True)
        os.close(other)
        try:
            seen = b""
            while seen.count(b"Running") < 2:  # the view was drawn again
                seen += os.read(terminal, 4096)
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(OSError):  # a terminal that nobody has open any more
                while data := os.read(terminal, 4096):
                    seen += data
            assert process.wait(60) == 130
        finally:
            process.kill()
            process.wait()
            os.close(terminal)
    assert b"Traceback" not in seen
    assert (b"\x1b[32m" in seen) is color


@pytest.mark.parametrize("verb", [["top"], ["top", "x"], ["logs", "x"], ["logs", "x", "-f"]], ids=" ".join)
def test_without_a_cluster_a_verb_says_so_in_one_sentence(
    verb: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {
        "apiVersion": "v1", "kind": "Config", "current-context": "c", "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:9"}}], "users": [{"name": "u", "user": {}}],
    }  # fmt: skip
    (tmp_path / "kubeconfig").write_text(json.dumps(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    monkeypatch.setattr("sys.argv", ["lockstep", *verb])
    assert main() == 1
    told = capsys.readouterr().err
    assert told.startswith("lockstep: the c") and "127.0.0.1" in told


@pytest.mark.parametrize("verb", [["get"], ["top", "x"], ["logs", "x"]], ids=" ".join)
def test_without_the_right_to_see_jobs_a_verb_says_who_may_grant_it(
    verb: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refusal = ApiError(403, "Forbidden", 'trainingjobs.lockstep.dev is forbidden: User "me" cannot get resource')

    def refuse(*_: Any, **__: Any) -> None:
        raise refusal

    monkeypatch.setattr("lockstep.cli.shared.jobargs.TargetOptions.target", refuse)
    monkeypatch.setattr("sys.argv", ["lockstep", *verb])
    assert main() == 1
    told = capsys.readouterr().err
    assert told.startswith("lockstep: trainingjobs.lockstep.dev is forbidden") and "roles view and edit" in told
    assert len(told.splitlines()) == 1
