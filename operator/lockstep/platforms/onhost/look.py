"""Facts of a host, in one answer: for a start, for `hosts check`, and for whoever asks where a job is. It changes nothing.

Its argument is `{"job": name or "" for all, "workspace": …, "datasets": …, "peers": [address, …], "ports": [first, last], "paths": [[field,
path, kind], …], "python": path or null}` with folders that may begin with ~; it prints one line of JSON. With `"patience": seconds` the
answer is about that job alone, without GPUs, routes and units, and it waits up to so many seconds for the job's ranks. Pythons that are too
old for everything else (3.6 or newer) read it, too, so that there is a sentence for them.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import pwd
import re
import shutil
import socket
import struct
import subprocess
import sys
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

from lockstep.platforms.onhost.readings import (
    glibc,
    lingers,
    lost_gpus,
    nvidia_smi,
    object_in,
    output,
    state_folder,
    supervisor,
    text_of,
    user_name,
)

Json = Any
GPU_SECONDS = 10.0
"""Limit of nvidia-smi: without its persistence mode, the driver looks at each GPU anew."""
PATIENCE_POLL_SECONDS = 0.02
WORDS_MAX = 300
LINES_MAX = 4000
JOBS_MAX = 256
VERSION = "import sys;print('%d.%d'%sys.version_info[:2])"
VERSION_SECONDS = 15.0
LOG_BYTES, LOG_LINES = 1 << 14, 20
_ATTEMPT_OF_COMMIT = re.compile(r"step-(\d{1,12})\.a(\d{1,9})")
CLAIM = "\0lockstep-gpu-"
GPU_FIELDS = ["index", "uuid", "name", "memory.total"]
GPU_MORE = [
    "memory.used",
    "utilization.gpu",
    "temperature.gpu",
    "power.draw",
    "driver_version",
    "compute_cap",
    "ecc.errors.uncorrected.volatile.total",
    "pci.bus_id",
    "mig.mode.current",
]
"""Fields that are asked of each GPU, and those that an older driver may not know."""
_UNKNOWN_FIELD = re.compile(r'Field "([\w.]+)" is not a valid field')
_NO_DEVICES = "No devices were found"
SILENT = "a process that does not answer"
SHM = Path("/dev/shm")  # noqa: S108 (nothing is written there)


def gpu_output(*options: str) -> tuple[str, str]:
    """Output of nvidia-smi, and why it failed; nothing of both where there is none, or where it finds no GPU."""
    program = nvidia_smi()
    if not program:
        return "", ""
    command = [program, *options, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=GPU_SECONDS, check=False, errors="replace")
    except subprocess.TimeoutExpired:
        return "", f"nvidia-smi gives no answer in {GPU_SECONDS:.0f} s"
    except OSError as error:
        return "", f"nvidia-smi can't be run: {error.strerror}"
    if done.returncode == 0 or _NO_DEVICES in done.stdout:
        return (done.stdout, "") if done.returncode == 0 else ("", "")
    words = " ".join(done.stdout.split())[:WORDS_MAX]
    return "", f"nvidia-smi ends with {done.returncode}: {words or 'it says nothing'}"


def folder(path: str) -> Json:
    """A folder, or what would become one: whether it can be written, and the free bytes there."""
    full = Path(path).expanduser()
    there = full
    try:
        while not there.exists() and there != there.parent:
            there = there.parent
        free = shutil.disk_usage(there).free
    except OSError as error:
        return {"path": str(full), "problem": f"{there}: {error.strerror}"}
    problem = "" if os.access(there, os.W_OK | os.X_OK) else f"{there} can't be written by {user_name()}"
    if os.statvfs(there).f_flag & os.ST_RDONLY:  # then os.access says no, too
        problem = f"{there} is on a read-only file system"
    return {"path": str(full), "exists": full.is_dir(), "free": free, "kind": filesystem_of(there), "problem": problem}


def filesystem_of(path: Path) -> str:
    """Kind of the file system that the path is on, as the kernel names it."""
    best, kind = "", ""
    for line in text_of("/proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, rest = before.split(), after.split()
        if len(fields) > 4 and rest and (str(path) + "/").startswith(fields[4].rstrip("/") + "/") and len(fields[4]) >= len(best):
            best, kind = fields[4], rest[0]
    return kind


def route(peer: str) -> Json:
    """Own address and interface on the way to another host: those of a datagram that is never sent."""
    family = socket.AF_INET6 if ":" in peer else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((peer, 9))
            address = probe.getsockname()[0]
    except OSError as error:
        return {"problem": error.strerror}
    return {"address": address, "interface": interface_of(address)}


def interface_of(address: str) -> str:
    for line in addresses().splitlines():
        fields = line.split()
        if len(fields) > 3 and fields[3].split("/")[0] == address:
            return fields[1].rstrip(":")
    return next((name for name in interfaces() if address_of(name) == address), "")


@lru_cache(1)
def addresses() -> str:
    """Addresses of all interfaces, a line each: the same for every peer."""
    return output("ip", "-o", "address")


def interfaces() -> list[str]:
    return sorted(path.name for path in Path("/sys/class/net").iterdir()) if Path("/sys/class/net").is_dir() else []


def address_of(name: str) -> str:
    """IPv4 address of an interface, without `ip`."""
    import fcntl

    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        packed = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
        return socket.inet_ntoa(packed[20:24])
    return ""


def links() -> dict[str, Json]:
    """MTU, speed in Mb/s and kind of every interface but loopback."""
    result = {}
    for name in interfaces():
        base = Path("/sys/class/net", name)
        if name == "lo":
            continue
        speed = text_of(base / "speed").strip()
        result[name] = {
            "mtu": int(text_of(base / "mtu").strip() or 0),
            "speed": int(speed) if speed.isdecimal() else None,
            "up": text_of(base / "operstate").strip() in ("up", "unknown"),
            "wireless": (base / "wireless").exists() or (base / "phy80211").exists(),
        }
    return result


def gpus() -> tuple[list[Json], str]:
    """Every GPU by the driver's own tool, with the processes that compute on it, and why not all of that is known; '' if it is."""
    asked = GPU_FIELDS + GPU_MORE
    text, problem = gpu_output(f"--query-gpu={','.join(asked)}")
    unknown = _UNKNOWN_FIELD.search(problem)
    while unknown is not None and unknown.group(1) in asked[len(GPU_FIELDS) :]:
        asked.remove(unknown.group(1))
        text, problem = gpu_output(f"--query-gpu={','.join(asked)}")
        unknown = _UNKNOWN_FIELD.search(problem)
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("WARNING:")]  # (it warns of GPUs that work)
    rows = [[cell.strip() for cell in line.split(",")] for line in lines]
    odd = [row for row in rows if len(row) != len(asked)]
    rows = [row for row in rows if len(row) == len(asked)][:64]
    if odd and not problem:
        problem = f"nvidia-smi says of a GPU: {', '.join(odd[0])[:WORDS_MAX]}"
    users: dict[str, list[Json]] = {}
    if rows:
        text, unsaid = gpu_output("--query-compute-apps=gpu_uuid,pid,used_memory")
        problem = problem or (unsaid and f"who uses its GPUs is not known: {unsaid}")
    for line in text.splitlines() if rows else []:
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 3 and cells[1].isdecimal():
            users.setdefault(cells[0], []).append({"pid": int(cells[1]), "user": owner_of(int(cells[1])), "memory": cells[2]})
    described = [
        {**dict(zip(asked, row)), "processes": users.get(row[1], []), "claim": claim_of(row[1])}  # noqa: B905 (Python 3.6 has no strict)
        for row in rows
    ]
    if "pci.bus_id" in asked and not problem:
        problem = lost_gpus([row["pci.bus_id"] for row in described])
    return described, problem


def owner_of(pid: int) -> str:
    try:
        return pwd.getpwuid(Path(f"/proc/{pid}").stat().st_uid).pw_name
    except (OSError, KeyError):
        return ""


def claim_of(uuid: str) -> Json | None:
    """Holder of the claim on a GPU: the kernel's word for pid and user, and its own for the job. None: nobody.

    One that doesn't answer, because it is stopped or asked by many, holds the GPU all the same.
    """
    pid, uid, said = 0, -1, SILENT
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.settimeout(1.0)
        try:
            asking.connect(CLAIM + uuid)
            pid, uid, _ = struct.unpack("3i", asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
            said = asking.recv(1000).decode(errors="replace") or SILENT
        except ConnectionRefusedError:
            return None
        except OSError:
            pass
    if uid < 0:
        return {"pid": pid, "user": "unknown", "says": said}
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:
        user = str(uid)
    return {"pid": pid, "user": user, "says": said[:500]}


def taken_ports(first: int, last: int) -> list[int]:
    """Ports of the range that somebody listens on."""
    listening = set()
    for path in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in text_of(path).splitlines()[1:]:
            fields = line.split()
            if len(fields) > 3 and fields[3] == "0A":
                listening.add(int(fields[1].rpartition(":")[2], 16))
    return sorted(port for port in listening if first <= port <= last)


def keeping() -> Json:
    """Means that keep a job alive when nobody is logged in: user units, linger, logind's habits."""
    manager = output("systemctl", "--user", "is-system-running") or (
        "running" if output("systemctl", "--user", "show", "--property=Version") else ""
    )
    kills = output(
        "busctl", "get-property", "org.freedesktop.login1", "/org/freedesktop/login1", "org.freedesktop.login1.Manager", "KillUserProcesses"
    ).strip()
    group = output("systemctl", "--user", "show", "--property=ControlGroup").strip()[len("ControlGroup=") :]
    return {
        "units": bool(manager),
        "controllers": text_of("/sys/fs/cgroup" + group + "/cgroup.controllers").split() if group else [],
        "linger": lingers(),
        "killsProcesses": kills.endswith("true"),
    }


def jobs(workspace: str, name: str) -> dict[str, Json]:
    """Every job whose files are here; with `name` that one alone, whether it has files here or not."""
    names = [name] if name else sorted(path.name for path in state_folder().glob("*") if not path.name.startswith("."))[:JOBS_MAX]
    states = units(names)
    return {one: job_or_problem(one, workspace, states.get(one, {})) for one in names}


def job_or_problem(name: str, workspace: str, unit: dict[str, str]) -> Json:
    """Answer of `job`, or the reason why its files can't be read: they hide no other job, and nothing else of the host."""
    try:
        return job(name, workspace, unit)
    except OSError as error:
        return {"unit": unit, "problem": f"{error.filename or state_folder() / name}: {error.strerror or error}"}
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:
        return {"unit": unit, "problem": f"{state_folder() / name}: {error}"}


def units(names: list[str]) -> dict[str, dict[str, str]]:
    """The state of each job's unit, by systemd's own words."""
    if not names:
        return {}
    fields = "Id,LoadState,ActiveState,SubState,Result,ExecMainStatus,UnitFileState"
    text = output("systemctl", "--user", "show", f"--property={fields}", *(f"lockstep-{name}.service" for name in names))
    blocks = [dict(line.split("=", 1) for line in block.splitlines() if "=" in line) for block in text.split("\n\n")]
    return {block["Id"][len("lockstep-") : -len(".service")]: block for block in blocks if "Id" in block}


def job(name: str, workspace: str, unit: dict[str, str]) -> Json:
    """A job's record, its unit, its attempts, its newest commit, and the coordinator's report."""
    state = state_folder() / name
    record = object_in(state / "job.json")
    run = Path(record.get("workspace") or workspace).expanduser() / "runs" / name
    names = [path.name for path in run.glob("checkpoints/step-*")]
    matches = [match for match in map(_ATTEMPT_OF_COMMIT.fullmatch, names) if match]
    commits = [match for match in matches if (run / "checkpoints" / match[0] / "manifest.json").is_file()]
    newest = max(commits, key=lambda match: int(match[1]), default=None)
    return {
        "record": record or None,
        "unit": unit,
        "supervised": supervisor(name) is not None,
        "stopped": (state / "stopped").exists(),
        "retry": retry_of(state / "run.json"),
        "ended": object_in(run / "gang/end.json"),
        "highestAttempt": max([*attempts(run), *(int(match[2]) for match in matches)], default=0),
        "newestStep": None if newest is None else int(newest[1]),
        "newestTime": None if newest is None else time_of(run / "checkpoints" / newest.group(0)),
        "report": report(run),
        "log": last_lines(state / "agent.log"),
    }


def await_ranks(name: str, workspace: str, seconds: float) -> None:
    """Wait until the coordinator reports that all ranks of the job's newest start run, or that it has ended, but no longer than this."""
    end = time.monotonic() + seconds
    with contextlib.suppress(OSError, TypeError, ValueError, RuntimeError):  # (`jobs` tells what can't be read)
        record = object_in(state_folder() / name / "job.json")
        run = Path(record.get("workspace") or workspace).expanduser() / "runs" / name
        while not tells_of_ranks(record, (report(run) or {}).get("report")) and time.monotonic() < end:
            time.sleep(PATIENCE_POLL_SECONDS)


def tells_of_ranks(record: Json, newest: Json) -> bool:
    """Return True if this report is about the start with this record, and its ranks all run, or it has ended."""
    try:
        ranks, is_of_it = newest["ranks"], newest["job"]["uid"] == record["job"]["metadata"]["uid"]
        return is_of_it and (ranks["ready"] == ranks["desired"] or newest["state"] in ("Complete", "Failed"))
    except (KeyError, TypeError):
        return False


def time_of(path: Path) -> float | None:
    """Time at which a file was written last; None if it has just been removed."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return None


def promised_ports() -> list[int]:
    """Ports of jobs whose agents run here, or come back: their blocks are taken even while nobody listens."""
    ports: set[int] = set()
    for path in state_folder().glob("*/run.json"):
        run = object_in(path)
        with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError, OSError):  # (`jobs` tells what can't be read)
            if not (path.parent / "stopped").exists() and (path.parent / "key").exists():
                ports |= {int(run["coordinatorPort"]), int(run["masterPort"])}
    return sorted(ports)


def environment_python() -> str:
    """Python of the environment that was made last, by the folder's own name; '' if there is none.

    A job keeps that name, so that it goes on with its packages when the link leads to others.
    """
    data = Path(os.environ.get("XDG_DATA_HOME") or "~/.local/share").expanduser() / "lockstep"
    path = (data / "env").resolve() / "bin" / "python"
    return str(path) if path.exists() else ""


def version_of(python: str) -> Json:
    """Version of a Python that a job is to run with, whatever its age, or why it has none; {} if it has not said it in time."""
    command = [str(Path(python).expanduser()), "-E", "-S", "-c", VERSION]
    try:
        done = subprocess.run(  # noqa: UP022 (Python 3.6)
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=VERSION_SECONDS, check=False,
            errors="replace",
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {}
    except OSError as error:
        return {"problem": error.strerror}
    if done.returncode == 0 and re.fullmatch(r"\d+\.\d+\s*", done.stdout):
        return {"version": done.stdout.strip()}
    words = (done.stderr + done.stdout).strip().splitlines()[-1:] or ["it ended with {}".format(done.returncode)]  # noqa: UP032
    return {"problem": words[0][:WORDS_MAX]}


def retry_of(path: Path) -> int:
    """Return how often `lockstep retry` has started the job again."""
    restart = object_in(path).get("restart")
    retry = restart.get("retry", 0) if isinstance(restart, dict) else 0
    return retry if isinstance(retry, int) else 0


def last_lines(path: Path) -> list[str]:
    """Return the last lines of the agent's own log."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LOG_BYTES))
            return file.read().decode(errors="replace").splitlines()[-LOG_LINES:]
    except OSError:
        return []


def attempts(run: Path) -> list[int]:
    """Numbers of the attempts that are recorded on this volume."""
    found = []
    for line in text_of(run / "gang/attempts.jsonl").splitlines()[-LINES_MAX:]:
        with contextlib.suppress(ValueError, KeyError, TypeError, OverflowError, RecursionError):
            found.append(int(json.loads(line)["attempt"]))
    return found


def report(run: Path) -> Json | None:
    """The coordinator's newest report, and how many seconds ago it was written, by this host's clock."""
    path = run / "gang/report.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {"seconds": max(0.0, time.time() - path.stat().st_mtime), "report": found["report"]} if isinstance(found, dict) else None
    except (OSError, ValueError, KeyError, RecursionError):
        return None


def missing(paths: list[list[str]]) -> list[list[str]]:
    """Entries [field, path, kind] of inputs that are not there."""
    return [entry for entry in paths if not is_there(Path(entry[1]).expanduser(), entry[2])]


def is_there(path: Path, kind: str) -> bool:
    """Return True if the user sees a path of this kind: what is in a folder that can't be read is not there for a job either."""
    tests = {"file": Path.is_file, "folder": Path.is_dir, "any": Path.exists}
    try:
        return tests[kind](path)
    except OSError:
        return False


def look(request: Json) -> Json:
    """Return the whole answer; with `patience`, the part about one job, after the wait for its ranks."""
    first, last = request["ports"]
    patience = request.get("patience")
    cards, gpu_problem = ([], "") if patience is not None else gpus()
    if patience:
        await_ranks(request["job"], request["workspace"], patience)
    return {
        "host": socket.gethostname(),
        "user": user_name(),
        "home": str(Path.home()),
        "now": time.time(),
        "boot": text_of("/proc/sys/kernel/random/boot_id").strip(),
        "system": platform.system(),
        "machine": platform.machine(),
        "glibc": glibc(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "load": list(os.getloadavg()),
        "memory": {
            key: int(value) * 1024
            for key, value in re.findall(r"^(MemTotal|MemAvailable):\s+(\d+) kB", text_of("/proc/meminfo"), re.MULTILINE)
        },
        "workspace": folder(request["workspace"]),
        "datasets": folder(request["datasets"]),
        "temporary": folder(os.environ.get("TMPDIR") or "/tmp"),  # noqa: S108 (only looked at)
        "routes": {peer: route(peer) for peer in request.get("peers", [])},
        "ownName": own_name(),
        "links": links(),
        "gpus": cards,
        "gpuProblem": gpu_problem,
        "takenPorts": taken_ports(first, last),
        "keeping": {"units": False, "linger": False, "killsProcesses": False, "controllers": []} if patience is not None else keeping(),
        "jobs": jobs(request["workspace"], request.get("job") or ""),
        "state": str(state_folder()),
        "environmentPython": environment_python(),
        "statedPython": version_of(request["python"]) if request.get("python") else {},
        "promisedPorts": promised_ports(),
        "missing": missing(request.get("paths", [])),
        "shm": shutil.disk_usage(SHM).free if SHM.is_dir() else None,
        "memlock": memlock(),
    }


def own_name() -> str:
    """Address that the host's own name has in /etc/hosts or the DNS; '' if it has none."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""


def memlock() -> int:
    """Bytes that a process may lock; -1: as many as it likes."""
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return -1 if soft == resource.RLIM_INFINITY else soft


if __name__ == "__main__":
    print(json.dumps(look(json.loads(sys.argv[1]))))
