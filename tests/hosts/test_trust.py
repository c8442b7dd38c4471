"""`lockstep hosts setup` lets you in: keys are shown, compared, and pinned; and one answer in a terminal serves later commands."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

from lockstep.devcluster.hosts import bed as running
from lockstep.plan.hosts.keys import fingerprint
from support.checkout import ROOT
from support.clusters.bed_jobs import BedJobs


def in_a_terminal(words: list[str], question: bytes, answer: str) -> tuple[str, int]:
    """Everything that a terminal shows while somebody types the verb, and gives every question this answer; and the exit code."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        os.environ |= {"NO_COLOR": "1"}
        os.environ.pop("SSH_ASKPASS", None)
        os.execv(sys.executable, [sys.executable, "-m", "lockstep.cli.main", *words])  # noqa: S606
    shown, answered = b"", 0
    while True:
        try:
            shown += os.read(terminal, 1 << 16)
        except OSError:  # the terminal's last program has ended
            break
        if shown.count(question) > answered:
            answered += 1
            os.write(terminal, f"{answer}\n".encode())
    os.close(terminal)
    return shown.decode(errors="replace"), os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def without_keys(laptop: BedJobs) -> str:
    text = "# my hosts\n" + "\n".join(line for line in laptop.cluster.read_text().splitlines() if "host_key" not in line) + "\n"
    laptop.cluster.write_text(text)
    return text


def prints(laptop: BedJobs) -> dict[str, str]:
    return {host.name: fingerprint(running.host_key(host)) for host in laptop.bed.hosts}


def test_a_stated_fingerprint_pins_its_key_and_another_one_pins_none(laptop: BedJobs) -> None:
    before, right = without_keys(laptop), prints(laptop)
    others = {"bed0": "bed2", "bed1": "bed2", "bed2": "bed0"}
    wrong = [part for name, other in others.items() for part in ("--fingerprint", f"{name}={right[other]}")]
    refused = laptop.type("hosts", "setup", str(laptop.cluster), *wrong, check=False)
    assert (
        refused.returncode == 1
        and "NOT the one that --fingerprint states" in refused.stdout
        and "not pinned: bed0, bed1, bed2" in refused.stderr
    )
    nobody = laptop.type("hosts", "setup", str(laptop.cluster), check=False)
    assert nobody.returncode == 2 and f"--fingerprint bed0={right['bed0']}" in nobody.stderr
    assert laptop.cluster.read_text() == before, "nothing is taken blindly"
    stated = [part for name, value in right.items() for part in ("--fingerprint", f"{name}={value}")]
    done = laptop.type("hosts", "setup", str(laptop.cluster), *stated)
    assert "Pinned bed0, bed1, bed2 in " in done.stdout
    for host in laptop.bed.hosts:
        assert f"  - name: {host.name}\n    host_key: {running.host_key(host)}\n" in laptop.cluster.read_text()
    assert laptop.cluster.read_text().startswith("# my hosts\n")
    again = laptop.type("hosts", "setup", str(laptop.cluster), *stated)
    assert again.stdout.count("SHA256:") == 3 and "Pinned" not in again.stdout


def test_a_person_is_asked_for_each_key(laptop: BedJobs) -> None:
    before = without_keys(laptop)
    shown, code = in_a_terminal(["hosts", "setup", str(laptop.cluster)], b"[y/N]", "n")
    assert code == 1 and all(value in shown for value in prints(laptop).values())
    assert laptop.cluster.read_text() == before
    shown, code = in_a_terminal(["hosts", "setup", str(laptop.cluster)], b"[y/N]", "y")
    assert code == 0 and "Pinned bed0, bed1, bed2" in shown


def test_a_login_answers_for_later_commands(laptop: BedJobs, tmp_path: Path) -> None:
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "open sesame", "-f", str(key)], check=True)
    for number in range(laptop.bed.count):
        laptop.bed.console(number, "sh", "-c", "cat >> /home/ada/.ssh/authorized_keys", stdin=key.with_suffix(".pub").read_bytes())
    laptop.cluster.write_text(laptop.cluster.read_text().replace(str(laptop.bed.layout.identity), str(key)))
    assert laptop.type("doctor", str(laptop.cluster), check=False).stdout.count(f"lockstep hosts setup {laptop.cluster}") == 3
    shown, code = in_a_terminal(["hosts", "setup", str(laptop.cluster)], b"passphrase", "open sesame")
    assert code == 0 and shown.count("answer what ssh asks") == 3
    assert "no answer" not in laptop.type("doctor", str(laptop.cluster), check=False).stdout
