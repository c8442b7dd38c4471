"""The agent as one file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from lockstep_gang.package import write_zipapp
from unit.gang_cases import gang


def run_agent(folder: Path, run_path: Path, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Node 0 of the run, by the agent's file in `folder`, until it ends."""
    command = [sys.executable, "-I", "-S", str(folder / "agent.pyz"), "--run", str(run_path), "--node", "0"]
    return subprocess.run(command, capture_output=True, text=True, timeout=20, check=False, cwd="/", env=environment)


def said_inside(folder: Path, look: str, environment: dict[str, str]) -> str:
    """What `look` prints in the agent's process, once the agent has begun."""
    enter = f"import os, sys; sys.path.insert(0, {str(folder / 'agent.pyz')!r}); from lockstep_gang.agent.main import main"
    code = f"{enter}; main(['--run', '/nowhere', '--node', '0']); {look}"
    return subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, timeout=20, check=True, env=environment
    ).stdout


def test_the_same_sources_make_the_same_bytes(tmp_path: Path) -> None:
    write_zipapp(tmp_path / "one.pyz")
    write_zipapp(tmp_path / "two.pyz")
    assert (tmp_path / "one.pyz").read_bytes() == (tmp_path / "two.pyz").read_bytes()


def test_the_file_alone_runs_a_job(tmp_path: Path) -> None:
    write_zipapp(tmp_path / "agent.pyz")
    with gang(tmp_path) as agents:
        run = agents.write('print("from the zip")', nodes=1)
        assert run.nodes == 1
        ended = run_agent(tmp_path, agents.run_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "[rank 0] from the zip" in ended.stdout


def test_variables_of_a_job_reach_its_ranks_and_leave_the_agent_alone(tmp_path: Path) -> None:
    """A folder with a logging.py, a Python home that isn't there, and what OpenSSL and others read in the agent's own process."""
    write_zipapp(tmp_path / "agent.pyz")
    broken = tmp_path / "broken"
    broken.mkdir()
    for module in ("logging", "json", "sitecustomize"):
        (broken / f"{module}.py").write_text("raise RuntimeError('not the module you know')")
    job = {
        "PYTHONPATH": str(broken),
        "PYTHONHOME": "/nowhere",
        "PYTHONINSPECT": "1",
        "OPENSSL_CONF": "/nowhere",
        "https_proxy": "http://nowhere",
        "MINE": "1",
    }
    script = "import os\nprint('rank', *sorted(n for n in os.environ if n in os.environ['NAMES'].split()))\n"
    look = "print('agent', *sorted(n for n in os.environ if n in os.environ['LOCKSTEP_NAMES'].split()))"
    with gang(tmp_path) as agents:
        run = agents.write(script, nodes=1, command=(sys.executable, "-I", "-S", "rank.py"))
        assert run.nodes == 1
        names = " ".join(job)
        environment = {"PATH": os.environ["PATH"], "TMPDIR": agents.private.name, "NAMES": names, "LOCKSTEP_NAMES": names, **job}
        ended = run_agent(tmp_path, agents.run_path, environment)
        said = said_inside(tmp_path, look, environment)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert f"[rank 0] rank {' '.join(sorted(job))}" in ended.stdout
    assert said == "agent\n"


LOADER = {"LD_LIBRARY_PATH": "/nowhere", "LD_BIND_NOW": "1"}
"""The dynamic loader has read these before any program of Lockstep's runs, as it does those of an image or of a job's envFrom."""


def test_what_the_loader_reads_from_envfrom_is_left_to_ranks_and_to_no_other_program_of_the_agent(tmp_path: Path) -> None:
    write_zipapp(tmp_path / "agent.pyz")
    script = "import os\nprint('rank', *sorted(n for n in os.environ if n.startswith('LD_')))\n"
    look = "import subprocess; print(subprocess.run(['env'], capture_output=True, text=True).stdout)"
    with gang(tmp_path) as agents:
        agents.write(script, nodes=1, command=(sys.executable, "-I", "-S", "rank.py"))
        environment = {"PATH": os.environ["PATH"], "TMPDIR": agents.private.name, **LOADER}
        ended = run_agent(tmp_path, agents.run_path, environment)
    said = said_inside(tmp_path, look, environment)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert f"[rank 0] rank {' '.join(sorted(LOADER))}" in ended.stdout
    assert "PATH=" in said and "LD_" not in said


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
