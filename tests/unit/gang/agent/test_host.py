"""Agents on machines without Kubernetes: where they listen, and what is left when the job has ended, or never began."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep_gang.agent import main
from lockstep_gang.agent.host import listen_on
from lockstep_gang.contract.preflight import Expected
from lockstep_gang.contract.run import POD_IPS, HostPlace
from lockstep_spec.exits import INTERNAL, SAVED
from unit.gang.cases import WORKSPACE, Gang, gang

UNIT = "lockstep-x.service"
FOREVER = 'import signal\nprint("here", flush=True)\nsignal.pause()\n'


@pytest.fixture
def agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gang]:
    """A systemctl that writes down how it was called comes first in PATH."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/systemctl").write_text(
        f'#!/bin/sh\necho "$@" >> "{tmp_path}/calls"\necho Failed to connect to bus >&2\nexit $(cat "{tmp_path}/code")\n'
    )
    (tmp_path / "bin/systemctl").chmod(0o755)
    (tmp_path / "code").write_text("0")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    with gang(tmp_path) as made:
        yield made


def calls(agents: Gang) -> list[str]:
    path = agents.folder / "calls"
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.parametrize(("script", "code"), [("", 0), ("raise ValueError", 1)])
def test_a_job_that_has_ended_leaves_neither_its_key_nor_a_unit_that_would_start_it(agents: Gang, script: str, code: int) -> None:
    agents.write(script, nodes=1, host=HostPlace(UNIT))
    agents.run(codes=[code])
    assert calls(agents) == [f"--user disable --quiet {UNIT}"]
    assert not (agents.folder / "key").exists()
    assert agents.run_path.exists()


SAVES = f"import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit({SAVED}))\n{FOREVER}"


@pytest.mark.parametrize(("script", "code"), [(FOREVER, 1), (SAVES, SAVED)], ids=["saved nothing", "saved"])
def test_a_job_that_was_stopped_keeps_both_for_its_next_start(agents: Gang, script: str, code: int) -> None:
    agents.write(script, nodes=1, host=HostPlace(UNIT))
    agents.start(0)
    agents.until("] here")
    agents.signal(0, signal.SIGTERM)
    assert agents.codes() == [code]
    assert (calls(agents), (agents.folder / "key").exists()) == ([], True)


@pytest.mark.parametrize("host", [HostPlace(), None], ids=["a host without a unit", "a pod"])
def test_without_a_unit_there_is_nothing_to_disable_and_a_pod_s_key_is_left_to_its_secret(agents: Gang, host: HostPlace | None) -> None:
    agents.write("", nodes=1, host=host)
    agents.run(codes=[0])
    assert (calls(agents), (agents.folder / "key").exists()) == ([], host is None)


def test_a_unit_that_can_t_be_disabled_is_told_and_changes_nothing_about_the_end(agents: Gang) -> None:
    (agents.folder / "code").write_text("1")
    agents.write("", nodes=1, host=HostPlace(UNIT))
    agents.run(codes=[0])
    assert f"cannot disable {UNIT} (Failed to connect to bus): run `systemctl --user disable {UNIT}`" in agents.log()


def test_an_agent_on_a_host_leaves_the_user_s_umask_alone(agents: Gang) -> None:
    agents.write('import os; os.mkdir("made")', nodes=1, host=HostPlace())
    agents.start(0, umask=0o077)
    assert agents.codes() == [0]
    assert (agents.folder / "made").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(("address", "expected"), [("10.0.0.1", "10.0.0.1"), ("fd00::1", "fd00::1"), ("lab0", None)])
def test_a_host_listens_on_its_stated_address_if_that_is_a_number(
    address: str, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(POD_IPS, "")
    monkeypatch.delenv(POD_IPS)
    listen_on(address)
    assert os.environ.get(POD_IPS) == expected
    monkeypatch.delenv(POD_IPS, raising=False)


MACHINE = """
import json, os, subprocess, sys, time
for command in ("ip link set lo up", "ip address add 10.9.0.1/32 dev lo", "ip address add 10.9.0.2/32 dev lo",
                "ip address add 10.9.0.3/32 dev lo"):
    subprocess.run(command.split(), check=True)
agents = [subprocess.Popen([sys.executable, "-S", "-m", "lockstep_gang.agent.main", "--run", sys.argv[1], "--node", node]) for node in "01"]
seen = set()
while any(agent.poll() is None for agent in agents):
    for name, length in (("tcp", 8), ("tcp6", 32)):
        for line in open(f"/proc/self/net/{name}").readlines()[1:]:
            local, state = line.split()[1], line.split()[3]
            if state == "0A":
                data = bytes.fromhex(local.partition(":")[0])
                seen.add(".".join(map(str, reversed(data))) if len(data) == 4 else data.hex())
    time.sleep(0.002)
json.dump([[agent.returncode for agent in agents], sorted(seen)], open(sys.argv[2], "w"))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes a network of its own")
def test_nothing_of_a_gang_listens_on_an_address_that_was_not_stated(agents: Gang) -> None:
    """Coordinator, preflight and the ranks' progress, as the kernel lists them in a network of two hosts' addresses and a third one."""
    agents.write("import time; time.sleep(0.5)", addresses=("10.9.0.1", "10.9.0.2"), host=HostPlace(), preflight=Expected())
    result = agents.folder / "result.json"
    command = ["unshare", "--net", sys.executable, "-S", "-c", MACHINE, str(agents.run_path), str(result)]
    environment = {**os.environ, "PYTHONPATH": str(WORKSPACE), "TMPDIR": agents.private.name}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    codes, addresses = json.loads(result.read_text()) if result.exists() else (None, done.stdout + done.stderr)
    assert codes == [0, 0], done.stdout + done.stderr
    assert addresses == ["10.9.0.1", "10.9.0.2", "127.0.0.1"]


def test_an_agent_that_can_make_no_folder_of_its_own_says_why_in_one_line(agents: Gang) -> None:
    Path(agents.private.name).rmdir()
    agents.write("", nodes=1, host=HostPlace(UNIT))
    agents.run(codes=[INTERNAL])
    (line,) = agents.log().splitlines()
    assert re.fullmatch(rf"\[lockstep\] this agent can't start: {agents.private.name}/lockstep-\d+-\w+: No such file or directory", line)


def test_an_agent_that_does_not_start_leaves_no_folder_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: Path) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(main, "place_start", full)
    with pytest.raises(OSError, match="No space left"):
        main._own_folder(tmp_path, "s")
    assert list(tmp_path.iterdir()) == []
