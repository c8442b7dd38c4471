"""The bed itself: hosts are real machines to whoever logs in, and lose their power, cable and time as real ones do."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from lockstep.api.files.clusterfile import parse_cluster_file
from lockstep.cli.main import app
from lockstep.devcluster.host import cgroups, processes
from lockstep.devcluster.host.layout import NUMBER
from lockstep.devcluster.hosts import bed as running
from support.clusters import bed_hosts
from support.clusters.bed_hosts import BedHosts, eventually
from support.clusters.own_cluster import own_bed, own_number

UNIT = "[Service]\nExecStart=/bin/sleep 1000\n[Install]\nWantedBy=default.target\n"


def test_a_host_is_a_machine_of_its_own(bed: BedHosts) -> None:
    names = {bed.ssh(number, "hostname").stdout.strip() for number in range(bed.count)}
    assert names == {"bed0", "bed1", "bed2"}
    assert len({bed.ssh(number, "cat", "/etc/machine-id").stdout for number in range(bed.count)}) == 3
    assert bed.console(0, "cat", "/proc/1/comm") == "systemd\n"
    assert "lockstep.devcluster" not in bed.console(0, "ps", "-eo", "args")  # nothing of this machine is seen
    assert eventually(lambda: bed.console(0, "systemctl", "list-jobs", "--no-legend") == "")
    assert bed.console(0, "systemctl", "--failed", "--no-legend") == ""


def test_each_user_may_log_in_and_has_units_and_a_home_of_their_own(bed: BedHosts) -> None:
    for user, number in (("ada", "2001"), ("bob", "2002")):
        assert bed.ssh(0, "id", "-u", user=user).stdout.strip() == number
        # (jobs of earlier tests on this host may have failed)
        assert eventually(
            lambda user=user: (
                bed.ssh(0, "systemctl --user reset-failed; systemctl --user is-system-running", user=user).stdout.strip() == "running"
            )
        )  # type: ignore[misc]
    assert "Permission denied" in bed.ssh(0, "true", user="root").stderr
    lingering = {user: bed.console(0, "loginctl", "show-user", user, "--property=Linger").strip() for user in ("ada",)}
    assert lingering == {"ada": "Linger=yes"}
    assert bed.ssh(1, "ls", "/var/lib/systemd/linger").stdout.split() == ["ada"]


def test_hosts_reach_each_other_by_name_and_their_own_name_is_a_loopback_address(bed: BedHosts) -> None:
    assert bed.ssh(0, "ping -c1 -W5 bed2").returncode == 0
    assert "127.0.1.1" in bed.ssh(0, "getent ahosts bed0").stdout
    assert bed.ssh(0, "ip route").stdout.split()[0] == bed.layout.networks[0]  # and nothing beyond


def test_torch_and_the_code_are_there_and_nobody_can_change_them(bed: BedHosts) -> None:
    script = 'import lockstep_gang, lockstep_train, lockstep_spec, importlib.util; print(importlib.util.find_spec("torch").origin)'
    done = bed.ssh(1, f"/opt/env/bin/python -W error -c '{script}'")
    assert done.stdout == "/opt/lockstep/site/torch/__init__.py\n", done.stderr
    for folder in ("/opt/lockstep/site", "/opt/lockstep/code"):
        with pytest.raises(running.BedError, match="Read-only file system"):
            bed.console(1, "touch", f"{folder}/x")


def test_the_cluster_file_names_every_host_with_its_own_key(bed: BedHosts) -> None:
    content = yaml.safe_load(bed.layout.cluster_file.read_text())
    assert content["cluster"]["platform"] == "hosts"
    assert [host["name"] for host in content["hosts"]] == ["bed0", "bed1", "bed2"]
    for number, host in enumerate(content["hosts"]):
        scanned = subprocess.run(["ssh-keyscan", "-t", "ed25519", host["address"]], capture_output=True, text=True, check=True).stdout
        assert host["host_key"] in scanned
        assert host["address"] == bed.host(number).address
    assert len({host["host_key"] for host in content["hosts"]}) == 3
    parsed = parse_cluster_file(bed.layout.cluster_file.read_text(), content["cluster"]["name"]).hosts
    assert parsed is not None and list(parsed.names) == ["bed0", "bed1", "bed2"]
    assert Path(content["defaults"]["identity"]).stat().st_mode & 0o077 == 0


def test_a_host_without_power_loses_its_processes_and_keeps_its_disk(bed: BedHosts) -> None:
    host = bed.host(1)
    bed.ssh(1, "echo kept > kept; sync; echo lost > /tmp/lost")
    key, first = running.host_key(host), bed.ssh(1, "cat /etc/machine-id").stdout
    bed_hosts.power_off(host)
    assert running.first_process(host) is None and cgroups.processes(host.cgroup) == set()
    with pytest.raises(OSError, match=r"unreachable|timed out|No route"):
        socket.create_connection((host.address, 22), timeout=2.0)
    with pytest.raises(running.BedError, match="bed1 has no power"):
        bed.console(1, "true")
    assert running.status(bed.layout) == {"bed0": True, "bed1": False, "bed2": True}
    bed_hosts.power_on(host)
    assert bed.ssh(1, "cat kept; ls /tmp/lost").stdout == "kept\n"
    assert running.host_key(host) == key
    assert bed.ssh(1, "cat /etc/machine-id").stdout == first


def test_a_unit_that_is_enabled_comes_back_with_the_power_where_its_user_lingers(bed: BedHosts) -> None:
    script = "mkdir -p .config/systemd/user; cat > .config/systemd/user/naps.service"
    bed.console(2, "setpriv", "--reuid=ada", "--regid=ada", "--clear-groups", "sh", "-c", f"cd /home/ada; {script}", stdin=UNIT.encode())
    assert bed.ssh(2, "systemctl --user daemon-reload && systemctl --user enable --now naps").returncode == 0
    bed_hosts.power_off(bed.host(2))
    bed_hosts.power_on(bed.host(2))
    assert eventually(
        lambda: "naps" in bed.console(2, "systemctl", "--user", "--machine=ada@", "list-units", "--state=active", "naps.service")
    )


def test_a_frozen_host_says_nothing_and_goes_on_where_it_was(bed: BedHosts) -> None:
    host = bed.host(1)
    bed.console(1, "systemd-run", "--quiet", "--unit=ticks", "sh", "-c", "while :; do echo >> /run/ticks; sleep 0.02; done")
    first = running.first_process(host)
    ticks = Path(f"/proc/{first}/root/run/ticks")
    assert eventually(lambda: ticks.exists() and ticks.stat().st_size)
    bed_hosts.freeze(host, frozen=True)
    size = ticks.stat().st_size
    with socket.create_connection((host.address, 22), timeout=5.0) as connection:  # the kernel answers, sshd doesn't
        connection.settimeout(1.0)
        with pytest.raises(TimeoutError):
            connection.recv(8)
    assert ticks.stat().st_size == size
    bed_hosts.freeze(host, frozen=False)
    running.await_sshd(host)
    assert running.first_process(host) == first
    assert eventually(lambda: ticks.stat().st_size > size)


def test_a_frozen_host_that_loses_its_power_boots_awake(bed: BedHosts) -> None:
    bed_hosts.freeze(bed.host(1), frozen=True)
    bed_hosts.power_off(bed.host(1))
    bed_hosts.power_on(bed.host(1))
    assert bed.ssh(1, "hostname").stdout == "bed1\n"


def test_a_pulled_cable_cuts_the_host_off_and_ends_nothing(bed: BedHosts) -> None:
    host = bed.host(2)
    first = running.first_process(host)
    bed_hosts.plug(host, plugged=False)
    assert bed.ssh(0, "ping -c1 -W1 bed2").returncode == 1
    bed_hosts.plug(host, plugged=True)
    assert eventually(lambda: bed.ssh(0, "ping -c1 -W1 bed2").returncode == 0)
    assert running.first_process(host) == first


def test_up_leaves_what_runs_alone_and_boots_what_has_no_power(bed: BedHosts) -> None:
    first = [running.first_process(host) for host in bed.hosts]
    bed_hosts.power_off(bed.host(0))
    running.up(bed.layout, bed.count, print)
    again = [running.first_process(host) for host in bed.hosts]
    assert again[1:] == first[1:] and again[0] not in (None, first[0])


def test_the_verbs_say_how_the_hosts_are(bed: BedHosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NUMBER, str(bed.layout.index))
    done = CliRunner().invoke(app, ["devcluster", "status", "-o", "json"])
    assert done.exit_code == 0
    status = json.loads(done.stdout)
    assert status["clusterFile"] == str(bed.layout.cluster_file) and status["hosts"] == {"bed0": True, "bed1": True, "bed2": True}
    bed_hosts.power_off(bed.host(2))
    done = CliRunner().invoke(app, ["devcluster", "status"])
    assert (done.exit_code, done.stdout.splitlines()[-2].split()) == (1, ["bed2", "off"])


def test_down_leaves_nothing_on_the_machine_and_the_disks_until_it_is_to_purge() -> None:
    with own_number(range(1, 9)), own_bed([int(os.environ[NUMBER])]) as layout:
        done = CliRunner().invoke(app, ["devcluster", "up", "--hosts", "1"])
        assert done.exit_code == 0, done.output
        assert done.stdout.splitlines()[-1] == str(layout.cluster_file)
        host = layout.host(0)
        key = running.host_key(host)
        bed_hosts.freeze(host, frozen=True)  # what is frozen goes, too
        assert CliRunner().invoke(app, ["devcluster", "down"]).exit_code == 0
        assert cgroups.of_cluster(layout.name) == []
        unified = cgroups.unified()
        assert unified is not None and not (unified / host.cgroup).exists()
        assert not Path("/sys/class/net", layout.bridge).exists() and not Path("/sys/class/net", host.link).exists()
        assert not Path("/run/netns", host.namespace).exists()
        assert not layout.cluster_file.exists() and processes.running(layout.daemons, host.name) is None
        assert CliRunner().invoke(app, ["devcluster", "status"]).exit_code == 1
        assert running.host_key(host) == key
        assert CliRunner().invoke(app, ["devcluster", "down", "--purge"]).exit_code == 0
        assert not layout.state.exists()


def test_two_ups_at_once_make_one_bed(bed: BedHosts) -> None:
    first = [running.first_process(host) for host in bed.hosts]
    threads = [threading.Thread(target=running.up, args=(bed.layout, bed.count, print)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [running.first_process(host) for host in bed.hosts] == first
