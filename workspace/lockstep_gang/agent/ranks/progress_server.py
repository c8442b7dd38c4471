"""Progress of scripts that already report it: Hugging Face's Trainer posts it wherever these variables point.

The variables and the body are those of Kubeflow Trainer's status endpoint (transformers 5.23, KubeflowCallback; on by the first variable
alone, whatever report_to says): rank 0 posts at the start, every 5 s and at the end, and waits for the reply. So the reply comes at
once, and from the agent beside it: loopback only, with a token that only this user can read. Its remaining time divides the time since
this start by the steps since the very first one, which is far too little after a resume, so it is computed here.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from lockstep_gang.contract.messages import COUNT_MAX, Step
from lockstep_spec.codec import ContractError
from lockstep_spec.words import printable_line

URL, TOKEN = "KUBEFLOW_TRAINER_SERVER_URL", "KUBEFLOW_TRAINER_SERVER_TOKEN"
LOOPBACK = "127.0.0.1"
HEAD_BYTES, BODY_BYTES = 16 * 1024, 64 * 1024
PATIENCE_SECONDS = 5.0
METRICS, CHARACTERS = 24, 64
_OWN = frozenset({"current_step", "total_steps", "current_epoch"})


@dataclass(frozen=True)
class TrainerStatus:
    """One body, as far as it is understood."""

    percentage: int | None
    step: int | None
    total: int | None
    epoch: int | None
    metrics: dict[str, str]


def parse_status(body: bytes) -> TrainerStatus:
    """Read a body. Raises ContractError."""
    try:
        status = json.loads(body)["trainerStatus"]
        values = {str(metric["name"]): str(metric["value"]) for metric in status.get("metrics") or []}
        percentage = status.get("progressPercentage")
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise ContractError(
            f'a progress report is not {{"trainerStatus": {{"progressPercentage": …, "metrics": […]}}}}: {error!r}'
        ) from None
    shown = {printable_line(name)[:CHARACTERS]: _short(value) for name, value in list(values.items())[-METRICS:] if name not in _OWN}
    return TrainerStatus(
        percentage if type(percentage) is int else None,
        _whole(values.get("current_step")),
        _whole(values.get("total_steps")),
        _whole(values.get("current_epoch")),
        shown,
    )


def _whole(text: str | None) -> int | None:
    try:
        return max(0, min(int(float(text)), COUNT_MAX)) if text else None
    except (ValueError, OverflowError):
        return None


def _short(text: str) -> str:
    try:
        return f"{float(text):.6g}"
    except ValueError:
        return printable_line(text)[:CHARACTERS]


class RemainingTime:
    """Steps of one attempt with the time that is left, from one status after another."""

    def __init__(self) -> None:
        self.is_stopping = False
        """The ranks were told to save and stop, so their end needn't be that of the training."""
        self._total: int | None = None
        self._first: tuple[int, float] | None = None
        self._last: tuple[int, float] | None = None

    def step(self, status: TrainerStatus, now: float) -> Step | None:
        """The step that a status tells; None: no step is known yet. The last status names none, and says 100 % of a training that ended
        early, too.
        """
        self._total = status.total or self._total
        if status.step is None:
            ended = self._ended_at(now) if status.percentage == 100 else None
            return None if ended is None else Step(0, ended, self._total, metrics=status.metrics)
        step, self._last = status.step, (status.step, now)
        if self._first is None or step < self._first[0]:
            self._first = (step, now)
        return Step(0, step, self._total, status.epoch, self._remaining(step, now), status.metrics)

    def _ended_at(self, now: float) -> int | None:
        """The step at the end: the last one, or all, if those that were left can have been made since then at the pace before, twice as
        fast at most.
        """
        if self._first is None or self._last is None:
            return None
        (first, began), (last, at) = self._first, self._last
        made = 2 * (now - at) * (last - first) / (at - began) if at > began else 0
        return self._total if self._total and not self.is_stopping and self._total - last <= made + 1 else last

    def _remaining(self, step: int, now: float) -> int | None:
        """Seconds at the pace since the first step of this attempt."""
        if self._total is None or self._first is None:
            return None
        done, left = step - self._first[0], max(0, self._total - step)
        return 0 if not left else min(round((now - self._first[1]) / done * left), COUNT_MAX) if done else None


def step_line(step: Step) -> str:
    """Line for node 0's log."""
    total = f"/{step.total_steps}" if step.total_steps else ""
    parts = [f"Step {step.step}{total}", *(f"{name}: {value}" for name, value in step.metrics.items() if name in ("loss", "learning_rate"))]
    if step.estimated_remaining_seconds is not None:
        minutes, seconds = divmod(step.estimated_remaining_seconds, 60)
        parts.append(f"ETA: {minutes // 60}:{minutes % 60:02}:{seconds:02}")
    return " | ".join(parts)


class ProgressServer:
    """The endpoint of one agent. `take` gets each step, `say` a line for people."""

    def __init__(self, folder: Path, take: Callable[[Step], None], say: Callable[[str], None]) -> None:
        self._token_file = folder / "progress-token"
        self._token = os.urandom(24).hex()
        self._take = take
        self._say = say
        self._pace = RemainingTime()
        self._server: asyncio.Server | None = None
        self._malformed_said = False

    async def start(self) -> dict[str, str]:
        """The variables for the ranks; none, and a line that says so, when there is no port or folder to be had."""
        try:
            self._token_file.touch(mode=0o600)
            self._token_file.write_text(self._token, encoding="ascii")
            self._server = await asyncio.start_server(self._serve, LOOPBACK, 0, limit=HEAD_BYTES)
        except OSError as error:
            self._say(f"cannot take progress reports from the script ({error.strerror}); it runs without them")
            return {}
        port = self._server.sockets[0].getsockname()[1]
        return {URL: f"http://{LOOPBACK}:{port}/", TOKEN: str(self._token_file)}

    def begin_attempt(self) -> None:
        """The pace of another attempt says nothing about this one."""
        self._pace = RemainingTime()

    def begin_stop(self) -> None:
        """Ranks were told to save and stop."""
        self._pace.is_stopping = True

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            status, body = await asyncio.wait_for(self._request(reader), PATIENCE_SECONDS)
            writer.write(f"HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode("ascii"))
            await writer.drain()
            if body is not None:
                self._received(body)
        except (TimeoutError, OSError, ValueError, EOFError, asyncio.LimitOverrunError):
            pass  # who asks in this way gets no reply
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _request(self, reader: asyncio.StreamReader) -> tuple[str, bytes | None]:
        """The reply's status, and the body when it is to be read."""
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
        if not hmac.compare_digest(headers.get("authorization", "").encode(), f"Bearer {self._token}".encode()):
            return "401 Unauthorized", None
        if not first.startswith("POST "):
            return "405 Method Not Allowed", None
        length = int(headers.get("content-length", "0"))
        if not 0 <= length <= BODY_BYTES:
            return "413 Content Too Large", None
        return "200 OK", await reader.readexactly(length)

    def _received(self, body: bytes) -> None:
        try:
            step = self._pace.step(parse_status(body), time.monotonic())
        except ContractError as error:
            if not self._malformed_said:
                self._malformed_said = True
                self._say(f"ignored a malformed progress report, and will ignore more like it: {error}")
            return
        if step is not None:
            self._say(step_line(step))
            self._take(step)


def offered(variables: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """The variables for a rank with this environment. One that already reports elsewhere is left alone; a proxy is not asked for
    loopback.
    """
    if not variables or URL in environment:
        return {}
    proxied = any(environment.get(proxy) for proxy in ("http_proxy", "HTTP_PROXY"))
    bypass = {name: environment.get(name, "") for name in ("no_proxy", "NO_PROXY")} if proxied else {}
    return {**variables, **{name: f"{hosts},{LOOPBACK}".lstrip(",") for name, hosts in bypass.items()}}
