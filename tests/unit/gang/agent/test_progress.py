"""Progress that Hugging Face's Trainer posts: what is taken from it, and who is let in."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from lockstep_gang.agent.ranks.progress_server import TOKEN, URL, ProgressServer, RemainingTime, offered, parse_status, step_line
from lockstep_gang.contract.messages import Step
from lockstep_spec.codec import ContractError

BODY_BYTES = 64 * 1024

OFFER = {URL: "http://127.0.0.1:1/", TOKEN: "/t"}


def body(percentage: int | None = None, **metrics: Any) -> bytes:
    status = {"progressPercentage": percentage, "metrics": [{"name": name, "value": str(value)} for name, value in metrics.items()]}
    return json.dumps({"trainerStatus": status}).encode()


def test_steps_come_with_what_the_script_measured_and_with_the_time_that_is_left() -> None:
    pace = RemainingTime()
    assert pace.step(parse_status(body(0, total_steps=100)), 10.0) is None
    first = pace.step(parse_status(body(10, current_step=10, total_steps=100, current_epoch=1.25, loss=2.34567891)), 15.0)
    assert first == Step(0, 10, 100, 1, None, {"loss": "2.34568"})
    second = pace.step(parse_status(body(20, current_step=20, total_steps=100)), 25.0)
    assert second.estimated_remaining_seconds == 80


def test_the_time_left_after_a_resume_counts_only_this_attempt_s_steps() -> None:
    pace = RemainingTime()
    pace.step(parse_status(body(90, current_step=900, total_steps=1000)), 100.0)
    step = pace.step(parse_status(body(91, current_step=910, total_steps=1000)), 120.0)
    assert step.estimated_remaining_seconds == 180  # Trainer itself would say 2 s: 20 s for 910 steps


@pytest.mark.parametrize(
    ("steps", "end", "stopping", "shown"),
    [
        ([], 4.0, False, None),  # it took less than the time between two reports
        ([(5.0, 79)], 9.0, False, 79),
        ([(5.0, 79), (10.0, 158)], 14.9, False, 158),
        ([(5.0, 900), (10.0, 1950)], 10.3, False, 2000),
        ([(5.0, 900), (10.0, 1950)], 10.1, False, 1950),
        ([(5.0, 900), (10.0, 1950)], 10.3, True, 1950),
        ([(5.0, 1999)], 5.1, False, 2000),
    ],
)
def test_the_last_word_names_no_step_and_stands_for_all_where_they_can_have_been_made(
    steps: list[tuple[float, int]], end: float, stopping: bool, shown: int | None
) -> None:
    pace = RemainingTime()
    pace.step(parse_status(body(0, total_steps=2000)), 0.0)
    for at, step in steps:
        pace.step(parse_status(body(3, current_step=step, total_steps=2000)), at)
    pace.is_stopping = stopping
    found = pace.step(parse_status(body(100, train_runtime=3.5)), end)
    assert found == (None if shown is None else Step(0, shown, 2000, metrics={"train_runtime": "3.5"}))


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", '{"trainerStatus": 3}', '{"trainerStatus": {"metrics": [4]}}', "[" * 60_000])
def test_what_is_no_progress_is_refused_with_its_form(text: str) -> None:
    with pytest.raises(ContractError, match="trainerStatus"):
        parse_status(text.encode())


def test_odd_values_are_left_out_or_shown_as_they_are() -> None:
    said = parse_status(body(True, current_step="nan", total_steps="-4", note="x" * 100))
    assert (said.percentage, said.step, said.total, said.metrics) == (None, None, 0, {"note": "x" * 64})


def test_a_line_has_step_loss_and_time_left() -> None:
    assert step_line(Step(0, 12, 1502, 0, 3725, {"loss": "2.2", "epoch": "1"})) == "Step 12/1502 | loss: 2.2 | ETA: 1:02:05"
    assert step_line(Step(0, 12)) == "Step 12"


def test_a_script_that_reports_elsewhere_is_left_alone() -> None:
    assert offered(OFFER, {URL: "https://elsewhere"}) == {}
    assert offered({}, {}) == {}
    assert offered(OFFER, {"no_proxy": "a"}) == OFFER


def test_a_proxy_is_not_asked_for_loopback() -> None:
    assert offered(OFFER, {"http_proxy": "http://p:1", "no_proxy": "a,b"}) == {
        **OFFER,
        "no_proxy": "a,b,127.0.0.1",
        "NO_PROXY": "127.0.0.1",
    }


def post(url: str, token: str, data: bytes | None) -> int:
    request = urllib.request.Request(url, data=data, headers={"Authorization": f"Bearer {token}"})  # noqa: S310 (loopback)
    try:
        with urllib.request.urlopen(request, timeout=5) as reply:  # noqa: S310
            return int(reply.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


def private_text(path: Path) -> str:
    assert path.stat().st_mode & 0o777 == 0o600
    return path.read_text()


async def test_only_who_holds_the_token_is_heard(tmp_path: Path) -> None:
    steps, lines = list[Step](), list[str]()
    server = ProgressServer(tmp_path, steps.append, lines.append)
    variables = await server.start()
    assert variables[URL].startswith("http://127.0.0.1:")
    url, token = variables[URL], private_text(Path(variables[TOKEN]))
    good = body(50, current_step=5, total_steps=10)
    tries = [(token, good), ("wrong", good), (token, None), (token, b"x" * (BODY_BYTES + 1)), (token, b"{}"), (token, b"{}")]
    codes = [await asyncio.to_thread(post, url, *each) for each in tries]
    server.close()
    assert codes == [200, 401, 405, 413, 200, 200]
    assert [step.step for step in steps] == [5]
    assert lines[0] == "Step 5/10"
    assert len(lines) == 2  # what can't be understood is said once


def test_without_a_folder_the_script_runs_without_progress(tmp_path: Path) -> None:
    lines = list[str]()
    assert asyncio.run(ProgressServer(tmp_path / "none", lambda step: None, lines.append).start()) == {}
    assert "runs without them" in lines[0]


@pytest.mark.parametrize(("size", "answer"), [(15 << 10, b"HTTP/1.1 401"), (17 << 10, b"")])
def test_the_head_of_a_report_has_at_most_16_kibibytes(tmp_path: Path, size: int, answer: bytes) -> None:
    async def talk() -> bytes:
        server = ProgressServer(tmp_path, lambda step: None, lambda line: None)
        port = (await server.start())[URL].rpartition(":")[2].strip("/")
        reader, writer = await asyncio.open_connection("127.0.0.1", int(port))
        writer.write(b"POST / HTTP/1.1\r\nx: ".ljust(size, b"x") + b"\r\n\r\n")
        try:
            return await reader.read(12)
        except ConnectionResetError:
            return b""
        finally:
            writer.close()
            server.close()

    assert asyncio.run(talk()) == answer
