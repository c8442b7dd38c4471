"""The agent as one file."""

from __future__ import annotations

import compileall
import os
import py_compile
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from zipfile import ZipFile
from zipimport import zipimporter

import pytest

import lockstep_gang
from lockstep_gang.build import SHARED, build_id, sources
from lockstep_gang.package import compiled_code, write_zipapp
from support.checkout import ROOT
from unit.gang.cases import gang


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


def test_code_that_is_compiled_already_goes_along_for_agents_of_the_same_python(tmp_path: Path) -> None:
    compileall.compile_dir(Path(lockstep_gang.__file__).parent, quiet=1)
    write_zipapp(tmp_path / "agent.pyz")
    write_zipapp(tmp_path / "sources.pyz", compiled=False)
    folder = "lockstep_gang/agent"
    assert zipimporter(f"{tmp_path}/agent.pyz/{folder}").get_filename("main").endswith("main.pyc")
    assert zipimporter(f"{tmp_path}/sources.pyz/{folder}").get_filename("main").endswith("main.py")
    assert (tmp_path / "sources.pyz").stat().st_size < 1 << 20, "a ConfigMap holds no more"


@pytest.mark.parametrize("mode", py_compile.PycInvalidationMode)
def test_compiled_code_of_another_source_or_python_is_left_out(tmp_path: Path, mode: py_compile.PycInvalidationMode) -> None:
    source = tmp_path / "module.py"
    source.write_bytes(b"a = 1\n")
    assert compiled_code(source, source.read_bytes()) == b""
    cached = Path(py_compile.compile(str(source), invalidation_mode=mode) or "")
    assert compiled_code(source, source.read_bytes())[16:] == cached.read_bytes()[16:]
    source.write_bytes(b"a = 1234567\n")
    assert compiled_code(source, source.read_bytes()) == b""
    py_compile.compile(str(source), invalidation_mode=mode)
    cached.write_bytes(b"\0\0\r\n" + cached.read_bytes()[4:])
    assert compiled_code(source, source.read_bytes()) == b""


def test_a_python_that_compiles_otherwise_runs_the_file_from_its_sources(tmp_path: Path) -> None:
    compileall.compile_dir(Path(lockstep_gang.__file__).parent, quiet=1)
    write_zipapp(tmp_path / "own.pyz")
    with ZipFile(tmp_path / "own.pyz") as own, ZipFile(tmp_path / "agent.pyz", "w") as other:
        for name in own.namelist():
            other.writestr(name, b"\0\0\r\n" + own.read(name)[4:] if name.endswith("c") else own.read(name))
    ended = run_agent(tmp_path, tmp_path / "nowhere")
    assert ended.returncode == 78 and "No such file" in ended.stderr


def test_the_file_alone_runs_a_job(tmp_path: Path) -> None:
    write_zipapp(tmp_path / "agent.pyz")
    with gang(tmp_path) as agents:
        run = agents.write('print("from the zip")', nodes=1)
        assert run.nodes == 1
        ended = run_agent(tmp_path, agents.run_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "[rank 0] from the zip" in ended.stdout


def test_the_file_and_its_sources_are_of_one_build_and_a_changed_source_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_zipapp(tmp_path / "agent.pyz")
    look = f"import sys; sys.path.insert(0, {str(tmp_path / 'agent.pyz')!r}); from lockstep_gang import build; print(build.build_id())"
    inside = subprocess.run([sys.executable, "-I", "-S", "-c", look], capture_output=True, text=True, check=True).stdout.strip()
    assert re.fullmatch("[0-9a-f]{12}", inside) and inside == build_id() == build_id.__wrapped__()
    (tmp_path / "changed.py").write_text("a = 1")
    files = sources() | {"lockstep_gang/agent/agent.py": tmp_path / "changed.py"}
    monkeypatch.setattr("lockstep_gang.build.sources", lambda: files)
    assert build_id.__wrapped__() != inside


@pytest.mark.parametrize("package", SHARED, ids=lambda package: package.__name__)
def test_the_file_has_every_module_of_the_ground_that_the_gang_imports_and_no_other(package: ModuleType) -> None:
    imports = re.compile(rf"^\s*from {package.__name__}\.(\w+) import", re.MULTILINE)
    folder = ROOT / "workspace" / package.__name__
    sources = [path.read_text() for path in (ROOT / "workspace/lockstep_gang").rglob("*.py")]
    imported = {name for source in sources for name in imports.findall(source)}
    within = {name for module in imported for name in imports.findall((folder / f"{module}.py").read_text())}
    assert imported | within | {"__init__"} == set(SHARED[package])


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
    workspace = ROOT / "workspace"
    code = (
        f"import sys; sys.path.insert(0, {str(workspace)!r}); import lockstep_gang.agent.main,"
        " lockstep_gang.coordinator.https_post\nprint([n for n in sys.modules if n.split('.')[0] not in sys.stdlib_module_names |"
        " {'__main__', 'lockstep_gang', 'lockstep_machine', 'lockstep_spec'}])"
    )
    ended = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, timeout=20, check=True)
    assert ended.stdout.strip() == "[]"
