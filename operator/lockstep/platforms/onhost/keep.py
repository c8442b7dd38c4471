"""A job's files on a host, and its agent: put there and started, stopped, started again, removed. Each may be repeated after it broke
anywhere.

The request is one line of JSON on standard input; answers are lines of JSON. That of `start` has the job's files, in base64 by their names.
It answers `{"placed": true}`, and waits for the line `go`: nothing is to be seen of the job before that. Where the other end goes away
meanwhile, nothing stays, unless the coordinator of this very start, the `witness`, listens: then the other hosts have begun, and so does
this one. Only one start of a name is under way on a host. One that has waited for long, since its connection broke silently, makes room for
a later one, whose coordinator it never takes for its own.

`brief` runs a job that leaves nothing: see there.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import BinaryIO

from lockstep.platforms.onhost.brief import brief
from lockstep.platforms.onhost.exchange import Declined, Json, answer, problem_of, read_request, write
from lockstep.platforms.onhost.readings import alone, object_in, state_folder, supervisor
from lockstep.platforms.onhost.sweep import sweep
from lockstep_machine.readings import start_ticks
from lockstep_spec.files import sync_directory

NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
STOPPED = "stopped"
"""File that is there while the job is stopped as asked."""
WITNESS_SECONDS = 20.0
START_SECONDS = 40.0
"""Seconds after which a start that still waits makes room for a later one."""
SYSTEMD_SECONDS = 60.0
RESTART_SECONDS = 2.0
FINAL = (0, 1, 75, 78)
"""Exit codes of an agent that is not started again: complete, failed, saved as asked, refused."""


def unit_path(name: str) -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "systemd" / "user" / f"lockstep-{name}.service"


def checked(name: object) -> str:
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise Declined(f"{name!r} is not a job's name")
    return name


def failure(*command: str, seconds: float | None = SYSTEMD_SECONDS) -> str:
    """Run a command; return its words when it fails, else ''."""
    if shutil.which(command[0]) is None:
        return f"this host has no {command[0]}"
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=seconds, check=False)
    return "" if done.returncode == 0 else (done.stderr or done.stdout).strip() or f"{command[0]} ended with {done.returncode}"


def systemctl(*words: str, seconds: float | None = SYSTEMD_SECONDS) -> str:
    """Run `systemctl --user`; return its words when it fails, else ''."""
    return failure("systemctl", "--user", *words, seconds=seconds)


def start(request: Json, stream: BinaryIO) -> Json:
    """Place the files, and start the agent when told to. `fresh`: as a new job of this name; else the files are put beside those of before.
    `ran`: its agent ran when somebody looked, and is to be started anew."""
    name = checked(request["job"])
    files = request["files"]
    folder = state_folder() / name
    record = json.loads(files["job.json"] if request["fresh"] else (folder / "job.json").read_bytes())
    for path in (record["workspace"], record["datasets"]):
        Path(path).mkdir(parents=True, exist_ok=True)
    draft = state_folder() / f".{name}.start.{os.urandom(6).hex()}"
    with alone():
        if runs(name) and not request["ran"]:
            raise Declined(f"job {name} runs there already")
        discard_drafts(name)
        draft.mkdir(mode=0o700)
    try:
        for file, data in files.items():
            write(draft / file, data)
        with alone():  # (from here on a setup removes no environment that the record names)
            if shutil.which(python := record["command"][0]) is None:
                raise Declined(f"there is no {python} any more, which job {name} was to run with: start it anew by lockstep run")
        answer({"placed": True})
        if stream.readline() != b"go\n" and not (request["witness"] and is_heard(*request["witness"])):
            raise Declined("the connection ended before the start")
        with alone():
            draft = taken(draft)
            return begun(request, name, draft, record, files)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def begun(request: Json, name: str, draft: Path, record: Json, files: dict[str, bytes]) -> Json:
    """Give the files of the draft their place, and start the agent."""
    folder = state_folder() / name
    if request["fresh"]:
        replace(draft, folder)
    else:
        for file in files:
            (draft / file).replace(folder / file)
    if "retry" in request:
        raise_retry(folder / "run.json", request["retry"])
    (folder / STOPPED).unlink(missing_ok=True)
    sync_directory(folder)
    if record["supervised"]:
        forget_unit(name)
        return supervise(name, record["command"], record["environment"])
    unit_path(name).parent.mkdir(parents=True, exist_ok=True)
    write(unit_path(name), record["unit"].encode())
    unit = unit_path(name).name
    problem = systemctl("enable", "--quiet", unit) or systemctl(
        "restart", "--no-block", unit
    )  # (to enable one makes systemd read all anew)
    if problem and request["fresh"]:
        systemctl("disable", "--quiet", unit)
        unit_path(name).unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
    return {"problem": problem} if problem else {"started": True}


def apart() -> None:
    """Go on in a process that outlives the connection's end, which ends this one: it alone knows what it has put here, and takes it away
    again.
    """
    worker = os.fork()
    if worker:
        _, status = os.waitpid(worker, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def runs(name: str) -> bool:
    """Return True if the job's agent runs, or is about to run again."""
    if supervisor(name) is not None:
        return True
    return unit_path(name).exists() and systemctl("is-active", unit_path(name).name) in ("", "activating", "deactivating")


def discard_drafts(name: str) -> None:
    """Remove what earlier starts of this name have left. Raises Declined while one may still be going on."""
    for draft in state_folder().glob(f".{name}.start.*"):
        with contextlib.suppress(FileNotFoundError):
            waited = time.time() - draft.stat().st_mtime
            if 0 <= waited < START_SECONDS:
                raise Declined(
                    f"another start of job {name} is under way there: see what came of it, or try again in {START_SECONDS - waited:.0f} s"
                )
            draft.rename(draft.with_name(f"..{os.urandom(6).hex()}"))
    sweep()


def taken(draft: Path) -> Path:
    """The draft under a name that no later start discards. Raises Declined when one was faster."""
    try:
        return draft.rename(draft.with_name(f"..{os.urandom(6).hex()}"))
    except FileNotFoundError:
        raise Declined("a later start of this job has taken its place") from None


def linger(request: Json) -> Json:
    """Let this user's units run on without a login, and come back after a reboot, where the host's rules allow that."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        return {"lingers": not failure("loginctl", "enable-linger")}
    return {"lingers": False}


def replace(draft: Path, folder: Path) -> None:
    """Give the folder its name in place of what an earlier job of this name left."""
    before = draft.with_name(f"{draft.name}.before")
    with contextlib.suppress(FileNotFoundError):
        folder.rename(before)
    draft.rename(folder)
    sync_directory(folder.parent)
    shutil.rmtree(before, ignore_errors=True)


def forget_unit(name: str) -> None:
    """Remove the unit of an earlier start of this name: else it would come back beside the agent of this one."""
    if unit_path(name).exists():
        systemctl("disable", "--quiet", unit_path(name).name)
        unit_path(name).unlink(missing_ok=True)


def raise_retry(path: Path, retry: int) -> None:
    run = json.loads(path.read_text(encoding="utf-8"))
    run["restart"]["retry"] = retry
    write(path, (json.dumps(run, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode())


def is_heard(address: str, port: int) -> bool:
    """Return True if the coordinator listens there within a while: node 0 was told to start, and only this host wasn't any more."""
    end = time.monotonic() + WITNESS_SECONDS
    while time.monotonic() < end:
        with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=2.0):
            return True
        time.sleep(0.5)
    return False


def supervise(name: str, command: list[str], environment: dict[str, str]) -> Json:
    """Leave a process of its own that starts the agent again when it ends by a fault, as systemd would."""
    folder = state_folder() / name
    ready, began = os.pipe()
    if os.fork():
        os.close(began)
        os.wait()
        return {"started": True} if os.read(ready, 1) else {"problem": f"nothing keeps the agent there: see {folder / 'agent.log'}"}
    os.setsid()
    if os.fork():
        os._exit(0)
    asked: list[int] = []
    children: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int, _: object) -> None:
        asked.append(number)
        for process in children:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)

    signal.signal(signal.SIGTERM, pass_on)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    log = os.open(folder / "agent.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.chdir(folder)
    write(folder / "supervisor.json", json.dumps({"pid": os.getpid(), "startTicks": start_ticks(os.getpid())}).encode())
    os.write(began, b".")  # from here on the job runs, and nobody starts it beside this
    os.close(began)
    while True:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # else one that comes before the list has the agent would be lost
        if asked:
            break
        agent = subprocess.Popen(command, env={**os.environ, **environment}, cwd=folder, preexec_fn=end_with_parent)  # noqa: PLW1509 (no threads here)
        children[:] = [agent]
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        if children[0].wait() in FINAL or asked:
            break
        time.sleep(RESTART_SECONDS)
    (folder / "supervisor.json").unlink(missing_ok=True)
    os._exit(0)


def end_with_parent() -> None:
    """Let this process save and end when the one that started it is killed: nobody would know of it any more, and a second agent would be
    started.
    """
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def stop(request: Json) -> Json:
    """Let the agent save and end, and not come back after a reboot. `wait`: answer when it has ended. `now`: its ranks don't save."""
    name = checked(request["job"])
    folder = state_folder() / name
    if not folder.is_dir():
        return {"stopped": False}
    write(folder / STOPPED, b"")
    pid = supervisor(name)
    if pid is not None:
        os.kill(pid, signal.SIGTERM)
        if request["now"]:
            time.sleep(0.2)
            if supervisor(name) == pid:  # else it has ended meanwhile
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
        while request["wait"] and supervisor(name) is not None:
            time.sleep(0.1)
        return {"stopped": True}
    if not unit_path(name).exists():
        return {"stopped": True}
    unit = unit_path(name).name
    problem = systemctl("disable", "--quiet", unit)
    if request["now"]:
        for _ in range(2):  # a second SIGTERM means at once
            systemctl("kill", "--kill-who=main", "--signal=TERM", unit)
            time.sleep(0.2)
    options = [] if request["wait"] else ["--no-block"]
    problem = problem or systemctl("stop", *options, unit, seconds=None)
    return {"problem": problem} if problem else {"stopped": True}


def end_over(request: Json) -> Json:
    """End what waits here for the start `uid` of a job that is over elsewhere, as its agent would have: no key, no unit that starts, the
    records stay.

    `deleted`: they go, too. Another start of this name is left alone.
    """
    name = checked(request["job"])
    folder = state_folder() / name
    with alone():
        if uid_in(folder / "job.json") != request["uid"]:
            return {"ended": False}
        result = (clear if request["deleted"] else stop)({"job": name, "wait": True, "now": True})
        if "problem" not in result and not request["deleted"]:
            for file in ("key", STOPPED):
                (folder / file).unlink(missing_ok=True)
    return result if "problem" in result else {"ended": True}


def uid_in(path: Path) -> str:
    """Return the uid of the start that a job.json records; '' if there is none."""
    try:
        return str(object_in(path)["job"]["metadata"]["uid"])
    except (KeyError, TypeError):
        return ""


def remove(request: Json) -> Json:
    """Remove all that `start` put here, after the agent has ended; the workspace stays."""
    result = clear(request)
    if "problem" not in result:
        with alone():
            sweep()
    return result


def clear(request: Json) -> Json:
    """Remove the files and the unit of a job, after its agent has ended."""
    name = checked(request["job"])
    result = stop({**request, "wait": True})
    if "problem" in result:
        return result
    unit_path(name).unlink(missing_ok=True)
    systemctl("daemon-reload")
    shutil.rmtree(state_folder() / name, ignore_errors=True)
    return {"removed": result["stopped"]}


def main(stream: BinaryIO) -> None:
    os.environ.setdefault("XDG_RUNTIME_DIR", f"/run/user/{os.getuid()}")
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with_files = {"start": start, "brief": brief}
    plain = {"stop": stop, "remove": remove, "end": end_over, "linger": linger}
    try:
        request = read_request(stream)
        what = request["do"]
        if what == "start":
            apart()
        answer(with_files[what](request, stream) if what in with_files else plain[what](request))
    except Declined as error:
        answer({"problem": str(error)})
    except OSError as error:
        answer({"problem": problem_of(error)})
    except subprocess.TimeoutExpired:
        answer({"problem": f"systemd has not answered for {SYSTEMD_SECONDS:.0f} s"})


if __name__ == "__main__":
    main(sys.stdin.buffer)
