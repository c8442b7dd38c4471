"""A dev environment with real agents: what people type in a pod, and what they hear, as processes on loopback."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep_gang.contract.interactive import Interactive
from lockstep_gang.contract.run import WhenDone
from lockstep_gang.package import write_zipapp
from lockstep_spec.choices import StorageMode
from unit.gang.cases import WORKSPACE, Gang, gang, gone

SAY = "import os, sys, signal, time\nR = os.environ['RANK']\nF = os.environ['FOLDER']\n"
FOREVER = SAY + "open(f'{F}/pid-{R}', 'w').write(str(os.getpid()))\nprint('here', R, flush=True)\nsignal.pause()\n"


@pytest.fixture
def agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gang]:
    """Two nodes that wait for what they are asked to run."""
    with gang(tmp_path) as made:
        made.write(SAY, command=(), interactive=Interactive(), storage=StorageMode.SHARED, when_done=WhenDone.WAIT)
        for node in (0, 1):
            monkeypatch.setenv("LOCKSTEP_SOCKET", str(tmp_path / f"{node}.sock"))
            made.start(node)
        made.until("node 1 is here")
        yield made


def ask(agents: Gang, node: int, *words: str) -> subprocess.Popen[str]:
    """What somebody types in the pod of this node, in the workspace."""
    environment = {**os.environ, "PYTHONPATH": str(WORKSPACE), "LOCKSTEP_SOCKET": str(agents.folder / f"{node}.sock")}
    command = [sys.executable, "-S", "-m", "lockstep_gang.agent.main", *words]
    return subprocess.Popen(
        command, env=environment, cwd=agents.folder, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def told(agents: Gang, node: int, *words: str) -> tuple[int, str]:
    """Exit code, and all that was shown."""
    process = ask(agents, node, *words)
    output, _ = process.communicate(timeout=90)
    return process.returncode, output


def write(agents: Gang, text: str, name: str = "a.py") -> None:
    (agents.folder / name).write_text(text)


def until_here(process: subprocess.Popen[str], ranks: int = 2) -> None:
    for line in process.stdout:
        ranks -= "] here" in line
        if not ranks:
            return
    raise AssertionError("it ended before all ranks were here")


def pids(agents: Gang) -> list[int]:
    return [int((agents.folder / f"pid-{rank}").read_text()) for rank in (0, 1)]


def test_a_script_runs_on_all_nodes_and_its_output_is_shown_and_logged(agents: Gang) -> None:
    write(agents, SAY + "print('hello', R, os.environ['WORLD_SIZE'], sys.argv[1:], os.getcwd())")
    for node in (0, 1):
        code, output = told(agents, node, "run", "a.py", "--epochs", "3", "two words")
        assert code == 0, output
        for rank in (0, 1):
            assert f"[rank {rank}] hello {rank} 2 ['--epochs', '3', 'two words'] {agents.folder}" in output
    agents.until("[rank 1] hello 1", node=0)
    agents.until("[rank 1] hello 1", node=1)
    assert [record["outcome"] for record in agents.record("attempts.jsonl")] == ["Complete", "Complete"]


def test_the_exit_code_is_that_of_the_rank_that_failed_first_and_the_environment_goes_on(agents: Gang) -> None:
    write(agents, SAY + "print('about to fail', R, flush=True)\nif R == '1': sys.exit(7)\nsignal.pause()")
    code, output = told(agents, 0, "run", "a.py")
    assert code == 7, output
    assert "[lockstep] rank 1 on node 1 exited with 7" in output
    write(agents, "print('well')")
    assert told(agents, 0, "run", "a.py")[0] == 0
    assert [record["outcome"] for record in agents.record("attempts.jsonl")] == ["Failed", "Complete"]
    assert {record["budget"]["failures"] for record in agents.record("attempts.jsonl")} == {0}


def test_ctrl_c_stops_every_rank(agents: Gang) -> None:
    write(agents, FOREVER)
    process = ask(agents, 1, "run", "a.py")
    until_here(process)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=90)
    assert process.returncode == 130, output
    assert all(gone(pid, 30) for pid in pids(agents))


def test_ctrl_c_twice_kills_ranks_that_go_on(agents: Gang) -> None:
    write(
        agents,
        FOREVER.replace("signal.pause()", "signal.signal(signal.SIGTERM, lambda *_: print('saving', flush=True))\nwhile 1: signal.pause()"),
    )
    process = ask(agents, 0, "run", "a.py")
    until_here(process)
    process.send_signal(signal.SIGINT)
    agents.until("saving", seconds=60)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=90)
    assert process.returncode == 130
    assert all(gone(pid, 30) for pid in pids(agents))


@pytest.mark.parametrize("options", [(), ("--until-eof",)])
def test_a_run_ends_when_whoever_asked_for_it_is_gone(agents: Gang, options: tuple[str, ...]) -> None:
    write(agents, FOREVER)
    process = ask(agents, 1, "run", *options, "a.py")
    until_here(process)
    if options:
        process.stdin.close()
        process.stdin = None
    else:
        process.kill()
    process.communicate(timeout=90)
    assert all(gone(pid, 30) for pid in pids(agents))
    agents.until("a.py was stopped: the shell that started it is gone")


def test_a_detached_run_goes_on_and_can_be_stopped_from_another_node(agents: Gang) -> None:
    write(agents, FOREVER)
    code, output = told(agents, 1, "run", "--detach", "a.py")
    assert code == 0
    assert "a.py runs as attempt 1; its output is in the log of node 0" in output
    agents.until("] here", node=1)
    assert told(agents, 0, "stop") == (0, "[lockstep] asked a.py to stop\n")
    assert all(gone(pid, 30) for pid in pids(agents))
    agents.until("a.py was stopped")
    assert told(agents, 0, "stop") == (1, "[lockstep] nothing runs\n")


def test_a_second_run_is_refused_and_says_what_runs(agents: Gang) -> None:
    write(agents, FOREVER)
    first = ask(agents, 0, "run", "--by", "ada", "a.py", "--epochs", "3")
    until_here(first)
    code, output = told(agents, 1, "run", "a.py")
    assert code == 1
    assert "refused: a.py --epochs 3 runs since" in output
    assert "asked for by ada on node 0" in output
    assert not any(gone(pid, 0) for pid in pids(agents))
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=90)


def test_what_a_node_lacks_is_said_with_its_number_before_anything_starts(agents: Gang) -> None:
    code, output = told(agents, 0, "run", "absent.py")
    assert code == 78
    assert (
        f"node 0 has no {agents.folder}/absent.py: `lockstep sync` sends your workspace to every node; nor can 1 more node run it" in output
    )
    write(agents, "print('hi')", "plain.txt")
    assert "is not executable: `chmod +x` it" in told(agents, 0, "run", "plain.txt")[1]
    assert "no program nonsense-here" in told(agents, 0, "run", "nonsense-here")[1]


def test_programs_and_modules_run_too(agents: Gang) -> None:
    code, output = told(agents, 0, "run", "--", "python3", "-c", "import os; print('rank', os.environ['RANK'])")
    assert code == 0
    assert "[rank 1] rank 1" in output
    assert "[rank 1] Linux" in told(agents, 0, "run", "-m", "platform")[1]


def test_deepspeed_s_local_rank_is_given_to_a_script_that_takes_it(agents: Gang) -> None:
    write(
        agents,
        "import argparse, sys\np = argparse.ArgumentParser()\np.add_argument('--local_rank')\np.parse_known_args()\nprint(sys.argv[1:])",
    )
    assert "[rank 1] ['--local_rank=0', '--epochs', '3']" in told(agents, 0, "run", "a.py", "--epochs", "3")[1]


def test_a_shell_gets_the_variables_of_a_rank(agents: Gang) -> None:
    code, output = told(agents, 1, "env")
    assert code == 0
    assert {"export RANK=1", "export WORLD_SIZE=2", "export LOCAL_RANK=0", "export NODE_RANK=1"} <= set(output.splitlines())


def test_the_hostfile_has_every_node(agents: Gang) -> None:
    assert (agents.folder / "hostfile").read_text() == "127.0.0.1 slots=1\n" * 2


def test_the_socket_is_for_the_pod_s_own_user(agents: Gang) -> None:
    assert (agents.folder / "0.sock").stat().st_mode & 0o777 == 0o600


def test_without_an_agent_it_says_so(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(WORKSPACE), "LOCKSTEP_SOCKET": str(tmp_path / "none.sock")}
    ended = subprocess.run(
        [sys.executable, "-S", "-m", "lockstep_gang.agent.main", "run", "a.py"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1
    assert "no agent answers at" in ended.stderr


SEED = (
    "import argparse, os\nparser = argparse.ArgumentParser()\nparser.add_argument('--local_rank', type=int, default=0)\n"
    "parser.add_argument('--deepspeed_config')\nparser.add_argument('--epochs')\noptions = parser.parse_args()\n"
    "print('seen', options.local_rank == int(os.environ['LOCAL_RANK']), options.deepspeed_config, options.epochs)\n"
)


def launch(agents: Gang, *words: str) -> tuple[int, str]:
    """What is typed in /workspace of node 0's pod."""
    write_zipapp(agents.folder / "agent.pyz")
    shutil.copy(WORKSPACE / "launch_deepspeed.sh", agents.folder)
    environment = {**os.environ, "LOCKSTEP_AGENT": str(agents.folder / "agent.pyz"), "LOCKSTEP_SOCKET": str(agents.folder / "0.sock")}
    ended = subprocess.run(
        ["./launch_deepspeed.sh", *words],
        env=environment, cwd=agents.folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False, timeout=60,
    )  # fmt: skip
    return ended.returncode, ended.stdout


def test_launch_deepspeed_gives_a_script_what_deepspeed_s_launcher_would(agents: Gang) -> None:
    write(agents, SEED, "train_multi_node.py")
    write(agents, "{}", "ds_config.json")
    code, output = launch(agents)
    assert code == 0, output
    assert f"[rank 1] seen True {agents.folder}/ds_config.json None" in output
    assert "seen True other.json 3" in launch(agents, "train_multi_node.py", "--epochs", "3", "--deepspeed_config", "other.json")[1]
    write(agents, "import sys\nprint('plain', sys.argv[1:])", "plain.py")
    assert "[rank 1] plain ['--epochs', '3']" in launch(agents, "plain.py", "--epochs", "3")[1]


def test_launch_deepspeed_says_what_is_missing(agents: Gang) -> None:
    code, output = launch(agents)
    assert code == 1
    assert f"there is no train_multi_node.py in {agents.folder}" in output
