"""What running the tests promises to whoever runs them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.checkout import ROOT

TESTS = ROOT / "tests"
SIGNALS = """
import signal, subprocess, sys

def test_it():
    child = subprocess.Popen([sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"], stdout=subprocess.PIPE)
    child.stdout.readline()
    child.send_signal(signal.{number})
    assert child.wait(30) == -signal.{number}
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_what_tests_start_heeds_a_signal_that_pytest_was_started_to_ignore(number: signal.Signals, tmp_path: Path) -> None:
    """A shell without job control lets its background jobs ignore SIGINT, nohup SIGHUP, and what they start inherits that."""
    (tmp_path / "test_it.py").write_text(SIGNALS.format(number=number.name))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "conftest", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path)]
    ignoring = [
        sys.executable,
        "-c",
        f"import os, signal; signal.signal({int(number)}, signal.SIG_IGN); os.execv({sys.executable!r}, {command!r})",
    ]
    done = subprocess.run(ignoring, env=os.environ | {"PYTHONPATH": str(TESTS)}, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert signal.getsignal(number) is not signal.SIG_IGN


def test_a_download_that_fails_ends_the_setup_with_a_sentence() -> None:
    failing = "setup.setup = lambda lock: run('/bin/sh', '-c', 'echo why >&2; exit 3')"
    code = f"import sys, setup; from lockstep.environments import run; {failing}; sys.argv = ['setup.py']; setup.exit_with(setup.main)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "scripts")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[0] == "why" and "SSL_CERT_FILE=" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        "scripts/setup.py --lock editors",
        "scripts/supply.py wheel",
        "scripts/supply.py sbom",
        "scripts/docs.py",
        "scripts/lock.py",
        "-m pictures",
    ],
)
def test_a_cache_that_cannot_be_used_ends_every_script_with_a_sentence(words: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "scripts"), "LOCKSTEP_CACHE": "/dev/null/none"}
    done = subprocess.run([sys.executable, *words.split()], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "/dev/null" in done.stderr
    assert done.stderr.startswith(f"{Path(words.split()[0 if '.py' in words else 1]).stem}: ")
