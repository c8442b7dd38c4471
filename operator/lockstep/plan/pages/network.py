"""Pages about a measured network: the worst pairs, and a matrix of small networks (pure)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from lockstep.plan.cluster.pairs import PairRate, PairsMeasured, gigabits, usual_gbs
from lockstep.plan.pages.table import aligned
from lockstep_spec.words import number_of

SHOWN = 20
"""Pairs that the table has; the others are summed up in a line."""
MATRIX_NODES = 10
COLUMNS = ("FROM", "TO", "RAIL", "Gb/s", "OF LINE", "ROUND TRIP")


def pairs_page(measured: PairsMeasured) -> Iterator[str]:
    """The worst pairs first, then a line a rail, and matrices of networks of a few nodes."""
    worst = measured.worst()
    yield from aligned([COLUMNS, *(_cells(measured, rate) for rate in worst[:SHOWN])])
    rest = [rate for rate in worst[SHOWN:] if not rate.error]
    if rest:
        yield f"… and {number_of(len(rest), 'measurement')} of {gigabits(min(rate.gbs for rate in rest))} Gb/s or more (-o json has all)"
    for rail in measured.rails:
        rates = measured.of_rail(rail.name)
        yield ""
        yield _summary(measured, rail.name, rates)
        if 2 < len(rail.ends) <= MATRIX_NODES:
            yield from _matrix(measured, rates, sorted(rail.ends))


def _cells(measured: PairsMeasured, rate: PairRate) -> tuple[str, ...]:
    value = rate.error or gigabits(rate.gbs)
    share = "-" if rate.share is None or rate.error else f"{rate.share:.0%}"
    trip = "-" if rate.microseconds is None else f"{rate.microseconds} us"
    return measured.names[rate.sender], measured.names[rate.receiver], rate.rail, value, share, trip


def _summary(measured: PairsMeasured, rail: str, rates: Sequence[PairRate]) -> str:
    gone = [rate for rate in rates if not rate.error]
    if not gone:
        return f"rail {rail}: nothing arrived"
    shares = [rate.share for rate in gone if rate.share is not None]
    line = (
        f", {min(shares):.0%} to {max(shares):.0%} of the line rate"
        if shares
        else "; its line rate is not known (--line-rate GBPS states it)"
    )
    least, most = (gigabits(pick(rate.gbs for rate in gone)) for pick in (min, max))
    return f"rail {rail}: {least} to {most} Gb/s over {number_of(len(gone), 'measurement')} by {measured.over}{line}"


def _matrix(measured: PairsMeasured, rates: Sequence[PairRate], nodes: Sequence[int]) -> Iterator[str]:
    values = {(rate.sender, rate.receiver): "none" if rate.error else gigabits(rate.gbs) for rate in rates}
    rows = [["Gb/s from ↓ to →", *(measured.names[node] for node in nodes)]]
    rows += [[measured.names[sender], *(values.get((sender, receiver), "·") for receiver in nodes)] for sender in nodes]
    yield from aligned(rows)


def pairs_values(measured: PairsMeasured) -> dict[str, Any]:
    """Return the same for scripts."""
    return {
        "over": measured.over,
        "nodes": [{"node": node, "name": name, "host": measured.nodes[node].host} for node, name in sorted(measured.names.items())],
        "rails": [
            {
                "rail": rail.name,
                "usualGigabits": round(usual_gbs(measured.of_rail(rail.name)), 3),
                "ports": {
                    measured.names[node]: {
                        "interface": end.interface, "address": end.address, "lineGigabits": end.gbs, "mtu": end.mtu,
                        **({"hca": end.hca} if end.hca else {}),
                    }
                    for node, end in sorted(rail.ends.items())
                },
            }
            for rail in measured.rails
        ],
        "pairs": [
            {
                "rail": rate.rail, "from": measured.names[rate.sender], "to": measured.names[rate.receiver], "gigabits": round(rate.gbs, 4),
                "lineGigabits": rate.line_gbs, "share": None if rate.share is None else round(rate.share, 4),
                "roundTripMicroseconds": rate.microseconds, **({"error": rate.error} if rate.error else {}),
            }
            for rate in measured.worst()
        ],
        "leastGigabits": round(measured.least_gbs(), 4),
    }  # fmt: skip
