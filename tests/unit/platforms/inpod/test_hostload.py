"""Load of a host: the program that runs there."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

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


def test_a_claim_is_told_in_its_own_words_with_the_user_that_the_kernel_names() -> None:
    uuid = f"GPU-test-{os.getpid()}"
    assert hostload.claim_of(uuid) == {}
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(hostload.CLAIM + uuid)
        listening.listen()

        def answer() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.sendall(b"job demo of ada since 14:02\n")

        telling = threading.Thread(target=answer)
        telling.start()
        claim = hostload.claim_of(uuid)
        telling.join()
    assert claim == {"pid": os.getpid(), "user": hostload.user_of(os.getuid()), "words": "job demo of ada since 14:02"}


def test_a_claim_that_says_nothing_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostload, "CLAIM_SECONDS", 0.1)
    uuid = f"GPU-silent-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(hostload.CLAIM + uuid)
        listening.listen()
        assert hostload.claim_of(uuid)["words"] == ""


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
