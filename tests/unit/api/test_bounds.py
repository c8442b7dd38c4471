"""Limits of what a job, its status and a file of hosts may hold, each with a value at it and one beyond, and what a job gets that states
nothing.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
from pydantic import ValidationError

from lockstep.api.hosts import Host
from lockstep.api.job import TrainingJob, TrainingJobSpec
from lockstep.kube.reading import loads
from lockstep.plan.reconcile.status import fitted

Object = dict[str, Any]
YEAR = 366 * 86400


def spec_of(**stated: Any) -> TrainingJobSpec:
    work = {} if {"training", "script", "type"} & stated.keys() else {"script": {"path": "a.py"}}
    job = {"apiVersion": "lockstep.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "x"}, "spec": work | stated}
    return TrainingJob.model_validate(job).spec


def arguments(size: int) -> Object:
    """Half of the characters of most have two bytes."""
    return {"script": {"path": "a.py", "args": [*["é" * 2048] * (size // 4096), "x" * (size % 4096)]}}


def notes(size: int) -> Object:
    """Annotations of 8,000 bytes each with their keys, in characters of two bytes, and one with the rest."""
    whole = {f"note-{number:02}": "é" * 3996 + "x" for number in range(size // 8000)}
    return {"podTemplate": {"annotations": whole | {"note-xx": "x" * (size % 8000 - len("note-xx"))}}}


def environment(**fields: int) -> Object:
    return {"type": "Interactive", **fields}


def learning_rate(characters: int) -> Object:
    optimization = {"learningRate": "0." + "0" * (characters - 3) + "1"}
    return {"training": {"model": {"name": "/m"}, "data": {"path": "/d"}, "optimization": optimization}}


def name(characters: int) -> str:
    return ".".join(["a" * 49] * 5 + ["b" * (characters - 250)])


@pytest.mark.parametrize(
    ("most", "more", "says"),
    [
        (arguments(131_072), arguments(131_073), "args may have at most 131072 bytes in all"),
        (notes(250_000), notes(250_001), "annotations may have at most 250000 bytes in all"),
        ({"nodes": 1024, "gpusPerNode": 8}, {"nodes": 1024, "gpusPerNode": 9}, "a job may have at most 8192 ranks"),
        (learning_rate(24), learning_rate(25), "at most 24 characters"),
        ({"cluster": name(253)}, {"cluster": name(254)}, "at most 253 characters"),
        ({"podTemplate": {"labels": {f"{name(253)}/a": "b"}}}, {"podTemplate": {"labels": {f"{name(254)}/a": "b"}}},
            "at most 253 characters"),
        (environment(idleSeconds=YEAR), environment(idleSeconds=YEAR + 1), "less than or equal to 31622400"),
        ({"activeDeadlineSeconds": 10 * YEAR}, {"activeDeadlineSeconds": 10 * YEAR + 1}, "less than or equal to 316224000"),
        ({"ttlSecondsAfterFinished": 10 * YEAR}, {"ttlSecondsAfterFinished": 10 * YEAR + 1}, "less than or equal to 316224000"),
    ],
    ids=["arguments", "annotations", "ranks", "number", "name", "prefix", "idle", "deadline", "removal"],
)  # fmt: skip
def test_a_job_holds_so_much_and_no_more(most: Object, more: Object, says: str) -> None:
    for stated in (most, more):
        with pytest.raises(ValidationError, match=says) if stated is more else nullcontext():
            spec_of(**stated)


@pytest.mark.parametrize(
    ("gpus", "says"), [(65, "must be a number of GPUs, or a list"), (list(range(65)), "at most 64")], ids=["number", "list"]
)
def test_a_host_has_at_most_64_gpus(gpus: int | list[int], says: str) -> None:
    assert Host.model_validate({"name": "a", "gpus": 64}).gpus == 64
    with pytest.raises(ValidationError, match=says):
        Host.model_validate({"name": "a", "gpus": gpus})


def test_a_job_that_states_nothing_restarts_three_times_waits_ten_seconds_and_reads_2048_tokens() -> None:
    spec = spec_of(training={"model": {"name": "/m"}, "data": {"path": "/d"}})
    assert spec.training is not None and spec.training.data.max_length == 2048
    assert (spec.restart.max_restarts, spec.restart.backoff_seconds) == (3, 10)


def test_a_text_of_a_status_has_1024_characters_and_a_message_4096() -> None:
    cluster = fitted({"cluster": {"name": "x" * 5000, "hash": "h", "transport": "TCP"}})["cluster"]
    failure = fitted({"failure": {"message": "x" * 5000}})["failure"]
    assert (len(cluster["name"]), len(failure["message"])) == (1024, 4096)


def test_an_object_of_the_cluster_is_read_to_64_levels_below_its_fields() -> None:
    value, levels = loads(b"[" * 100 + b"]" * 100), 0
    while value and isinstance(value, list):
        value, levels = value[0], levels + 1
    assert (value, levels) == ("(deeper than 64 levels)", 67)
