"""The corpus' score, printed at the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from corpus.verdicts import Fault, Score


@pytest.fixture
def scored(record_property: Callable[[str, object], None]) -> Callable[[Fault, Score, str], None]:
    """Takes down what an answer was worth."""

    def note(fault: Fault, score: Score, difference: str) -> None:
        record_property("corpus", (fault.id, fault.what, fault.expected.cause, str(score), difference))

    return note


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    rows = [
        value
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", "") == "call"
        for name, value in report.user_properties
        if name == "corpus"
    ]
    if not rows:
        return
    terminalreporter.section("corpus of faults")
    for identity, what, cause, score, difference in sorted(rows):
        terminalreporter.line(f"{identity:<20} {score:<6} {cause:<18} {what}{f': {difference}' if difference else ''}")
    count = Counter(row[3] for row in rows)
    right = 100 * count[Score.RIGHT] / len(rows)
    terminalreporter.line(
        f"{len(rows)} faults: {count[Score.RIGHT]} right ({right:.0f} %), {count[Score.VAGUE]} vague, {count[Score.WRONG]} wrong"
    )
