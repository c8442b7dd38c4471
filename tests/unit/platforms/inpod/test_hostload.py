"""Load of a host: the program that runs there."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from lockstep.platforms.inpod import hostload, source_of
from lockstep.programs import boot_command


def test_it_runs_as_text_and_answers_every_line(tmp_path: Path) -> None:
    source = source_of(hostload)
    command = boot_command(source, json.dumps({"workspace": str(tmp_path / "a/b"), "datasets": "~/none"}), options=("-I", "-S"))
    done = subprocess.run([sys.executable, *command[1:]], input=source + b"{}\n{}\n", capture_output=True, check=True, timeout=60)
    first, second = map(json.loads, done.stdout.splitlines())
    assert first["cpu"]["cores"] >= 0 and second["memory"]["limitBytes"] > second["memory"]["bytes"] > 0
    assert first["disks"][0]["path"] == str(tmp_path / "a/b") and first["disks"][0]["freeBytes"] > 0  # of the folder that is there
    assert len(first["disks"]) == 2 and len(first["load"]) == 3


@pytest.mark.parametrize(
    ("said", "told"), [(b"job demo of ada since 14:02\n", "job demo of ada since 14:02"), (b"x" * 600, "x" * 500)], ids=["little", "much"]
)
def test_a_claim_is_told_in_its_own_words_with_the_user_that_the_kernel_names(said: bytes, told: str) -> None:
    uuid = f"GPU-test-{os.getpid()}"
    assert hostload.claim_of(uuid) == {}
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(hostload.CLAIM + uuid)
        listening.listen()

        def answer() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.sendall(said)

        telling = threading.Thread(target=answer)
        telling.start()
        claim = hostload.claim_of(uuid)
        telling.join()
    assert claim == {"pid": os.getpid(), "user": hostload.user_of(os.getuid()), "words": told}


def test_a_claim_that_says_nothing_is_waited_for_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float | None] = []

    class Hasty(socket.socket):
        def settimeout(self, seconds: float | None) -> None:
            limits.append(seconds)
            super().settimeout(0.01)

    uuid = f"GPU-silent-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(hostload.CLAIM + uuid)
        listening.listen()
        monkeypatch.setattr(socket, "socket", Hasty)
        assert hostload.claim_of(uuid)["words"] == "" and limits == [1.0]


def test_who_computes_on_a_gpu_is_what_the_driver_says_and_whose_process_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\necho 'GPU-a, {os.getpid()}, 1024'\necho 'GPU-a, 4194304, [N/A]'\necho 'No running processes found'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    mine, gone = hostload.computing()["GPU-a"]
    assert (mine["pid"], mine["user"], mine["bytes"]) == (os.getpid(), hostload.user_of(os.getuid()), 1 << 30) and mine["name"]
    assert gone == {"pid": 4194304, "name": "", "user": ""}
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    assert hostload.computing() == {}


def test_of_the_processes_on_gpus_64_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    table = "".join(f"GPU-a, {4194304 + number}, 1\n" for number in range(70))
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=table))
    assert len(hostload.computing()["GPU-a"]) == 64


def test_jobs_are_found_by_their_ranks(tmp_path: Path) -> None:
    run = tmp_path / "run.json"
    run.write_text(json.dumps({"runDir": "/home/ada/lockstep/workspace/runs/shown"}))
    variables = {"RANK": "3", "LOCKSTEP_ATTEMPT": "1", "LOCKSTEP_RUN": str(run)}
    rank = subprocess.Popen(
        [sys.executable, "-c", "print('here', flush=True); input()"],
        env={**os.environ, **variables},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert rank.stdout is not None and rank.stdout.readline() == b"here\n"
        assert {"name": "shown", "ranks": [3]} in hostload.jobs()
    finally:
        rank.kill()
        rank.communicate()
