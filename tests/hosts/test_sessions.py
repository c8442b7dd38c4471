"""Jobs of a user whose units end with the login: a session keeps the agents there, and every verb names what a session can't do."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.clusters.bed_hosts import BedHosts, eventually
from support.clusters.bed_jobs import BedJobs

LOGIND = "/etc/systemd/logind.conf.d/kill.conf"


@pytest.fixture
def bobs(bed: BedHosts, tmp_path: Path) -> Iterator[BedJobs]:
    """The laptop of bob, whom root has not let linger."""
    laptop = BedJobs(bed, tmp_path, "bob")
    yield laptop
    laptop.clear()


def agent(laptop: BedJobs, number: int, name: str) -> int:
    """Pid, on the host, of the job's agent; 0 if there is none."""
    found = laptop.bed.console(number, "sh", "-c", f"pgrep -u {laptop.user} -f '[a]gent.pyz --run .*/{name}/run.json' | head -1")
    return int(found or 0)


def logins(laptop: BedJobs, number: int) -> str:
    """Connections of sshd that the user has."""
    return laptop.bed.console(number, "sh", "-c", f"pgrep -f '^sshd: {laptop.user}' || true").strip()


def test_an_agent_in_a_session_outlives_the_login_and_comes_back_after_a_crash(bobs: BedJobs) -> None:
    started = bobs.run(bobs.job("session", restarts=1))
    unkept = (
        "the job does not come back after a reboot of hosts bed0, bed1, since bob has no linger there: as root on it: loginctl"
        " enable-linger bob"
    )
    assert unkept in started.stderr
    bobs.leave()
    for number in (0, 1):
        assert eventually(lambda number=number: not logins(bobs, number)), "the laptop has gone"
    before = bobs.count(1, 1)
    assert eventually(lambda: bobs.count(1, 1) > before + 3), "it runs on without a login"
    first = agent(bobs, 1, "session")
    bobs.bed.console(1, "kill", f"-{signal.SIGKILL.value}", str(first))
    assert eventually(lambda: agent(bobs, 1, "session") not in (0, first))
    before = bobs.count(1, 1)
    assert eventually(lambda: bobs.count(1, 1) > before + 3)
    shown = bobs.about("describe", "session").stdout
    assert "no reboot recovery on hosts bed0, bed1" in shown and unkept in shown
    assert unkept in bobs.about("why", "session").stdout
    assert "[rank 1] from step" in bobs.about("logs", "session", "--node", "1").stdout
    assert "stopped as asked" in bobs.about("stop", "session").stdout
    assert bobs.state("session") == "Suspended" and agent(bobs, 0, "session") == agent(bobs, 1, "session") == 0
    before = bobs.count(0, 0)
    resumed = bobs.about("resume", "session")
    assert unkept in resumed.stderr
    assert eventually(lambda: bobs.count(0, 0) > before)
    bobs.about("delete", "session", "--yes")
    assert bobs.traces(0, "session") == bobs.traces(1, "session") == ""


def test_a_host_that_ends_what_a_login_leaves_is_refused_with_what_root_can_do(bobs: BedJobs) -> None:
    bobs.bed.console(
        1,
        "sh",
        "-c",
        f"mkdir -p $(dirname {LOGIND}) && printf '[Login]\\nKillUserProcesses=yes\\n' > {LOGIND} && systemctl restart systemd-logind",
    )
    try:
        refused = bobs.run(bobs.job("doomed"), check=False)
        assert (
            refused.returncode == 2
            and "host bed1: it ends all that bob runs at the end of the login (KillUserProcesses=yes" in refused.stderr
        )
        assert "as root on it: loginctl enable-linger bob" in refused.stderr
        assert bobs.traces(0, "doomed") == bobs.traces(1, "doomed") == ""
        bobs.bed.console(1, "loginctl", "enable-linger", "bob")
        assert "reboot of host bed0" in bobs.run(bobs.job("doomed")).stderr, "a unit keeps it on bed1 now"
    finally:
        bobs.bed.console(1, "sh", "-c", f"rm {LOGIND}; systemctl restart systemd-logind; loginctl disable-linger bob")
