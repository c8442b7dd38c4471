"""Pods of different transports have different users on the same volume: UID 0 without a capability, and UID 1000. What they share is a
group.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch

from lockstep.platforms.inpod import carry, source_of
from lockstep_gang.agent.main import POD_UMASK
from lockstep_machine.wire import Wire
from lockstep_train.export import WeightFiles
from unit.gang.cases import WORKSPACE, Gang, gang

GROUP = 1000
RANK = """
import json, os, pathlib
made = pathlib.Path(os.environ["FOLDER"], "made")
made.mkdir()
(made / "file").touch()
def mode(path):
    return oct(path.stat().st_mode & 0o777)
report, token = (pathlib.Path(os.environ[name]) for name in ("LOCKSTEP_REPORT_SOCKET", "KUBEFLOW_TRAINER_SERVER_TOKEN"))
private = {"socket": mode(report), "its folder": mode(report.parent), "token": mode(token)}
(made / "modes.json").write_text(json.dumps({"folder": mode(made), "file": mode(made / "file"), **private}))
"""
PRIVATE = {"socket": "0o600", "its folder": "0o700", "token": "0o600"}


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Gang]:
    with gang(tmp_path) as made:
        yield made


def modes(agents: Gang) -> dict[str, str]:
    return json.loads((agents.folder / "made" / "modes.json").read_text())


def test_ranks_of_a_pod_write_for_the_group_and_what_is_private_stays_so(agents: Gang) -> None:
    """The container's own umask is 022."""
    agents.write(RANK, nodes=1)
    agents.start(0, umask=0o022)
    assert agents.codes() == [0], agents.log()
    assert modes(agents) == {"folder": "0o775", "file": "0o664", **PRIVATE}


def test_agents_write_their_records_for_the_group(agents: Gang) -> None:
    agents.write(RANK, nodes=1)
    agents.start(0, umask=0o022)
    assert agents.codes() == [0], agents.log()
    found = [agents.folder / "run", *(agents.folder / "run").rglob("*")]
    assert {"attempts.jsonl", "end.json", "node-0.log", "run.json"} <= {path.name for path in found}
    wanted = {True: "0o775", False: "0o664"}
    assert [(path, oct(path.stat().st_mode & 0o777)) for path in found] == [(path, wanted[path.is_dir()]) for path in found]


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_on_somebody_s_own_machine_their_umask_counts(agents: Gang, umask: int) -> None:
    agents.write(RANK, nodes=1)
    agents.start(0, umask=umask, arguments=("--parent", str(os.getpid())))
    assert agents.codes() == [0], agents.log()
    assert modes(agents) == {"folder": oct(0o777 & ~umask), "file": oct(0o666 & ~umask), **PRIVATE}


POD = """
import ctypes, json, os, struct, sys
from pathlib import Path
from lockstep_spec.files import make_directory, write_durably, write_pages_durably
from lockstep_train.checkpoint.format.layout import parse_commit
from lockstep_train.checkpoint.save.rotation import Rotation
from lockstep_train.report.jsonl import JsonLog

user, group, step = int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
os.setgroups([int(sys.argv[5])])
os.setresgid(group, group, group)
os.setresuid(user, user, user)
if user == 0 and ctypes.CDLL(None, use_errno=True).capset(struct.pack("<Ii", 0x20080522, 0), bytes(24)):
    raise OSError(ctypes.get_errno(), "capset")
status = dict(line.split(":\\t", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":\\t" in line)
assert int(status["CapEff"], 16) == 0, status["CapEff"]

os.umask(int(sys.argv[6]))
run = Path(sys.argv[1]) / "runs" / "ml-dev-env"
checkpoints = run / "checkpoints"
commit = checkpoints / f"step-{step}.a1"
make_directory(commit)
write_pages_durably(commit / "shard-0", memoryview(bytearray(4096)), 1000)
write_durably(commit / "manifest.json", b"{}")
make_directory(checkpoints / "chain")
write_durably(checkpoints / "chain" / "a1.json", str(step).encode())
log = JsonLog(run / "logs" / "train_log.jsonl", step - 1, 1)
log.write({"step": step, "by": user})
log.close()
Rotation(checkpoints, 2)._delete(parse_commit(f"step-{step - 1}.a1"))
"""


@pytest.fixture
def volume() -> Iterator[Path]:
    """A folder that any user reaches, unlike pytest's own."""
    folder = Path(mkdtemp(prefix="lockstep-volume-"))
    folder.chmod(0o755)
    (folder / "top").mkdir()
    try:
        yield folder / "top"
    finally:
        shutil.rmtree(folder)


def as_pod(volume: Path, user: int, group: int, step: int) -> None:
    """One run of a job on the volume, by the trainer's own writers, and the rotation of what the run before has left."""
    words = [sys.executable, "-c", POD, str(volume), *map(str, (user, group, step, GROUP, POD_UMASK))]
    ended = subprocess.run(
        words, check=False, capture_output=True, text=True, umask=0o022, env={**os.environ, "PYTHONPATH": str(WORKSPACE)}
    )
    assert ended.returncode == 0, ended.stderr


KUBERNETES, OPENSHIFT = 1000, 0  # the group that processes of a pod have beside fsGroup


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become others")
@pytest.mark.parametrize("users", [(0, 1000, 0), (1000, 0, 1000)], ids=["RDMA first", "TCP first"])
@pytest.mark.parametrize(
    ("owner", "mode", "group"),
    [(0, 0o2775, KUBERNETES), (0, 0o2775, OPENSHIFT), (65534, 0o775, KUBERNETES)],
    ids=["fsGroup on Kubernetes", "fsGroup on OpenShift", "a volume that knows no fsGroup"],
)
def test_root_without_capabilities_and_another_user_go_on_in_each_other_s_runs(
    volume: Path, users: tuple[int, ...], owner: int, mode: int, group: int
) -> None:
    os.chown(volume, owner, GROUP)
    volume.chmod(mode)
    for step, user in enumerate(users, 1):
        as_pod(volume, user, group, step)
    run = volume / "runs" / "ml-dev-env"
    assert [path.name for path in (run / "checkpoints").glob("*step-*")] == ["step-3.a1"]
    assert (run / "checkpoints/chain/a1.json").read_text() == "3"
    assert [json.loads(line)["by"] for line in (run / "logs/train_log.jsonl").read_text().splitlines()] == list(users)


def test_weights_of_an_exported_model_are_not_for_their_writer_alone(tmp_path: Path) -> None:
    """safetensors makes its files so, whatever the umask says."""
    files = WeightFiles(tmp_path)
    files.add("a", torch.zeros(4))
    files.finish()
    (beside := tmp_path / "any").touch()
    assert (tmp_path / "model.safetensors").stat().st_mode == beside.stat().st_mode


def test_files_that_are_sent_to_a_volume_are_the_group_s(tmp_path: Path) -> None:
    tiny, volume = tmp_path / "models" / "tiny", tmp_path / "volume"
    tiny.mkdir(mode=0o755, parents=True)
    (tiny / "config.json").write_text("{}")
    (tiny / "config.json").chmod(0o644)
    volume.mkdir()
    request = json.dumps({"take": str(volume / "models"), "roots": [str(volume)]})
    command = [sys.executable, "-I", "-c", source_of(carry).decode(), request]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, umask=0o022) as process:
        carry.give(Wire(process.stdout.fileno(), process.stdin.fileno()), tiny.parent)
        assert process.wait() == 0
    found = {path.name: oct(path.stat().st_mode & 0o777) for path in volume.rglob("*")}
    assert found == {"models": "0o775", "tiny": "0o775", "config.json": "0o664"}
