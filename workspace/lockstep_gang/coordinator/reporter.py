"""Reports to the operator: at once on every transition, else every 15 s, repeated until accepted. Training never waits for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from http import HTTPStatus
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from lockstep_gang.contract.reply import Reply, parse_reply
from lockstep_gang.contract.report import Report, report_body, smallest
from lockstep_gang.contract.run import ReportTarget
from lockstep_gang.contract.trouble import Trouble, TroubleKind
from lockstep_gang.coordinator.network import resolved, trouble_of
from lockstep_gang.coordinator.waits import happens_within
from lockstep_spec.codec import ContractError

if TYPE_CHECKING:
    from lockstep_gang.coordinator.https_post import Answer, Sender
import asyncio
import random
import time

PERIOD_SECONDS = 15.0
NEWS_SECONDS = 1.0
"""Least time between two reports of which none is a transition."""
ASKING_SECONDS = 5.0
"""Period instead of PERIOD_SECONDS while nodes are missing: the reply says what the cluster knows of them."""
RETRY_SECONDS = (0.2, 30.0)
"""First and longest wait after a failed attempt, doubled in between, each shortened by up to half: an operator that comes back is met by
all jobs.
"""
COMPLAINT_SECONDS = 60.0
"""Time after which the same trouble is logged again: `lockstep why` reads the end of this log where no report comes."""
_PASSING = frozenset({401, 403, 408, 409, 421, 429})
"""Refusals that are about the sender or the moment. After others of 400 to 499 the same report is never taken."""
TRANSITIONS_MAX = 64
"""Number of transitions kept while the operator is away; the oldest go first, since every report has the whole state."""


class Reporter:
    """Delivers the transitions in order, then whatever is newest."""

    def __init__(self, target: ReportTarget, key: bytes, take: Callable[[Reply], None], say: Callable[[str], None]) -> None:
        self._target = target
        self._key = key
        self._take = take
        self._say = say
        self._sequence = time.time_ns()
        self._transitions: deque[Report] = deque(maxlen=TRANSITIONS_MAX)
        self._latest: Callable[[], Report] | None = None
        self._has_news = False
        self._period = PERIOD_SECONDS
        self._told_at = 0.0
        self._wake = asyncio.Event()
        self._delivered = asyncio.Event()
        self._trouble_text = ""
        self._complained_at = 0.0
        self._refusals: set[bool] = set()
        """Refusals that were logged: of a whole report, and of a smallest one."""
        self.trouble: Trouble | None = None
        """Reason why no report has ever been taken."""
        self._was_heard = False
        self._sender: Sender | None = None
        self._leader: str | None = None
        """Address of the operator's replica that takes reports, once another one has named it."""

    def transition(self, report: Report) -> None:
        self._delivered.clear()
        self._transitions.append(report)
        self._latest = lambda: replace(report, log=())
        self._wake.set()

    def news(self, make: Callable[[], Report]) -> None:
        """Offer a report that is worth sending soon: a node came or a commit was made. It is made when it is sent. Steps go with the next
        report.
        """
        self._latest = make
        self._has_news = True
        self._wake.set()

    def refresh(self, make: Callable[[], Report]) -> None:
        """Offer a report for the next time that one is due."""
        self._latest = make

    def ask(self, often: bool) -> None:
        """Report more often while the operator's replies are waited for."""
        period = ASKING_SECONDS if often else PERIOD_SECONDS
        if period != self._period:
            self._period = period
            self._wake.set()

    async def flush(self, seconds: float) -> None:
        """Wait until every transition was accepted, but not longer than this."""
        if self._transitions:
            await asyncio.wait([asyncio.ensure_future(self._delivered.wait())], timeout=seconds)

    async def run(self) -> None:
        while True:
            await happens_within(self._wake, max(0.0, self._due() - time.monotonic()))
            self._wake.clear()
            while self._transitions:
                await self._deliver(self._transitions[0])
                self._transitions.popleft()
            self._delivered.set()
            if self._latest is not None and time.monotonic() >= self._due():
                await self._deliver(self._latest())

    def _due(self) -> float:
        return self._told_at + (NEWS_SECONDS if self._has_news else self._period)

    async def _deliver(self, report: Report) -> None:
        """Return when the operator has accepted it, at least its smallest form, or refuses that, too. A retry keeps its number: refused as
        not newer means that it had arrived.
        """
        self._sequence += 1
        self._told_at, self._has_news = time.monotonic(), False
        wait, repeated, is_whole = RETRY_SECONDS[0], False, True
        while True:
            answer = await self._post(replace(report, sequence=self._sequence))
            if answer is not None and answer.status == HTTPStatus.OK:
                return self._accepted(answer)
            if answer is not None and answer.status == HTTPStatus.CONFLICT:
                if repeated or answer.is_repeated:
                    return None
                self._sequence = max(answer.value("sequence", int) or 0, self._sequence, time.time_ns()) + 1
            if answer is not None and _is_final(answer):
                self._refused(answer, is_whole=is_whole)
                if not is_whole:
                    return None
                report, repeated, is_whole = smallest(report), False, False
                continue
            repeated = answer is None
            # 421: another replica leads; it was named, or the Service may choose it the next time, so soon again.
            misdirected = answer is not None and answer.status == HTTPStatus.MISDIRECTED_REQUEST
            least = 0.0 if answer is None else min(answer.again_seconds, RETRY_SECONDS[1])
            await asyncio.sleep(least + (RETRY_SECONDS[0] if misdirected else wait) * random.uniform(0.5, 1.0))  # noqa: S311 (spread, not a secret)
            wait = min(wait * 2, RETRY_SECONDS[1])

    async def _post(self, report: Report) -> Answer | None:
        """Answer of the operator; None: nobody answered, so whether the report arrived is not known."""
        from lockstep_gang.coordinator.https_post import Sender  # ssl takes 30 ms to import: only who reports pays

        self._sender = self._sender or Sender(self._target, self._key)
        url = urlsplit(self._target.url)
        host, port = url.hostname or "", url.port or 443
        try:
            if not self._was_heard and self._leader is None:
                await resolved(host, port)
            answer = await asyncio.to_thread(self._sender.post, report.job, report_body(report), self._leader)
        except Exception as error:  # (whatever a report meets must not reach the training)
            self._leader = None
            self.trouble = None if self._was_heard else trouble_of(error, host, port, "the operator")
            self._complain(f"{type(error).__name__}: {error}")
            return None
        if answer.status in (HTTPStatus.OK, HTTPStatus.CONFLICT) or _is_final(answer):
            return answer
        self._leader = answer.value("leader", str)
        if self._leader is None:
            words = _words(answer)
            is_refused = answer.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN) and not self._was_heard
            self.trouble = Trouble(TroubleKind.REFUSED, f"the operator refuses node 0's reports ({words})") if is_refused else None
            self._complain(words)
        return answer

    def _accepted(self, answer: Answer) -> None:
        self._trouble_text, self.trouble, self._was_heard = "", None, True
        try:
            self._take(parse_reply(answer.body))
        except ContractError as error:
            self._complain(str(error))

    def _refused(self, answer: Answer, *, is_whole: bool) -> None:
        if is_whole not in self._refusals:
            self._refusals.add(is_whole)
            then = "it gets the state of the job alone" if is_whole else "it gets the next report"
            self._say(f"the operator refuses {'a' if is_whole else 'even the smallest'} report ({_words(answer)}): {then}; the job goes on")

    def _complain(self, trouble: str) -> None:
        now = time.monotonic()
        if trouble != self._trouble_text or now - self._complained_at >= COMPLAINT_SECONDS:
            self._trouble_text, self._complained_at = trouble, now
            self._say(f"the operator did not take the report ({trouble}); the job goes on, and the report is sent again")


def _is_final(answer: Answer) -> bool:
    return 400 <= answer.status < 500 and answer.status not in _PASSING


def _words(answer: Answer) -> str:
    return f"HTTP {answer.status} {answer.body[:200].decode(errors='replace').strip()}"
