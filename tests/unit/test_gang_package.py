"""The agent as one file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from lockstep_gang.package import write_zipapp
from unit.gang_cases import gang


def test_the_same_sources_make_the_same_bytes(tmp_path: Path) -> None:
    write_zipapp(tmp_path / "one.pyz")
    write_zipapp(tmp_path / "two.pyz")
    assert (tmp_path / "one.pyz").read_bytes() == (tmp_path / "two.pyz").read_bytes()


def test_the_file_alone_runs_a_job(tmp_path: Path) -> None:
    write_zipapp(tmp_path / "agent.pyz")
    with gang(tmp_path) as agents:
        run = agents.write('print("from the zip")', nodes=1)
        assert run.nodes == 1
        command = [sys.executable, "-I", "-S", str(tmp_path / "agent.pyz"), "--run", str(agents.run_path), "--node", "0"]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False, cwd="/")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "[rank 0] from the zip" in ended.stdout


def test_a_pod_that_is_told_to_go_while_its_agent_starts_goes_at_once(tmp_path: Path) -> None:
    write_zipapp(tmp_path / "agent.pyz")
    run = tmp_path / "run.json"
    os.mkfifo(run)  # the agent waits in the midst of its start
    command = [sys.executable, "-I", "-S", str(tmp_path / "agent.pyz"), "--run", str(run), "--node", "0"]
    ignored = lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN)  # noqa: E731 (as the first process of a container)
    agent = subprocess.Popen(command, preexec_fn=ignored)  # noqa: PLW1509
    try:
        with run.open("w"):  # returns when the agent opens it
            agent.terminate()
            assert agent.wait(20) == 75
    finally:
        agent.kill()


def test_the_agent_imports_nothing_that_python_does_not_bring() -> None:
    workspace = Path(__file__).resolve().parents[2] / "workspace"
    code = (
        f"import sys; sys.path.insert(0, {str(workspace)!r}); import lockstep_gang.agent.main, lockstep_gang.coordinator.post\n"
        "print([n for n in sys.modules if n.split('.')[0] not in sys.stdlib_module_names | {'__main__', 'lockstep_gang'}])"
    )
    ended = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, timeout=20, check=True)
    assert ended.stdout.strip() == "[]"
