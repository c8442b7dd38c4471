"""Lists of machines and launchers' command lines of other tools, of the kinds in lists.yaml."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from lockstep.api.errors import ConfigError
from lockstep.plan.translate.adhoc import TypedProgram
from lockstep.plan.translate.hosts import read_machines

TABLE = yaml.safe_load((Path(__file__).parent / "lists.yaml").read_text(encoding="utf-8"))
LISTS, LINES = TABLE["lists"], TABLE["lines"]


def text_of(case: dict[str, Any]) -> str:
    return "\ufeff" * case.get("mark", False) + case["file"].replace("\n", "\r\n" if case.get("crlf") else "\n")


@pytest.mark.parametrize("case", [case for case in LISTS if "hosts" in case], ids=lambda case: case["kind"])
def test_a_list_of_machines_has_these_hosts(case: dict[str, Any]) -> None:
    machines = read_machines(text_of(case), "hosts")
    read = [{key: value for key, value in host.items() if (key, value) != ("address", host["name"])} for host in machines.hosts]
    assert read == [{"name": host} if isinstance(host, str) else host for host in case["hosts"]]
    listed = [one.what for one in machines.leftovers]
    assert [one for one in case.get("left", ()) if listed.count(one) != 1] == []


@pytest.mark.parametrize("case", [case for case in LISTS if "refused" in case], ids=lambda case: case["kind"])
def test_what_is_no_list_of_machines_is_refused_with_its_line(case: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as refused:
        read_machines(text_of(case), "hosts")
    assert re.search(case["refused"], str(refused.value)), refused.value


@pytest.mark.parametrize("case", LINES, ids=lambda case: case["line"])
def test_a_launcher_s_line_is_answered_with_what_to_type(case: dict[str, Any]) -> None:
    if "command" in case:
        assert TypedProgram(case["line"].split()).fields == case["command"]
        return
    with pytest.raises(ConfigError, match=r"would start all ranks again") as refused:
        TypedProgram(case["line"].split())
    assert str(refused.value).endswith(f"leave it and its options out: {case['type']}")
