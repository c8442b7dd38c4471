"""What the kubelet tells of a program in a pod, and what is refused before there is one."""

from __future__ import annotations

import pytest

from lockstep.api.errors import Failed
from lockstep.platforms.kubernetes.cluster import ApiError
from lockstep.platforms.kubernetes.exec_stream import exit_code, refused
from lockstep.platforms.kubernetes.terminal import shell_command


def test_the_exit_code_is_read_from_what_the_kubelet_tells() -> None:
    assert exit_code({"status": "Success"}, "x-0") == 0
    cause = {"reason": "ExitCode", "message": "7"}
    assert exit_code({"status": "Failure", "details": {"causes": [cause]}}, "x-0") == 7


def test_what_could_not_be_started_is_told_in_one_line() -> None:
    with pytest.raises(Failed, match=r"^nothing could be started in pod x-0: container not found$"):
        exit_code({"status": "Failure", "message": "container\nnot found"}, "x-0")


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (403, r"you may not run programs in pods of namespace n \(pods/exec\): an administrator gives you the role edit there"),
        (404, "there is no pod x-0 in namespace n any more"),
        (500, "the cluster doesn't let you run programs in pods: pod x-0 of namespace n: "),
    ],
)
def test_a_refusal_says_what_to_do(status: int, said: str) -> None:
    error = refused(ApiError(status, "", "no"), "n", "x-0", "run programs in pods", "pods/exec")
    with pytest.raises(Failed, match=said):
        raise error


@pytest.mark.parametrize(
    ("term", "given"), [("xterm-256color", "xterm-256color"), (None, "xterm"), ("", "xterm"), ("a; rm -rf", "xterm"), ("-x", "xterm")]
)
def test_a_terminal_s_name_can_not_become_anything_else(term: str | None, given: str) -> None:
    assert shell_command(term)[:2] == ["env", f"TERM={given}"]
