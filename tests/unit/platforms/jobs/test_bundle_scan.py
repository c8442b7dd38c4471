"""What a bundle's scanner finds beside Lockstep's own forms, and what it leaves."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lockstep.plan.pages.redact import REDACTED, Redactor
from lockstep.platforms.jobs.bundle import scanner


@pytest.mark.parametrize(
    "secret",
    [
        "SG." + "a" * 22 + "." + "b" * 43,
        "sk_live_" + "a" * 24,
        "AccountKey=" + "a" * 86 + "==",
        "AC" + "0a" * 16,
        "12345678:" + "a" * 35,
        "pypi-AgEIcHlwaS5vcmc" + "a" * 70,
        "sq0csp-" + "a" * 43,
    ],
)
def test_tokens_of_services_that_lockstep_doesn_t_know_are_taken_out(secret: str) -> None:
    assert Redactor(scan=scanner()).text(f"x = '{secret}'\n") == f"x = '{REDACTED}'\n"


def test_what_helps_to_find_the_cause_stays() -> None:
    text = f"NCCL INFO NET/IB : mlx5_0:1/RoCE eth0:10.0.0.1<0> step-40.a1 image@sha256:{'0123456789abcdef' * 4} loss=1.83 at 8.8.8.8\n"
    assert Redactor(scan=scanner()).text(text) == text


def test_a_secret_behind_thousands_of_characters_of_its_line_is_found() -> None:
    secret = "SG." + "a" * 22 + "." + "b" * 43
    assert list(scanner()("x " * 5000 + secret)) == [secret]


def test_no_verb_loads_the_scanner_when_it_starts() -> None:
    program = "import sys\nimport lockstep.cli.main, lockstep.platforms.jobs.bundle\nassert 'detect_secrets' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
