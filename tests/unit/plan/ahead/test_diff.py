"""diff: only what Lockstep sets, and nothing for what the API server adds, drops or spells in another way."""

from __future__ import annotations

from typing import Any

import pytest

from golden.plan_cases import CONTEXT, cluster, job, of_kind
from lockstep.plan.diff import MISSING, Change, changes, needs_recreation
from lockstep.plan.render.objects import render
from lockstep.plan.render.resolve import resolve


@pytest.mark.parametrize(
    ("desired", "observed"),
    [
        ({"a": 1}, {"a": 1, "b": 2}),
        ({"a": {"b": [{"c": 1}]}}, {"a": {"b": [{"c": 1, "default": True}], "d": 1}}),
        ({"value": ""}, {}),
        ({"env": []}, {"env": None}),
        ({"limits": {"cpu": "1000m"}}, {"limits": {"cpu": "1"}}),
        ({"requests": {"memory": "1024Mi"}}, {"requests": {"memory": "1Gi"}}),
        ({"requests": {"memory": "1Ki"}}, {"requests": {"memory": "1024"}}),
        ({"requests": {"cpu": "0.0001"}}, {"requests": {"cpu": "1m"}}),
        ({"emptyDir": {"sizeLimit": "0.5Ki"}}, {"emptyDir": {"sizeLimit": "512"}}),
        ({"requests": {"storage": "99999999P"}}, {"requests": {"storage": "9223372036854775807"}}),
    ],
)
def test_what_the_api_server_adds_drops_or_respells_is_no_change(desired: dict[str, Any], observed: dict[str, Any]) -> None:
    assert changes(desired, observed) == []


@pytest.mark.parametrize(
    ("desired", "observed", "change"),
    [
        ({"a": 1}, {"a": 2}, Change("a", 1, 2)),
        ({"a": 1}, {}, Change("a", 1, MISSING)),
        ({"a": False}, {}, Change("a", False, MISSING)),
        ({"a": "1"}, {"a": 1}, Change("a", "1", 1)),
        ({"a": True}, {"a": 1}, Change("a", True, 1)),
        ({"a": {"b": [1, 2]}}, {"a": {"b": [1, 3]}}, Change("a.b[1]", 2, 3)),
        ({"a": [1]}, {"a": [1, 2]}, Change("a", [1], [1, 2])),
        ({"a": {"x/y": 1}}, {"a": {"x/y": 2}}, Change("a['x/y']", 1, 2)),
        ({"limits": {"cpu": "1"}}, {"limits": {"cpu": "2"}}, Change("limits.cpu", "1", "2")),
        ({"requests": {"memory": "1Ki"}}, {"requests": {"memory": "1k"}}, Change("requests.memory", "1Ki", "1k")),
        ({"value": "1000m"}, {"value": "1"}, Change("value", "1000m", "1")),
    ],
)
def test_a_field_that_differs_is_told_with_its_path(desired: dict[str, Any], observed: dict[str, Any], change: Change) -> None:
    assert changes(desired, observed) == [change]


def stateful_set(**spec: Any) -> dict[str, Any]:
    (found,) = of_kind(render(resolve(job(**spec), cluster("barcelona")), CONTEXT), "StatefulSet")
    return found


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({}, False),
        ({"suspend": True}, False),
        ({"env": [{"name": "A", "value": "b"}]}, False),
        ({"storage": {"mode": "Shared"}}, True),
    ],
)
def test_a_stateful_set_is_made_again_when_its_claims_differ(spec: dict[str, Any], expected: bool) -> None:
    assert needs_recreation(stateful_set(**spec), stateful_set()) is expected
    assert needs_recreation(stateful_set(), stateful_set(**spec)) is expected


def test_other_kinds_are_never_made_again() -> None:
    service, other = {"kind": "Service", "spec": {"a": 1}}, {"kind": "Service", "spec": {"a": 2}}
    assert not needs_recreation(service, other)
