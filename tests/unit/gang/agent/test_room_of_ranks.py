"""Room for ranks: what killed ones left in shared memory, in a pod and elsewhere, and which file system had none."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from lockstep_gang.agent.ranks import room
from lockstep_gang.agent.ranks.room import Leavings, lack_of_room, leavings_of
from lockstep_gang.contract.interactive import Interactive
from lockstep_gang.contract.placewords import IN_PODS
from lockstep_gang.contract.run import HostPlace, RestartPolicy
from lockstep_spec.files import ENLARGE
from unit.gang.cases import WORKSPACE, gang, make_run

OLD = ("psm_old", "old.bin")
MAPS = """\
import mmap, os, signal, sys
for path in sys.argv[1:]:
    with open(path, "r+b" if os.path.exists(path) else "x+b") as file:
        if not os.path.getsize(path):
            file.truncate(4096)
        kept = mmap.mmap(file.fileno(), 4096) if "mapped" in path else os.dup(file.fileno())
    globals()[path] = kept
print("ready", flush=True)
signal.pause()
"""


@contextmanager
def process(*paths: Path) -> Iterator[int]:
    """The leader of a process group that has these files open, or mapped if the name says so."""
    command = [sys.executable, "-S", "-c", MAPS, *map(str, paths)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as started:
        started.stdout.readline()
        try:
            yield started.pid
        finally:
            started.kill()


def begun(folder: Path, *, own: bool) -> Leavings:
    """Leavings of an attempt that began after the OLD files were made."""
    for name in OLD:
        (folder / name).write_bytes(bytes(4096))
    old = (folder / OLD[-1]).stat().st_ctime
    left = Leavings(folder, own)
    while left._since <= old:  # a file system's clock is coarser than time.time()
        (folder / "probe").write_bytes(b"")
        left._since = (folder / "probe").stat().st_ctime
        (folder / "probe").unlink()
    return left


@pytest.fixture(autouse=True)
def only_tests_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what runs on this machine beside: the system's own processes can't be looked at by all users."""
    every = room._processes
    monkeypatch.setattr(
        room, "_processes", lambda *leaders: (p for p in every(*leaders) if parent(p) == os.getpid() or p.name == str(os.getpid()))
    )


def parent(process: Path) -> int:
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*")}


def test_in_a_pod_all_goes_that_was_made_since_the_attempt_began_or_is_known_and_no_process_uses(tmp_path: Path) -> None:
    left = begun(tmp_path, own=True)
    (tmp_path / "copy/part").mkdir(parents=True)
    for name in ("data.bin", "copy/part/1"):
        (tmp_path / name).write_bytes(bytes(4096))
    (tmp_path / "link").symlink_to(tmp_path / "old.bin")
    with process(tmp_path / "psm_mapped", tmp_path / "open.bin"):
        assert left.clear() == f"removed 3 files (12 KiB) that ended ranks had left in {tmp_path}"
        assert names(tmp_path) == {"old.bin", "psm_mapped", "open.bin", "link"}
    assert left.clear().startswith("removed 2 files")
    assert left.clear() == ""


def test_a_container_begins_without_what_the_one_before_it_left(tmp_path: Path) -> None:
    (tmp_path / "old.bin").write_bytes(bytes(4096))
    assert Leavings(tmp_path, own=False).clear() == ""
    assert Leavings(tmp_path, own=True).clear().startswith("removed 1 file (4 KiB)")


def test_elsewhere_only_known_names_go_that_were_seen_in_use_by_a_rank(tmp_path: Path) -> None:
    left = begun(tmp_path, own=False)
    (tmp_path / "folder").mkdir()
    used = [tmp_path / name for name in ("psm_mapped", "nccl-open", "other.bin", "psm_old", "folder/psm_deep")]
    with process(*used) as rank, process(tmp_path / "psm_bystander"):
        left.look({rank})
        assert left.clear() == ""
    (tmp_path / "psm_touched").write_bytes(b"")
    assert left.clear().startswith("removed 2 files")
    assert names(tmp_path) == {*OLD, "other.bin", "folder", "psm_deep", "psm_bystander", "psm_touched"}


def test_nothing_goes_where_a_process_of_this_user_can_t_be_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "psm_1").write_bytes(bytes(4096))

    def refused(process: Path) -> Iterator[str]:
        raise PermissionError(13, "Permission denied", "/proc/7/maps")

    monkeypatch.setattr(room, "_names_in_use", refused)
    expected = f"1 file that ended ranks left in {tmp_path} may be in use: /proc/7/maps can't be read"
    assert (Leavings(tmp_path, own=True).clear(), names(tmp_path)) == (expected, {"psm_1"})


@pytest.mark.parametrize("short", [False, True])
def test_caches_go_only_where_room_is_short(short: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "lacks_room", lambda path: short)
    for name in ("cache/kernel", "lockstep-1/report"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(bytes(4096))
    left = Leavings(tmp_path, own=True, agents=tmp_path / "lockstep-1")
    assert bool(left.clear()) is short
    assert names(tmp_path) == {"lockstep-1", "report", *(() if short else ("cache", "kernel"))}


MIB = 1 << 20
NO_ROOM = "OSError: [Errno 28] No space left on device"
SHM, TMP = str(room.SHM), str(room.TMP)
ADVICE = {SHM: IN_PODS.more_shared_memory, TMP: IN_PODS.own_disk, "/workspace": ENLARGE}
OF_SHM, OF_TMP, OF_VOLUME = (f"the file system {mount} has 0 B of 64 MiB left: {what}" for mount, what in ADVICE.items())


@pytest.mark.parametrize(
    ("full", "lines", "says"),
    [
        (SHM, (NO_ROOM,), OF_SHM),
        (TMP, (NO_ROOM,), OF_TMP),
        ("/workspace", (NO_ROOM, "at exit"), OF_VOLUME),
        ("", (NO_ROOM,), ""),
        (f"{SHM} {TMP}", (f"{NO_ROOM}: '{TMP}/cache/x'",), OF_TMP),
        (f"{TMP} /workspace", ("cp: error writing '/workspace/runs/x/y': No space left on device",), OF_VOLUME),
        ("/workspace", (f"{NO_ROOM}: '{TMP}/x' -> '/workspace/x'",), OF_VOLUME),
        (SHM, ("RuntimeError: unable to write to file </torch_1_2_3>: No space left on device (28)",), OF_SHM),
        (TMP, ("RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error.",), ""),
        (SHM, ("RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error.",), OF_SHM),
        (SHM, ("SIGBUS",), OF_SHM),
        (SHM, ("ValueError: bad label", "SIGSEGV"), ""),
        (
            "",
            ("tee: /workspace/x: Disk quota exceeded",),
            "a quota of its user, group or project on the file system /workspace: raise it, or remove files",
        ),
        ("", (f"{NO_ROOM}: '/workspace/x'",), f"the file system /workspace has 63 MiB of 64 MiB left: {ENLARGE}"),
    ],
)
def test_a_rank_s_lack_of_room_is_one_of_a_file_system(
    full: str, lines: tuple[str, ...], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def statvfs(path: Path) -> SimpleNamespace:
        free = 0 if str(path) in full.split() else 63
        return SimpleNamespace(f_files=100, f_favail=50, f_bavail=free, f_blocks=64, f_frsize=MIB)

    monkeypatch.setattr(os, "statvfs", statvfs)
    monkeypatch.setattr(Path, "exists", lambda path: path == Path("/") or str(path) in ADVICE)
    monkeypatch.setattr(Path, "is_mount", Path.exists)
    assert lack_of_room(make_run(), lines) == says


@pytest.mark.parametrize(
    ("changes", "first_process", "folders"),
    [({}, 1, 2), ({}, 7, 1), ({"host": HostPlace()}, 1, 1), ({"interactive": Interactive()}, 1, 1)],
)
def test_only_the_first_process_of_a_job_s_container_takes_all_for_its_ranks_own(
    changes: dict[str, object], first_process: int, folders: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getpid", lambda: first_process)
    found = leavings_of(make_run(**changes), Path("/agent"))
    assert [each.own for each in found] == [folders == 2] * folders


KILLED = """\
import os, signal
attempt = os.environ["LOCKSTEP_ATTEMPT"]
with open(f"/dev/shm/left-{attempt}", "wb") as file:
    file.write(bytes(700 << 10))
if attempt != "3":
    os.kill(os.getpid(), signal.SIGKILL)
"""
CONTAINER = (
    "mount -t tmpfs -o size=1m tmpfs /dev/shm && echo left > /dev/shm/before && exec {} -S -m lockstep_gang.agent.main --run {} --node 0"
)


def in_a_container(folder: Path, script: str, restarts: int) -> tuple[int, str]:
    """Exit code and log of an agent that is the first process, with a small /dev/shm of its own in which a file lies."""
    with gang(folder) as agents:
        agents.write(script, nodes=1, restart=RestartPolicy(restarts, 0))
        command = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "sh", "-c", CONTAINER.format(sys.executable, agents.run_path)]
        environment = {**os.environ, "PYTHONPATH": str(WORKSPACE), "TMPDIR": agents.private.name}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes a mount of its own")
def test_a_rank_finds_the_room_that_killed_ones_before_it_had(tmp_path: Path) -> None:
    code, log = in_a_container(tmp_path, KILLED, 2)
    assert code == 0, log
    sizes = [line.partition("removed ")[2] for line in log.splitlines() if "that ended ranks had left" in line]
    assert sizes == [f"1 file ({size}) that ended ranks had left in /dev/shm" for size in ("4 KiB", "700 KiB", "700 KiB", "700 KiB")]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes a mount of its own")
def test_a_rank_that_fills_shared_memory_is_told_so(tmp_path: Path) -> None:
    code, log = in_a_container(tmp_path, 'open("/dev/shm/x", "wb").write(bytes(2 << 20))', 0)
    assert code == 1, log
    assert (
        f"OSError: [Errno 28] No space left on device; the file system /dev/shm has 0 B of 1 MiB left: {IN_PODS.more_shared_memory}" in log
    )
