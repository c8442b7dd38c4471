"""Facts of a host, in one answer: for a start, for `doctor`, and for whoever asks where a job is. It changes nothing.

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
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from lockstep.platforms.onhost.readings import lingers, object_in, state_folder, supervisor
from lockstep_machine.cards import described_gpus, gpu_users, lost_gpus
from lockstep_machine.commands import output
from lockstep_machine.gpus import SMI_SECONDS, gpu_claim
from lockstep_machine.network import interface_of, is_wireless, listening_ports
from lockstep_machine.readings import byte_sizes, file_words, folder_names, nearest, user_name

Json = Any
PATIENCE_POLL_SECONDS = 0.02
WORDS_MAX = 300
LINES_MAX = 4000
JOBS_MAX = 256
VERSION = "import sys;print('%d.%d'%sys.version_info[:2])"
VERSION_SECONDS = 15.0
LOG_BYTES, LOG_LINES = 1 << 14, 20
_COMMIT = re.compile(r"step-(\d{1,12})\.a\d{1,9}")
_ATTEMPT = re.compile(r"(?:step-\d{1,12}\.)?a(\d{1,9})(?:\.json)?")
"""Names of commits, step-100.a3, and of the records from which commit an attempt started, a3.json."""
GPU_FIELDS = ["index", "uuid", "name", "memory.total"]
GPU_MORE = [
    "driver_version",
    "compute_cap",
    "ecc.errors.uncorrected.volatile.total",
    "pci.bus_id",
    "mig.mode.current",
]
"""Fields that are asked of each GPU, and those that an older driver may not know."""
NO_MEMORY = ("[N/A]", "[Not Supported]")
"""Words of nvidia-smi for the memory of a GPU that has none of its own. Any other word tells of a fault or of lacking rights."""
SILENT = "a process that does not answer"


def folder(path: str) -> Json:
    """A folder, or what would become one: whether it can be written, and the free bytes there."""
    full = Path(path).expanduser()
    there = full
    try:
        there = nearest(full)
        free = shutil.disk_usage(there).free
    except OSError as error:
        return {"path": str(full), "free": 0, "problem": f"{there}: {error.strerror}"}
    problem = "" if os.access(there, os.W_OK | os.X_OK) else f"{there} can't be written by {user_name()}"
    if os.statvfs(there).f_flag & os.ST_RDONLY:  # then os.access says no, too
        problem = f"{there} is on a read-only file system"
    return {"path": str(full), "free": free, "problem": problem}


def route(peer: str) -> Json:
    """Own address and interface on the way to another host: those of a datagram that is never sent."""
    family = socket.AF_INET6 if ":" in peer else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((peer, 9))
            address = probe.getsockname()[0]
    except OSError:
        return None
    return {"address": address, "interface": interface_of(address)}


def links() -> dict[str, Json]:
    """Return of every interface but loopback whether it is up, and wireless."""
    base = Path("/sys/class/net")
    return {
        name: {"up": file_words(base / name / "operstate") in ("up", "unknown"), "wireless": is_wireless(base / name)}
        for name in folder_names(base)
        if name != "lo"
    }


def gpus(host_memory: int) -> tuple[list[Json], str]:
    """Every GPU by the driver's own tool, with the processes that compute on it, and why not all of that is known; '' if it is."""
    rows, problem = described_gpus(GPU_FIELDS, GPU_MORE, SMI_SECONDS)
    users, unsaid = gpu_users(SMI_SECONDS) if rows else ({}, "")
    problem = problem or (unsaid and f"who uses its GPUs is not known: {unsaid}")
    if all("pci.bus_id" in row for row in rows) and not problem:
        problem = lost_gpus([row["pci.bus_id"] for row in rows])
    found, untold = [], []
    for row in rows:
        try:
            found.append(gpu(row, users.get(row["uuid"], []), gpu_claim(row["uuid"]), host_memory))
        except (ValueError, OverflowError):  # such as one that needs a reset
            told = f"index {row['index']}, memory.total {row['memory.total']}"
            untold.append(f"nvidia-smi doesn't describe GPU {row['uuid']}: {told}")
    return found, problem or "; ".join(untold)


def gpu(row: Json, users: Json, claim: Json, host_memory: int) -> Json:
    """Return one GPU of nvidia-smi's table. Raises ValueError or OverflowError if the driver doesn't describe it."""
    shared = row["memory.total"] in NO_MEMORY
    capability = re.fullmatch(r"(\d{1,2})\.(\d)", row.get("compute_cap", ""))
    ecc = row.get("ecc.errors.uncorrected.volatile.total", "")
    return {
        "index": int(row["index"]),
        "uuid": row["uuid"],
        "name": row["name"],
        "memory": host_memory if shared else int(float(row["memory.total"])) << 20,
        "users": ["{} (pid {})".format(one["user"] or "somebody", one["pid"]) for one in users],
        "claim": (claim and "{} ({}, pid {})".format(claim["words"] or SILENT, claim["user"], claim["pid"])) or "",
        "driver": row.get("driver_version", ""),
        "capability": [int(digits) for digits in capability.groups()] if capability else None,
        "eccErrors": int(ecc) if ecc.isdecimal() else 0,
        "bus": row.get("pci.bus_id", ""),
        "shared": shared,
        "divided": row.get("mig.mode.current") == "Enabled",
    }


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
        "hasUnits": bool(manager),
        "controllers": file_words("/sys/fs/cgroup" + group + "/cgroup.controllers").split() if group else [],
        "lingers": lingers(),
        "killsProcesses": kills.endswith("true"),
    }


def jobs(workspace: str, name: str) -> dict[str, Json]:
    """Every job whose files are here; with `name` that one alone, whether it has files here or not."""
    names = [name] if name else sorted(path.name for path in state_folder().glob("*") if not path.name.startswith("."))[:JOBS_MAX]
    states = units(names)
    return {one: job_or_problem(one, workspace, states.get(one, {})) for one in names}


def job_or_problem(name: str, workspace: str, unit: Json) -> Json:
    """Answer of `job`, or the reason why its files can't be read: they hide no other job, and nothing else of the host."""
    try:
        return job(name, workspace, unit)
    except OSError as error:
        return {**unit, "problem": f"{error.filename or state_folder() / name}: {error.strerror or error}"}
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:
        return {**unit, "problem": f"{state_folder() / name}: {error}"}


def units(names: list[str]) -> dict[str, Json]:
    """The state of each job's unit that is loaded, by systemd's own words."""
    if not names:
        return {}
    fields = "Id,LoadState,ActiveState,ExecMainStatus"
    text = output("systemctl", "--user", "show", f"--property={fields}", *(f"lockstep-{name}.service" for name in names))
    blocks = [dict(line.split("=", 1) for line in block.splitlines() if "=" in line) for block in text.split("\n\n")]
    return {
        block["Id"][len("lockstep-") : -len(".service")]: {
            "unit": block.get("ActiveState", ""),
            "exitCode": int(block["ExecMainStatus"]) if block.get("ExecMainStatus", "").isdecimal() else None,
        }
        for block in blocks
        if "Id" in block and block.get("LoadState") == "loaded"
    }


def job(name: str, workspace: str, unit: Json) -> Json:
    """A job's record, its unit, its attempts, its newest commit, and the coordinator's report."""
    state = state_folder() / name
    record = object_in(state / "job.json")
    run = Path(record.get("workspace") or workspace).expanduser() / "runs" / name
    names = [path.name for path in run.glob("checkpoints/step-*")]
    matches = [match for match in map(_COMMIT.fullmatch, names) if match]
    commits = [match for match in matches if (run / "checkpoints" / match[0] / "manifest.json").is_file()]
    newest = max(commits, key=lambda match: int(match[1]), default=None)
    return {
        "record": record or None,
        **unit,
        "supervised": supervisor(name) is not None,
        "stopped": (state / "stopped").exists(),
        "retry": retry_of(state / "run.json"),
        "ended": object_in(run / "gang/end.json"),
        "highestAttempt": highest_attempt(run),
        "newestStep": None if newest is None else int(newest[1]),
        "newestTime": None if newest is None else time_of(run / "checkpoints" / newest.group(0)),
        **report(run),
        "log": last_lines(state / "agent.log"),
    }


def await_ranks(name: str, workspace: str, seconds: float) -> None:
    """Wait until the coordinator reports that all ranks of the job's newest start run, or that it has ended, but no longer than this."""
    end = time.monotonic() + seconds
    with contextlib.suppress(OSError, TypeError, ValueError, RuntimeError):  # (`jobs` tells what can't be read)
        record = object_in(state_folder() / name / "job.json")
        run = Path(record.get("workspace") or workspace).expanduser() / "runs" / name
        while not tells_of_ranks(record, report(run).get("report")) and time.monotonic() < end:
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
        return {"statedProblem": error.strerror}
    if done.returncode == 0 and re.fullmatch(r"\d+\.\d+\s*", done.stdout):
        return {"statedPython": [int(part) for part in done.stdout.split(".")]}
    words = (done.stderr + done.stdout).strip().splitlines()[-1:] or ["it ended with {}".format(done.returncode)]  # noqa: UP032
    return {"statedProblem": words[0][:WORDS_MAX]}


def retry_of(path: Path) -> int:
    """Return how often `lockstep retry` has started the job again."""
    restart = object_in(path).get("restart")
    retry = restart.get("retry", 0) if isinstance(restart, dict) else 0
    return retry if type(retry) is int else 0


def last_lines(path: Path) -> list[str]:
    """Return the last lines of the agent's own log."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LOG_BYTES))
            return file.read().decode(errors="replace").splitlines()[-LOG_LINES:]
    except OSError:
        return []


def highest_attempt(run: Path) -> int:
    """Return the highest attempt that a run's folder tells of; 0 if none. A number is never given twice, whichever machine is node 0."""
    found = [0]
    for line in file_words(run / "gang/attempts.jsonl").splitlines()[-LINES_MAX:]:
        with contextlib.suppress(ValueError, KeyError, TypeError, OverflowError, RecursionError):
            found.append(int(json.loads(line)["attempt"]))
    for folder in (run / "checkpoints", run / "checkpoints/chain"):
        found += [int(match.group(1)) for match in map(_ATTEMPT.fullmatch, folder_names(folder)) if match]
    return max(found)


def report(run: Path) -> Json:
    """The coordinator's newest report, and how many seconds ago it was written, by this host's clock; {} if there is none."""
    path = run / "gang/report.json"
    found = object_in(path).get("report")
    written = time_of(path)
    return {"report": found, "reportSeconds": max(0.0, time.time() - written)} if isinstance(found, dict) and written is not None else {}


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
    memory = byte_sizes().get("MemTotal", 0)
    cards, gpu_problem = ([], "") if patience is not None else gpus(memory)
    if patience:
        await_ranks(request["job"], request["workspace"], patience)
    return {
        "user": user_name(),
        "home": str(Path.home()),
        "now": time.time(),
        "system": platform.system(),
        "python": list(sys.version_info[:2]),
        "memory": memory,
        "workspace": folder(request["workspace"]),
        "datasets": folder(request["datasets"]),
        "temporary": folder(os.environ.get("TMPDIR") or "/tmp"),  # noqa: S108 (only looked at)
        "routes": {peer: way for peer in request.get("peers", []) for way in [route(peer)] if way},
        "ownName": own_name(),
        "links": links(),
        "gpus": cards,
        "gpuProblem": gpu_problem,
        "takenPorts": sorted(port for port in listening_ports() if first <= port <= last),
        **({} if patience is not None else keeping()),
        "jobs": jobs(request["workspace"], request.get("job") or ""),
        "state": str(state_folder()),
        "environmentPython": environment_python(),
        **(version_of(request["python"]) if request.get("python") else {}),
        "promisedPorts": promised_ports(),
        "missing": missing(request.get("paths", [])),
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
