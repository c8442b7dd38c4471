"""What a bundle's scanner finds beside Lockstep's own forms, what it leaves, and the log of a container that has just started."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from lockstep.kube.cluster import ApiError
from lockstep.plan.pages.redact import REDACTED, Redactor
from lockstep.platforms.jobs import bundle
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


class Kubelet:
    """A pod's log: refusals first, one a look, then a line."""

    def __init__(self, *refusals: str) -> None:
        self._refusals = list(refusals)

    async def log(self, *_: object) -> AsyncIterator[str]:
        if self._refusals:
            raise ApiError(400, "BadRequest", self._refusals.pop(0))
        yield "ValueError: bad"


STARTING = 'container "trainer" in pod "a-0" is waiting to start: PodInitializing'


@pytest.mark.parametrize(
    ("refusals", "seconds", "found"),
    [
        ([STARTING, STARTING], 60, ["pods/a-0/trainer.log"]),
        ([STARTING, STARTING], -1, [f"log of container trainer of pod a-0: {STARTING} (400 BadRequest)"]),
        (['pods "a-0" not found'], 60, ['log of container trainer of pod a-0: pods "a-0" not found (400 BadRequest)']),
    ],
    ids=["it has just started", "it never starts", "another refusal"],
)
async def test_a_bundle_has_the_log_of_ranks_that_failed_at_once(
    monkeypatch: pytest.MonkeyPatch, refusals: list[str], seconds: float, found: list[str]
) -> None:
    monkeypatch.setattr(bundle, "LOOK_SECONDS", 0)
    pod = {"metadata": {"name": "a-0", "namespace": "n"}, "status": {"containerStatuses": [{"name": "trainer"}]}}
    missing: list[str] = []
    until = time.monotonic() + seconds
    pieces = [piece async for piece in bundle._logs(cast(Any, Kubelet(*refusals)), pod, Redactor(), missing, until)]
    assert [piece.path for piece in pieces] + missing == found
