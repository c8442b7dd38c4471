"""What is written as YAML is read back as it was, by PyYAML and by parsers of YAML 1.2."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.api.errors import ConfigError
from lockstep.api.files import yamlnodes
from lockstep.api.files.yamltext import dump_all_yaml, dump_yaml

AWKWARD = st.text(st.sampled_from("ab \n\t\r\x85\u2028\ufeff:#-|>{}[]'\"0e.é\x00😀"), max_size=12)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), AWKWARD, st.text(max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(min_size=1, max_size=5), inner, max_size=3)),
    max_leaves=8,
)


@settings(max_examples=300)
@given(VALUES)
def test_any_value_comes_back(value: Any) -> None:
    assert yaml.safe_load(dump_yaml({"value": value})) == {"value": value}


@pytest.mark.parametrize(
    "text", ["2e-4", "1e5", "0o17", "1_000", "12", "0.5", ".5", "y", "N", "on", "null", "~", "2026-01-01", "0x1f", "+1"]
)
def test_text_that_another_parser_takes_for_something_else_is_in_quotes(text: str) -> None:
    assert dump_yaml({"a": text}) == f"a: '{text}'\n"


def test_text_of_several_lines_is_shown_as_lines() -> None:
    assert dump_yaml({"notes": "one\ntwo\n"}) == "notes: |\n  one\n  two\n"


def test_a_value_that_is_there_twice_is_written_twice() -> None:
    shared = {"a": "b"}
    assert dump_yaml([shared, shared]) == "- a: b\n- a: b\n"


def test_documents_are_divided() -> None:
    assert dump_all_yaml([{"a": 1}, {"b": 2}]) == "a: 1\n---\nb: 2\n"


@pytest.mark.parametrize(("count", "is_refused"), [(18, False), (20, True)])
def test_a_file_has_at_most_20_000_values_with_its_aliases_written_out(count: int, is_refused: bool) -> None:
    text = f"a: &a [{', '.join(['1'] * 1000)}]\nb: [{', '.join(['*a'] * count)}]\n"
    with pytest.raises(ConfigError, match="more than 20000 values with its aliases") if is_refused else nullcontext():
        yamlnodes._check_size(yaml.compose(text), "job.yaml")
