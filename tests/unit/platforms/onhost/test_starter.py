"""The program that starts others on hosts, here without ssh: by a shell, as sshd would."""

from __future__ import annotations

import ast
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from lockstep.platforms.hosts.place import REMOTE, beginning
from lockstep.platforms.onhost import starter


def start(words: Sequence[str], **environment: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(["sh", "-c", REMOTE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdin.write(beginning(words, list(environment.items())))
    process.stdin.flush()
    return process


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def ends(pid: int, seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not is_running(pid)


def test_it_passes_input_output_and_the_exit_code_on() -> None:
    with start(["sh", "-c", 'cat; echo "$0 $X" >&2; exit 5', "it's"], X="$HOME `id`") as process:
        output, errors = process.communicate(b"in\n", timeout=30)
    assert (output, errors, process.returncode) == (starter.MARK + b"in\n", b"it's $HOME `id`\n", 5)


@pytest.mark.parametrize(
    ("script", "code", "errors"), [("exit 255", 255, starter.ENDED_255), ("kill -15 $$", 143, b""), ("exit 0", 0, b"")]
)
def test_every_end_has_a_code_and_255_is_told_from_ssh_own(script: str, code: int, errors: bytes) -> None:
    with start(["sh", "-c", script]) as process:
        assert process.communicate(timeout=30) == (starter.MARK, errors)
    assert process.returncode == code


def test_a_program_that_is_not_there_is_named_before_the_mark() -> None:
    for name in ("nonesuch", "/etc/passwd", "/etc"):
        with start([name]) as process:
            output, _ = process.communicate(timeout=30)
        assert output == starter.NO_PROGRAM + name.encode()


def test_a_program_ends_when_nobody_reads_its_output_any_more() -> None:
    with start(["sh", "-c", "echo $$; trap '' TERM; sleep 1000 & wait; sleep 1000"]) as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == starter.MARK
        pid = int(process.stdout.readline())
        process.stdout.close()
        assert ends(pid) and ends(process.pid)


def test_a_program_ends_when_its_starter_is_told_to() -> None:
    with start(["sh", "-c", "echo $$; exec sleep 1000"]) as process:
        process.stdout.readline()
        pid = int(process.stdout.readline())
        process.terminate()
        assert ends(pid)
        assert process.wait(30) == 143


def test_a_program_gets_signals_as_any_other_does() -> None:
    script = (
        "import signal; print([signal.getsignal(n).name for n in (signal.SIGHUP, signal.SIGTERM, signal.SIGCHLD)],"
        " open('/proc/self/status').read())"
    )
    with start(["python3", "-I", "-c", script]) as process:
        output, _ = process.communicate(timeout=30)
    assert b"SIG_DFL" in output and b"SIG_IGN" not in output
    with start(["sh", "-c", "grep SigIgn /proc/$$/status"]) as process:
        output, _ = process.communicate(timeout=30)
    (ours,) = (line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("SigIgn"))
    assert int(output.split()[-1], 16) & ~int(ours, 16) == 0, "it ignores what its starter was not told to ignore"


@pytest.mark.parametrize("length", [0, 3, 200, 1000])
def test_a_connection_that_ends_in_the_middle_of_the_beginning_ends_it(length: int) -> None:
    process = subprocess.Popen(["sh", "-c", REMOTE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    output, _ = process.communicate(beginning(["true"], [])[:length], timeout=30)
    assert process.returncode in (1, 9) and output == b""


def test_it_is_read_by_pythons_that_are_too_old_for_the_rest() -> None:
    text = Path(starter.__file__).read_text().replace("from __future__ import annotations\n", "")
    tree = ast.parse(text, feature_version=(3, 6))
    annotations = [node.annotation for node in ast.walk(tree) if isinstance(node, ast.arg) and node.annotation is not None]
    assert annotations and all(isinstance(annotation, ast.Name) for annotation in annotations)
