"""Files to and from hosts over ssh: `cp` and `sync`, before and after a job's first start."""

from __future__ import annotations

import hashlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.cli.clusters.demo import demo_folder
from support.clusters import bed_hosts
from support.clusters.bed_hosts import eventually, limited
from support.clusters.bed_jobs import RANK, BedJobs

SIZE, PARTS = 32 << 20, 300
SLOW = "32mbit"
"""Rate of a laptop's network that takes eight seconds for the model."""
AWAY_SECONDS = 40.0
SAVES = """\
apiVersion: lockstep.dev/v1alpha1
kind: TrainingJob
metadata: {name: saves}
spec:
  nodes: 2
  ranksPerNode: 1
  gpusPerNode: 0
  training:
    model: {name: /workspace/models/tiny-base}
    lora: {rank: 4, alpha: 8}
    precision: FP32
    data: {path: /datasets/demo.jsonl, maxLength: 64}
    optimization: {epochs: 1000, maxSteps: 5000, learningRate: "1e-3", microBatchSize: 1, globalBatchSize: 2}
    checkpoint: {everySteps: 2, keep: 3}
  restart: {maxRestarts: 0}
"""


def test_a_copy_goes_to_all_hosts_before_a_job_was_ever_started_and_comes_back_whole(laptop: BedJobs, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "weights").write_bytes(os.urandom(3 << 20))
    (folder / "config.json").write_text("{}")
    where = ["--cluster", str(laptop.cluster)]
    done = laptop.type("cp", str(folder), "new:/workspace/models/x", *where)
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == ["host bed0", "host bed1", "host bed2"]
    digest = hashlib.sha256((folder / "weights").read_bytes()).hexdigest()
    for number in range(3):
        assert digest in laptop.bed.console(number, "sha256sum", "/home/ada/lockstep/workspace/models/x/weights")
    assert "2 files were there already" in laptop.type("cp", str(folder), "new:/workspace/models/x", *where).stdout
    laptop.type("cp", "new:/workspace/models/x/weights", str(tmp_path / "back"), "--node", "2", *where)
    assert (tmp_path / "back").read_bytes() == (folder / "weights").read_bytes()
    bed_hosts.plug(laptop.bed.host(1), plugged=False)
    partly = laptop.type("cp", str(folder), "new:/datasets/y", *where, check=False)
    assert (
        partly.returncode == 1
        and "host bed1: not copied: host bed1 can't be reached" in partly.stderr
        and "host bed0: 2 of 2 files copied" in partly.stdout
    )


def digests(laptop: BedJobs, number: int, path: str) -> str:
    """SHA-256 and name of every file below a folder of the workspace, and every link."""
    script = (
        'cd "/home/ada/lockstep/workspace/$1" && find . -type f -print0 | sort -z | xargs -0 sha256sum; find . -type l -printf "%p %l\\n"'
    )
    return laptop.bed.console(number, "sh", "-c", script, "sh", path)


def listening(laptop: BedJobs, number: int) -> str:
    """Ports below 30000 that anybody listens on, but sshd's; and processes of a copy."""
    return laptop.bed.console(number, "sh", "-c", "ss -Htln | grep -v ':22 ' || true; pgrep -u ada -af 'python3 -I' || true").strip()


def kept(laptop: BedJobs, number: int, folder: str) -> int:
    """Bytes of the large file that a host has, complete or not."""
    script = (
        'cd "/home/ada/lockstep/workspace/$1/llama" 2>/dev/null && stat -c %s .lockstep-cp-* weights 2>/dev/null | sort -n | tail -1; true'
    )
    return int(laptop.bed.console(number, "sh", "-c", script, "sh", folder) or 0)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """One large file, and many small ones."""
    folder = tmp_path / "llama"
    (folder / "parts").mkdir(parents=True)
    (folder / "weights").write_bytes(os.urandom(SIZE))
    for number in range(PARTS):
        (folder / "parts" / f"{number}.json").write_bytes(os.urandom(600))
    (folder / "newest").symlink_to("parts/299.json")
    return folder


def test_a_copy_to_three_hosts_crosses_the_laptops_link_once(laptop: BedJobs, model: Path, tmp_path: Path) -> None:
    before = laptop.bed.sent()
    done = laptop.type("cp", str(model), "spread:/workspace/models/", "--cluster", str(laptop.cluster))
    assert laptop.bed.sent() - before < 1.05 * (SIZE + PARTS * 600) + (1 << 20)
    assert done.stdout.count("301 of 301 files copied") == 3 and not done.stderr.count("can't reach")
    digest = hashlib.sha256((model / "weights").read_bytes()).hexdigest()
    first, *others = (digests(laptop, number, "models/llama") for number in range(3))
    assert digest in first and others == [first, first] and first.count("\n") == PARTS + 2
    assert [listening(laptop, number) for number in range(3)] == ["", "", ""]


def test_a_host_that_cant_reach_the_one_that_gives_gets_its_files_from_the_laptop_and_that_is_said(laptop: BedJobs, model: Path) -> None:
    rule = (
        f"table ip test {{ chain in {{ type filter hook input priority 0;\nip saddr {laptop.bed.host(1).address} tcp dport 29400-29499"
        " drop\n}\n}\n"
    )
    laptop.bed.console(0, "nft", "-f", "-", stdin=rule.encode())
    try:
        before = laptop.bed.sent()
        done = laptop.type("cp", str(model), "walled:/workspace/walled/", "--cluster", str(laptop.cluster))
    finally:
        laptop.bed.console(0, "nft", "delete", "table", "ip", "test")
    assert (
        f"host bed1 can't reach host bed0 ({laptop.bed.host(0).address} port 29499: no answer in 5 s): its files go from this machine"
        in done.stderr
    )
    assert done.stderr.count("can't reach") == 1
    assert 2 * SIZE < laptop.bed.sent() - before < 2.1 * SIZE
    first, *others = (digests(laptop, number, "walled/llama") for number in range(3))
    assert others == [first, first] and first.count("\n") == PARTS + 2


def test_a_copy_goes_on_where_the_laptop_was_killed_and_leaves_nothing_running(laptop: BedJobs, model: Path) -> None:
    words = ["cp", str(model), "killed:/workspace/killed/", "--cluster", str(laptop.cluster)]
    with limited(SLOW, laptop.bed.layout.bridge), laptop.begin(*words) as process:
        assert eventually(lambda: kept(laptop, 0, "killed") > SIZE // 4)
        process.kill()
    assert eventually(lambda: [listening(laptop, number) for number in range(3)] == ["", "", ""], seconds=20)
    there = kept(laptop, 0, "killed")
    before = laptop.bed.sent()
    done = laptop.type(*words)
    assert done.stdout.count("1 of them continued where they had stopped") == 1
    assert laptop.bed.sent() - before < SIZE - there + (4 << 20)
    first, *others = (digests(laptop, number, "killed/llama") for number in range(3))
    assert hashlib.sha256((model / "weights").read_bytes()).hexdigest() in first and others == [first, first]


def test_the_host_that_gets_files_from_here_loses_its_power_and_gets_the_rest_when_it_is_back(laptop: BedJobs, model: Path) -> None:
    with laptop.begin("cp", str(model), "dark:/workspace/dark/", "--cluster", str(laptop.cluster)) as process:
        with limited(SLOW, laptop.bed.layout.bridge):
            assert eventually(lambda: kept(laptop, 0, "dark") > SIZE // 4)
            bed_hosts.power_off(laptop.bed.host(0))
        bed_hosts.power_on(laptop.bed.host(0))
        output, errors = process.communicate(timeout=180)
    assert process.returncode == 0, errors
    assert output.count("of 301 files copied") == 3
    first, *others = (digests(laptop, number, "dark/llama") for number in range(3))
    assert hashlib.sha256((model / "weights").read_bytes()).hexdigest() in first and others == [first, first]


def test_a_host_without_room_is_named_before_it_is_sent_anything_and_the_others_get_their_files(laptop: BedJobs, model: Path) -> None:
    folder = "/home/ada/lockstep/workspace/small"
    script = 'mkdir -p "$1" && mount -t tmpfs -o size=16m,uid=2001,gid=2001 tmpfs "$1" && chown ada:ada "$1"/..'
    laptop.bed.console(1, "sh", "-c", script, "sh", folder)
    try:
        done = laptop.type("cp", str(model), "tight:/workspace/small/", "--cluster", str(laptop.cluster), check=False)
        assert laptop.bed.console(1, "find", folder, "-type", "f") == ""
    finally:
        laptop.bed.console(1, "umount", folder)
    assert done.returncode == 1 and f"host bed1: not copied: {folder} has 0.02 GB free, and 0.03 GB are needed" in done.stderr
    assert [line.partition(" copied")[0] for line in done.stdout.splitlines()] == [f"host bed{n}: 301 of 301 files" for n in (0, 2)]


def test_a_copy_from_a_path_of_a_host_takes_nothing_from_the_laptop(laptop: BedJobs, model: Path, tmp_path: Path) -> None:
    where = ["--cluster", str(laptop.cluster)]
    laptop.type("cp", str(model), "own:/workspace/own/", "--node", "1", *where)
    before = laptop.bed.sent()
    done = laptop.type("cp", "--from", "bed1", "~/lockstep/workspace/own/llama", "own:/workspace/models/mine", *where)
    assert laptop.bed.sent() - before < 1 << 20
    assert [line.partition(" copied")[0] for line in done.stdout.splitlines()] == [f"host bed{n}: 301 of 301 files" for n in (1, 0, 2)]
    first, *others = (digests(laptop, number, "models/mine") for number in range(3))
    assert hashlib.sha256((model / "weights").read_bytes()).hexdigest() in first and others == [first, first]
    lost = laptop.type("cp", "--from", "bed1", "~/nowhere", "own:/workspace/x", *where, check=False)
    assert lost.returncode == 1 and "/home/ada/nowhere does not exist" in lost.stderr


@pytest.fixture
def shared(laptop: BedJobs) -> Iterator[BedJobs]:
    """The laptop, with a workspace that bed0 and bed1 share under another name each; bed2 has its own."""
    mount = 'mkdir -p /shared/files "$1" && chown -R ada:ada /shared/files "$1" && mount --bind /shared/files "$1"'
    laptop.bed.console(1, "sh", "-c", mount, "sh", "/home/ada/mounted")
    text = laptop.cluster.read_text()
    for name, folder in (("bed0", "/shared/files"), ("bed1", "~/mounted")):
        text = text.replace(f"  - name: {name}\n", f"  - name: {name}\n    workspace: {folder}\n")
    laptop.cluster.write_text(text)
    yield laptop
    laptop.bed.console(1, "sh", "-c", "umount /home/ada/mounted; rm -rf /shared/files")


@pytest.mark.long
def test_hosts_that_share_a_folder_get_one_copy_and_the_start_says_who_sees_what(shared: BedJobs, model: Path) -> None:
    where = ["--cluster", str(shared.cluster)]
    done = shared.type("cp", str(model), "both:/workspace/models/", *where)
    assert "host bed0: 301 of 301 files copied" in done.stdout and "host bed2: 301 of 301 files copied" in done.stdout
    assert "host bed1: sees the same folder as host bed0, at /workspace/models/llama" in done.stdout
    assert "bed0, bed1 see the same folder: it is sent to bed0" in shared.type("sync", "both", str(model / "parts"), *where).stderr
    left = shared.bed.console(0, "find", "/shared/files", "-maxdepth", "1", "-name", ".lockstep-cp*")
    assert left == ""
    path = shared.job("both", nodes=3, steps=1)
    for number, folder in ((0, "/shared/files"), (2, "/home/ada/lockstep/workspace")):
        shared.bed.console(number, "sh", "-c", 'cat > "$1/rank.py"', "sh", folder, stdin=RANK.encode())
    told = shared.run(path)
    assert "bed0, bed1 see one and the same /shared/files, though storage.mode says that each host has its own" in told.stderr
    assert shared.becomes("both", "Complete")
    shared.about("delete", "both")
    shared.cluster.write_text(shared.cluster.read_text() + "storage: {mode: rwx}\n")
    refused = shared.run(path, check=False)
    assert refused.returncode == 2 and "is seen by bed0/bed1 and not by bed2" in refused.stderr
    assert [shared.traces(number, "both") for number in range(3)] == ["", "", ""]


SERVER = """\
set -e
mkdir -p /home/ada/server
[ -b "/dev/$1" ] || mknod "/dev/$1" b 7 "${1#loop}"
mount -o noatime "/dev/$1" /home/ada/server
chown ada:ada /home/ada/server
"""


@pytest.fixture
def server(laptop: BedJobs, tmp_path: Path) -> Iterator[BedJobs]:
    """The laptop, with a workspace of two hosts on one disk that they share, which can stop to answer."""
    image = tmp_path / "disk"
    with image.open("wb") as file:
        file.truncate(800 << 20)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    device = Path(subprocess.run(["losetup", "--find", "--show", str(image)], check=True, capture_output=True, text=True).stdout.strip())
    text = laptop.cluster.read_text().replace("defaults:\n", "defaults:\n  workspace: ~/server/workspace\n")
    laptop.cluster.write_text(f"{text}storage: {{mode: rwx}}\n")
    try:
        for number in (0, 1):
            laptop.bed.console(number, "sh", "-c", SERVER, "sh", device.name)
        yield laptop
    finally:
        laptop.bed.console(0, "sh", "-c", "fsfreeze -u /home/ada/server 2>/dev/null || true")
        laptop.clear()
        for number in (0, 1):
            laptop.bed.console(number, "sh", "-c", "umount -l /home/ada/server || true")
        subprocess.run(["losetup", "--detach", str(device)], check=False)


@pytest.mark.long
def test_a_server_that_is_away_in_a_save_costs_no_restart_and_no_commit(server: BedJobs, tmp_path: Path) -> None:
    where, demo, path = ["--cluster", str(server.cluster)], demo_folder(), tmp_path / "saves.yaml"
    path.write_text(SAVES)
    for source, target in (("models/tiny-base", "/workspace/models/tiny-base"), ("datasets/demo.jsonl", "/datasets/demo.jsonl")):
        server.type("cp", str(demo / source), f"saves:{target}", *where)
    server.run(path)

    def committed() -> int:
        return int(server.status("saves").get("checkpoint", {}).get("lastCommittedStep", 0))

    assert eventually(lambda: committed() >= 4, seconds=180)
    server.bed.console(0, "fsfreeze", "-f", "/home/ada/server")
    end = time.monotonic() + AWAY_SECONDS
    states = server.states_until("saves", lambda: time.monotonic() > end)
    server.bed.console(0, "fsfreeze", "-u", "/home/ada/server")
    assert "Failed" not in states
    before = committed()
    assert eventually(lambda: committed() >= before + 6, seconds=180), (server.state("saves"), states)
    assert server.status("saves")["restarts"] == 0, states
    server.about("stop", "saves")
    assert "damaged" not in server.about("checkpoint", "saves", "--verify", "--all").stdout
    server.about("delete", "saves", "--yes")


def test_a_sync_sends_what_differs_to_all_hosts_and_takes_back_what_is_gone(laptop: BedJobs, tmp_path: Path) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "train.py").write_text("print(1)\n")
    (code / "old.py").write_text("")
    words = ["sync", "new", str(code), "--cluster", str(laptop.cluster)]
    assert "host bed2: 2 sent" in laptop.type(*words).stdout
    (code / "old.py").unlink()
    (code / "train.py").write_text("print(2)\n")
    assert "host bed0: 1 sent (" in laptop.type(*words).stdout
    for number in range(3):
        assert laptop.bed.console(number, "sh", "-c", "cd /home/ada/lockstep/workspace; cat train.py; ls").split("\n")[0] == "print(2)"


PROJECT = """\
import os, sys, time
print("project {name}, attempt", os.environ["LOCKSTEP_ATTEMPT"], "in", os.path.basename(os.getcwd()), open("beside.txt").read(), flush=True)
while {waits} and os.environ["LOCKSTEP_ATTEMPT"] == "1" and not os.path.exists("go"):
    time.sleep(0.1)
sys.exit({waits} and os.environ["LOCKSTEP_ATTEMPT"] == "1")
"""
ONCE_MORE = ("--set", "restart.maxRestarts=1", "--set", "restart.backoffSeconds=0")
JOB_OF_MAIN = """\
apiVersion: lockstep.dev/v1alpha1
kind: TrainingJob
metadata: {name: shared}
spec: {nodes: 2, ranksPerNode: 1, gpusPerNode: 0, script: {path: main.py}, restart: {maxRestarts: 1, backoffSeconds: 0}}
"""


def project(folder: Path, name: str, *, waits: bool) -> Path:
    """A folder `proj` with a program of this name. With `waits` its first attempt fails once there is a file `go`, and its second one ends
    well.
    """
    path = folder / name / "proj"
    path.mkdir(parents=True)
    (path / "main.py").write_text(PROJECT.format(name=name, waits=waits))
    (path / "beside.txt").write_text(f"beside {name}")
    return path


def test_two_projects_with_a_program_of_the_same_name_run_and_restart_as_themselves(
    laptop: BedJobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_two = [
        "run",
        "--hosts",
        str(laptop.cluster),
        "--without",
        "bed2",
        "--set",
        "nodes=2",
        "--set",
        "gpusPerNode=0",
        "--set",
        "ranksPerNode=1",
    ]
    monkeypatch.chdir(project(tmp_path, "A", waits=True))
    begun = laptop.type(*on_two, *ONCE_MORE, "--set", "metadata.name=a", "--detach", "--", "main.py")
    assert f"{tmp_path}/A/proj is in /workspace/proj on bed0, bed1: ranks work there" in begun.stderr
    monkeypatch.chdir(project(tmp_path, "B", waits=False))
    other = laptop.type(*on_two, "--set", "metadata.name=b", "--", "main.py")
    assert "project B, attempt 1 in proj-" in other.stdout and "beside B" in other.stdout
    again = laptop.type(*on_two, "--set", "metadata.name=b", "--", "python3", "main.py")
    own = [line.partition(" is in ")[2] for done in (other, again) for line in done.stderr.splitlines() if " is in " in line]
    assert len(own) == 2 and own[0] == own[1], "its folder stays the same"
    for number in (0, 1):
        laptop.put(number, "proj/go", b"")
    assert laptop.about("wait", "a", "--for", "Complete").returncode == 0
    log = laptop.about("logs", "a").stdout
    assert "project A, attempt 2 in proj beside A" in log and "project B" not in log


def test_a_program_of_another_folder_is_refused_before_it_is_sent_and_not_run_by_a_restart(laptop: BedJobs, tmp_path: Path) -> None:
    mine, theirs = project(tmp_path, "A", waits=True), project(tmp_path, "B", waits=False)
    where = ["--cluster", str(laptop.cluster)]
    laptop.type("sync", "shared", str(mine), *where)
    (laptop.folder / "shared.yaml").write_text(JOB_OF_MAIN)
    laptop.run(laptop.folder / "shared.yaml", "--without", "bed2")
    refused = laptop.type("sync", "other", str(theirs), *where, check=False)
    assert refused.returncode == 2 and "main.py in /workspace were sent from" in refused.stderr.replace("beside.txt, ", "")
    assert f"lockstep sync other {theirs} --to /workspace/proj" in refused.stderr
    copied = laptop.type("cp", str(theirs / "main.py"), "other:", *where, check=False)
    assert copied.returncode == 1 and f"{mine}, and would be another file" in copied.stderr
    assert "project A" in laptop.bed.console(0, "cat", "/home/ada/lockstep/workspace/main.py")
    laptop.type("sync", "other", str(theirs), "--force", *where)
    for number in (0, 1):
        laptop.put(number, "go", b"")
    laptop.about("wait", "shared", "--for", "Ended", check=False)
    told = laptop.about("why", "shared", check=False).stdout
    assert f"{mine}, and this one sent from" in told and str(theirs) in told
    assert "project B" not in laptop.about("logs", "shared").stdout
