"""Jobs on the hosts of the tests' bed, as a person at the laptop starts and asks for them."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lockstep.api.files.clusterfile import parse_cluster_file
from lockstep.devcluster.hosts import bed as running
from lockstep.devcluster.hosts.bed import host_key, write_cluster_file
from lockstep.devcluster.hosts.tree import ENVIRONMENT
from lockstep.platforms.hosts.backend import HostsBackend
from lockstep.platforms.hosts.fleet import login_of
from lockstep.platforms.hosts.ssh import Shared, control_folder
from support.checkout import ROOT
from support.clusters.bed_hosts import BedHosts, eventually
from support.in_process import Told, lockstep

SECONDS = 500.0
JOB = """\
apiVersion: lockstep.dev/v1alpha1
kind: TrainingJob
metadata: {{name: {name}}}
spec:
  nodes: {nodes}
  ranksPerNode: 1
  gpusPerNode: 0
  script: {{path: rank.py, args: ["{steps}"]}}
  preflight: None
  restart: {{maxRestarts: {restarts}, backoffSeconds: 1}}
"""
RANK = '''\
"""A rank of a script that counts: half a second a step, one file a rank, which is its checkpoint. It exits with 0 after SIGTERM, as
many trainers do, and goes on from its file."""
import json, os, signal, socket, sys, time
rank, total = int(os.environ["RANK"]), int(sys.argv[1])
state = os.path.expanduser(f"~/lockstep/workspace/state-{sys.argv[2] if len(sys.argv) > 2 else ''}{rank}")
step = int(open(state).read()) if os.path.exists(state) else 0
report = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
report.connect(os.environ["LOCKSTEP_REPORT_SOCKET"])
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
print(f"from step {step}", flush=True)
if rank == 0:
    listening = socket.create_server((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
    peers = [listening.accept()[0] for _ in range(int(os.environ["WORLD_SIZE"]) - 1)]
else:
    while True:
        try:
            peer = socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), 5)
            break
        except OSError:
            time.sleep(0.2)
while step < total and not asked:
    time.sleep(0.2)
    step += 1
    with open(state + ".draft", "w") as file:
        file.write(str(step))
    os.replace(state + ".draft", state)
    report.send(json.dumps({"rank": rank, "event": "step", "step": step, "totalSteps": total, "metrics": {}}).encode())
sys.exit(0)
'''

LOADED = """
import sys
from lockstep.cli import main
import lockstep.cli.jobs.run, lockstep.platforms.hosts.run, lockstep.platforms.hosts.start
print("loaded", flush=True)
sys.argv[0] = "lockstep"
sys.exit(main.main())
"""
CLEAR = """\
export XDG_RUNTIME_DIR=/run/user/$(id -u)
cd
systemctl --user stop --no-block 'lockstep-*' 2>/dev/null
pkill -KILL -u "$(id -u)" -f '/lockstep/jobs/|keep.py'
rm -rf .local/state/lockstep .config/systemd/user/lockstep-* .config/systemd/user/*/lockstep-* lockstep/workspace
systemctl --user daemon-reload 2>/dev/null
true
"""


def as_expected(done: Told, words: Sequence[str], *, check: bool) -> Told:
    """Return how a verb ended; with `check` it must have ended well."""
    assert not check or done.returncode == 0, f"{' '.join(words)}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


class BedJobs:
    """The laptop: a folder with the bed's cluster file and job files, and the command line."""

    def __init__(self, bed: BedHosts, folder: Path, user: str = "ada") -> None:
        self.bed, self.folder, self.user = bed, folder, user
        self.cluster = folder / f"beds-{user}.yaml"
        self.cluster.write_text(write_cluster_file(bed.layout, bed.count).read_text().replace("user: ada", f"user: {user}"))

    def job(self, name: str, *, nodes: int = 2, steps: int = 1000, restarts: int = 0) -> Path:
        """Write the job file of a script that counts, and put the script on every host."""
        path = self.folder / f"{name}.yaml"
        path.write_text(JOB.format(name=name, nodes=nodes, steps=steps, restarts=restarts))
        for number in range(self.bed.count):
            self.put(number, "rank.py", RANK.encode())
        return path

    def put(self, number: int, path: str, content: bytes) -> None:
        """Write a file in the user's workspace on the host."""
        script = 'mkdir -p "$(dirname "$1")" && cat > "$1" && chown -R "$2:$2" "$3"'
        home = f"/home/{self.user}/lockstep"
        self.bed.console(number, "sh", "-c", script, "sh", f"{home}/workspace/{path}", self.user, home, stdin=content)

    def type(self, *words: str, check: bool = True) -> Told:
        """Type `lockstep WORDS`. With `check` it must end well."""
        return as_expected(lockstep(*words), words, check=check)

    def start(self, *words: str, check: bool = True) -> Told:
        """Type `lockstep WORDS` in a process of its own: for two at once, and for a verb whose programs print."""
        with self.begin(*words) as process:
            output, errors = process.communicate(timeout=SECONDS)
        return as_expected(Told(process.returncode, output, errors), words, check=check)

    @contextmanager
    def begin(self, *words: str) -> Iterator[subprocess.Popen[str]]:
        """Type `lockstep WORDS`, and don't wait for its end; at the end of the block it is killed if it still runs."""
        with subprocess.Popen(
            [sys.executable, "-m", "lockstep.cli.main", *words],
            cwd=ROOT, env={**os.environ, "NO_COLOR": "1"}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                text=True,
        ) as process:  # fmt: skip
            try:
                yield process
            finally:
                process.kill()

    def run(self, path: Path, *words: str, check: bool = True) -> Told:
        """Start the job of a file, and return when all of its ranks run."""
        return self.type("run", "-f", str(path), "--cluster", str(self.cluster), "--detach", *words, check=check)

    def about(self, verb: str, name: str, *words: str, check: bool = True) -> Told:
        """Type a verb about a job."""
        return self.type(*verb.split(), name, "--cluster", str(self.cluster), *words, check=check)

    def status(self, name: str) -> dict[str, Any]:
        """Status of a job, as all verbs ask for it."""
        return HostsBackend(parse_cluster_file(self.cluster.read_text(), str(self.cluster)), str(self.cluster)).job(name).status

    def state(self, name: str) -> str:
        """Reason of the job's Progressing condition: its state in one word."""
        return next(str(one["reason"]) for one in self.status(name)["conditions"] if one["type"] == "Progressing")

    def states_until(self, name: str, end: Callable[[], bool], *, seconds: float = 180.0) -> set[str]:
        """Type `lockstep get NAME -o json` again and again until `end` is true; the states that it told, `Failed` among them if any
        condition says so.
        """
        states: set[str] = set()
        deadline = time.monotonic() + seconds
        while not end():
            assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {states}"
            conditions = json.loads(self.about("get", name, "-o", "json").stdout)["status"]["conditions"]
            states |= {str(one["reason"]) for one in conditions if one["type"] == "Progressing"}
            states |= {"Failed" for one in conditions if one["type"] == "Failed" and one["status"] == "True"}
        return states

    def becomes(self, name: str, state: str) -> bool:
        """Return True once the job's state is this one."""
        return eventually(lambda: self.state(name) == state)

    def traces(self, number: int, name: str) -> str:
        """Files and processes of a job on a host, but for those of its workspace."""
        script = (
            "ls -d /home/$2/.local/state/lockstep/jobs/*$1* /home/$2/.config/systemd/user/lockstep-$1.service 2>/dev/null; pgrep -af"
            ' "jobs/$1/" || true'
        )
        return self.bed.console(number, "sh", "-c", script, "sh", name, self.user).strip()

    def count(self, number: int, rank: int) -> int:
        """Step that a rank's file on the host's disk has; 0 before its first."""
        file = self.bed.host(number).disk / f"upper/home/{self.user}/lockstep/workspace/state-{rank}"
        return int(file.read_text()) if file.exists() else 0

    def masters(self) -> list[int]:
        """Pids of the laptop's shared connections."""
        hosts = parse_cluster_file(self.cluster.read_text(), "beds").hosts
        answers = [asyncio.run(Shared(login_of(host), control_folder()).control("check"))[1] for host in hosts.hosts]
        return [int(match[1]) for answer in answers if (match := re.search(r"pid=(\d+)", answer))]

    def run_until(self, path: Path, seconds: float) -> tuple[float, int | None]:
        """Start the job of a file, and kill the command and all of its connections after so many seconds of its work.

        Return the seconds that it worked, and its exit code; None: it was killed.
        """
        words = ["run", "-f", str(path), "--cluster", str(self.cluster), "--detach"]
        with subprocess.Popen(
            [sys.executable, "-c", LOADED, *words], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                text=True
        ) as process:  # fmt: skip
            assert process.stdout is not None and process.stdout.readline() == "loaded\n"
            begin = time.monotonic()
            try:
                code: int | None = process.wait(seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                code = None
            worked = time.monotonic() - begin
            if code is None:
                for pid in self.masters():
                    os.kill(pid, signal.SIGKILL)
            return worked, code

    def forget(self, name: str) -> None:
        """Remove what the ranks of a job have counted."""
        for host in self.bed.hosts:
            self.bed.console(
                host.number,
                "sh",
                "-c",
                f"rm -rf /home/{self.user}/lockstep/workspace/state-* /home/{self.user}/lockstep/workspace/runs/{name}",
            )

    def leave(self) -> None:
        """Go away with the laptop: no connection of it is left."""
        hosts = parse_cluster_file(self.cluster.read_text(), "beds").hosts
        for host in hosts.hosts:
            asyncio.run(Shared(login_of(host), control_folder()).close())

    def clear(self, *numbers: int) -> None:
        """Remove every job of the user, whatever became of it, from hosts that have power; `numbers`: from these alone."""
        script = CLEAR.encode()
        for host in self.bed.hosts:
            if (not numbers or host.number in numbers) and running.first_process(host) is not None:
                self.bed.console(
                    host.number,
                    "setpriv",
                    f"--reuid={self.user}",
                    f"--regid={self.user}",
                    "--clear-groups",
                    "env",
                    f"HOME=/home/{self.user}",
                    "sh",
                    stdin=script,
                )


CROWD_UID = 3000
ADMIT = """\
set -e
id "$1" >/dev/null 2>&1 || useradd --create-home --shell /bin/bash --uid "$2" "$1"
mkdir -p -m 700 "/home/$1/.ssh"
cat > "/home/$1/.ssh/authorized_keys"
mkdir -p "/home/$1/lockstep/workspace"
cp /run/rank.py "/home/$1/lockstep/workspace/rank.py"
chown -R "$1:$1" "/home/$1/.ssh" "/home/$1/lockstep"
ip address add "$3/24" dev eth0
"""
DISMISS = """\
ip address del "$2/24" dev eth0 || true
loginctl terminate-user "$1" 2>/dev/null || true
pkill -KILL -u "$1" || true
for i in $(seq 100); do pgrep -u "$1" >/dev/null || break; sleep 0.1; done
userdel --remove "$1" 2>/dev/null || true
"""


class Crowd(BedJobs):
    """The laptop with a cluster file of many hosts: each is a user with an address on a host of the bed. Leave it by the end of a `with`
    block.
    """

    def __init__(self, bed: BedHosts, folder: Path, count: int) -> None:
        super().__init__(bed, folder)
        self.count_of_hosts = count
        first = int(ipaddress.ip_address(bed.layout.gateway)) + 99
        self.members = [(number % bed.count, f"crowd{number}", str(ipaddress.ip_address(first + number))) for number in range(count)]
        keys = [host_key(host) for host in bed.hosts]
        lines = [
            "cluster: {name: crowd, platform: hosts}",
            f"defaults: {{identity: {bed.layout.identity}, python: {ENVIRONMENT}/bin/python}}",
            "hosts:",
        ]
        lines += [f"  - {{name: {name}, user: {name}, address: {address}, host_key: {keys[host]}}}" for host, name, address in self.members]
        self.cluster.write_text("\n".join(lines) + "\n")

    def __enter__(self) -> Crowd:
        key = self.bed.layout.identity.with_suffix(".pub").read_bytes()
        for host in range(self.bed.count):
            self.bed.console(host, "sh", "-c", "cat > /run/rank.py", stdin=RANK.encode())
        try:
            for number, (host, name, address) in enumerate(self.members):
                self.bed.console(host, "sh", "-c", ADMIT, "sh", name, str(CROWD_UID + number), address, stdin=key)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()
        for host, name, address in self.members:
            self.bed.console(host, "sh", "-c", DISMISS, "sh", name, address)

    def crowded_job(self, name: str, steps: int) -> Path:
        """Write the job file of a script that counts, with a rank on every host."""
        path = self.folder / f"{name}.yaml"
        path.write_text(JOB.format(name=name, nodes=self.count_of_hosts, steps=steps, restarts=0))
        return path
