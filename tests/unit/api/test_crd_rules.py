"""The rules of the CRDs hold in Python too, with the same message."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from lockstep.api.cluster import TrainingCluster
from lockstep.api.job import TrainingJob
from support.crd_rule_cases import CASES, LABEL_KEYS, Object, WrittenRule, written_rules

MODELS = {"TrainingJob": TrainingJob, "TrainingCluster": TrainingCluster}
SAME_IN_PYTHON = [rule for rule, case in CASES.items() if case.before is None]  # the rest compare with an older object


def refusal(kind: str, value: Object) -> str:
    with pytest.raises(ValidationError) as caught:
        MODELS[kind].model_validate(value)
    return str(caught.value)


def test_every_rule_of_the_crds_has_an_accepted_and_a_refused_object() -> None:
    assert set(CASES) == set(written_rules())


@pytest.mark.parametrize("rule", SAME_IN_PYTHON, ids=lambda rule: rule.message[:40])
def test_python_refuses_what_a_rule_refuses(rule: WrittenRule) -> None:
    told = refusal(rule.kind, CASES[rule].refused)
    assert rule.message in told or (rule.path == "" and "metadata.name" in told) or rule.message == LABEL_KEYS


@pytest.mark.parametrize("rule", list(CASES), ids=lambda rule: rule.message[:40])
def test_python_accepts_what_a_rule_accepts(rule: WrittenRule) -> None:
    accepted = CASES[rule].accepted
    assert MODELS[rule.kind].model_validate(accepted).metadata.name == accepted["metadata"]["name"]


def test_every_broken_rule_of_a_model_is_told() -> None:
    both = {"requests": {"cpu": "2", "memory": "2Gi"}, "limits": {"cpu": "1", "memory": "1Gi"}}
    told = refusal("TrainingCluster", {"metadata": {"name": "x"}, "spec": {"resources": both}})
    assert "limits.cpu must be" in told and "limits.memory must be" in told


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"pod": {"env": [{"name": "A"}, {"name": "A", "value": "1"}]}}, "env holds 'A' twice"),
        ({"nodes": {"gpuNodes": ["a", "b", "a"]}}, "gpuNodes holds 'a' twice"),
    ],
)
def test_a_list_that_may_not_hold_a_thing_twice_does_not(spec: Object, message: str) -> None:
    assert message in refusal("TrainingCluster", {"metadata": {"name": "x"}, "spec": spec})
