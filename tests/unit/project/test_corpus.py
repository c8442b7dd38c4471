"""The corpus of faults: its table in the documents, and how an answer is judged."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from corpus.of_a_month import MONTH_FAULTS
from corpus.of_administrators import ADMINISTRATOR_FAULTS
from corpus.of_clusters import CLUSTER_FAULTS
from corpus.of_processes import RANK_FAULTS
from corpus.of_scripts import SCRIPT_FAULTS
from corpus.of_the_craft import CRAFT_FAULTS
from corpus.of_the_field import FIELD_CLUSTER_FAULTS, FIELD_FAULTS
from corpus.of_the_week import WEEK_FAULTS
from corpus.verdicts import Answer, Expected, Fault, Score, judge
from support.checkout import ROOT

PAGE = ROOT / "docs/reliability.md"
BEGIN, END = "<!-- corpus: begin -->\n", "<!-- corpus: end -->\n"
FAULTS: tuple[Fault, ...] = (
    *RANK_FAULTS,
    *SCRIPT_FAULTS,
    *FIELD_FAULTS,
    *CRAFT_FAULTS,
    *WEEK_FAULTS,
    *MONTH_FAULTS,
    *CLUSTER_FAULTS,
    *ADMINISTRATOR_FAULTS,
    *FIELD_CLUSTER_FAULTS,
)
EXPECTED = Expected("UserCode", "ValueError: bad label", "correct it first", rank=1, node=1)
GIVEN = Answer("Failed", "UserCode", 1, 1, "rank 1 on node 1 exited with 1: ValueError: bad label", "lockstep retry x  # correct it first")


def table() -> str:
    head = (
        "| id | fault | cause or reason | rank | node | the remedy that is named has | state |\n| --- | --- | --- | --- | --- | --- |"
        " --- |\n"
    )
    return head + "".join(_row(fault.id, fault.what, fault.expected) for fault in FAULTS)


def _row(identity: str, what: str, expected: Expected) -> str:
    who = ["any" if expected.everybody else "" if number is None else str(number) for number in (expected.rank, expected.node)]
    remedy = f"`{expected.remedy}`".replace("|", "\\|") if expected.remedy else ""
    return f"| `{identity}` | {what} | {expected.cause} | {who[0]} | {who[1]} | {remedy} | {expected.state} |\n"


def test_there_are_enough_faults_each_with_a_name_of_its_own() -> None:
    assert len(FAULTS) >= 60
    assert len({fault.id for fault in FAULTS}) == len(FAULTS)


def test_the_documents_have_the_table() -> None:
    """UPDATE_GOLDEN=1 writes it."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    there, _, after = rest.partition(END)
    if os.environ.get("UPDATE_GOLDEN"):
        PAGE.write_text(f"{before}{BEGIN}{table()}{END}{after}")
        return
    assert there == table()


def test_the_readme_has_the_number_of_the_faults() -> None:
    assert f"names the cause of all {len(FAULTS)} injected faults" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize(
    ("given", "score"),
    [
        (GIVEN, Score.RIGHT),
        (replace(GIVEN, state="Running"), Score.WRONG),
        (replace(GIVEN, cause="Hang"), Score.WRONG),
        (replace(GIVEN, rank=0), Score.WRONG),
        (replace(GIVEN, node=0), Score.WRONG),
        (replace(GIVEN, cause="", rank=None), Score.VAGUE),
        (replace(GIVEN, node=None), Score.VAGUE),
        (replace(GIVEN, words="it failed"), Score.VAGUE),
        (replace(GIVEN, remedies="again"), Score.VAGUE),
    ],
)
def test_an_answer_is_worth_what_it_says(given: Answer, score: Score) -> None:
    assert judge(EXPECTED, given)[0] is score


def test_nobody_may_be_blamed_where_nobody_is_to_blame() -> None:
    assert judge(replace(EXPECTED, rank=None), GIVEN)[0] is Score.WRONG
    assert judge(replace(EXPECTED, rank=0, everybody=True), GIVEN)[0] is Score.RIGHT
