"""`lockstep run -f` on a cluster: when a job that has the name is followed, what to type where it isn't, and when a new one counts as
refused.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest

from lockstep.api.errors import ConfigError
from lockstep.api.job import TrainingJob, TrainingJobSpec
from lockstep.api.model import Model
from lockstep.api.names import FIXED_FIELDS
from lockstep.api.objects import Typed
from lockstep.api.training import Training
from lockstep.plan.ahead.submission import UNREADABLE, SubmittedAs, differences, name_taken, refuse_ended, standing
from lockstep.plan.reasons import Reason

Object = dict[str, Any]
TYPED = SubmittedAs(Typed("job.yaml", ("-n", "team")), "local", "team", "cluster local")
SPEC: Object = {
    "nodes": 2,
    "training": {"model": {"name": "/workspace/models/base"}, "data": {"path": "/datasets/train.jsonl"}},
}


def a_job(**spec: Any) -> TrainingJob:
    return TrainingJob.model_validate({"metadata": {"name": "demo"}, "spec": {**copy.deepcopy(SPEC), **spec}})


def on_cluster(*conditions: tuple[str, str, str], **spec: Any) -> Object:
    """The job as the API server has it, with the defaults that it fills in."""
    stored = a_job(**spec).model_dump(mode="json", by_alias=True, exclude_none=True)
    status = {"conditions": [{"type": kind, "status": value, "reason": reason, "message": "m"} for kind, value, reason in conditions]}
    return {**stored, "metadata": {"name": "demo", "namespace": "team", "uid": "u"}, "status": status}


RUNNING, DONE, BROKEN = ("Progressing", "True", "Running"), ("Complete", "True", "Complete"), ("Failed", "True", "RanksFailed")


@pytest.mark.parametrize(
    "spec",
    [{}, {"cluster": "local"}, {"restart": {"retry": 3}}, {"restart": {"maxRestarts": 3}, "fabric": {"mode": "Auto"}}],
)
@pytest.mark.parametrize("state", [[], [RUNNING]])
def test_the_same_job_that_has_not_ended_is_followed(spec: Object, state: list[tuple[str, str, str]]) -> None:
    assert differences(a_job(), on_cluster(**spec)) == ()
    assert name_taken(a_job(), on_cluster(*state, **spec), TYPED) == ()


def test_a_job_that_names_another_cluster_is_another_job() -> None:
    assert differences(a_job(cluster="a"), on_cluster(cluster="b")) == ("cluster",)


def test_a_job_of_a_later_version_is_not_taken_for_the_same() -> None:
    newer = on_cluster(RUNNING)
    newer["spec"]["soon"] = 1
    assert differences(a_job(), newer) == (UNREADABLE,)
    assert not any("kubectl apply" in line for line in name_taken(a_job(), newer, TYPED))


@pytest.mark.parametrize(
    ("wanted", "existing", "says", "commands"),
    [
        (
            a_job(), on_cluster(DONE), "is complete; nothing was changed:",
            ["lockstep describe demo -n team", "lockstep delete demo -n team",
                "lockstep run -f job.yaml -n team --set metadata.name=demo-2"],
        ),
        (
            a_job(), on_cluster(BROKEN), "has failed; nothing was changed:",
            ["lockstep why demo -n team", "lockstep retry demo -n team", "lockstep delete demo -n team",
                "lockstep run -f job.yaml -n team --set metadata.name=demo-2"],
        ),
        (
            a_job(), on_cluster(RUNNING, suspend=True), "is stopped; nothing was changed:",
            ["lockstep resume demo -n team", "lockstep delete demo -n team", "lockstep run -f job.yaml -n team --set metadata.name=demo-2"],
        ),
        (
            a_job(nodes=4), on_cluster(RUNNING), "has not ended and differs from job.yaml in nodes; nothing was changed:",
            ["lockstep logs demo -n team -f", "lockstep scale demo -n team 4", "lockstep delete demo -n team",
                "lockstep run -f job.yaml -n team --set metadata.name=demo-2"],
        ),
        (
            a_job(startTimeoutSeconds=77, nodes=3), on_cluster(RUNNING), "differs from job.yaml in nodes, startTimeoutSeconds; nothing",
            ["lockstep logs demo -n team -f", "kubectl apply -n team -f job.yaml", "lockstep delete demo -n team",
                "lockstep run -f job.yaml -n team --set metadata.name=demo-2"],
        ),
        (
            a_job(storage={"mode": "PerPod"}), on_cluster(RUNNING), "differs from job.yaml in storage.mode; nothing",
            ["lockstep logs demo -n team -f", "lockstep delete demo -n team",
                "lockstep run -f job.yaml -n team --set metadata.name=demo-2"],
        ),
        (
            a_job(nodes=4), on_cluster(BROKEN), "has failed and differs from job.yaml in nodes; nothing",
            ["lockstep why demo -n team", "lockstep delete demo -n team", "lockstep run -f job.yaml -n team --set metadata.name=demo-2"],
        ),
    ],
)  # fmt: skip
def test_a_name_that_is_taken_is_answered_with_what_can_be_typed(
    wanted: TrainingJob, existing: Object, says: str, commands: list[str]
) -> None:
    sentence, *steps = name_taken(wanted, existing, TYPED)
    assert sentence.startswith("namespace team has a job demo, which ") and says in sentence
    assert [step.strip().partition("   #")[0] for step in steps] == commands


def test_a_job_that_is_complete_is_trained_anew_only_from_step_0() -> None:
    (delete,) = [line for line in name_taken(a_job(), on_cluster(DONE), TYPED) if "lockstep delete" in line]
    assert "then lockstep run -f job.yaml -n team --fresh" in delete
    script = TrainingJob.model_validate({"metadata": {"name": "demo"}, "spec": {"script": {"path": "a.py"}}})
    done = {**on_cluster(DONE), "spec": {"script": {"path": "a.py"}}}
    assert "--fresh" not in "".join(name_taken(script, done, TYPED))


def test_what_changes_a_job_goes_through_render_where_the_file_alone_does_not_say_it() -> None:
    typed = SubmittedAs(Typed("job.yaml", ("--set", "startTimeoutSeconds=77")), "local", "team", "cluster local")
    expected = "lockstep render -f job.yaml --set startTimeoutSeconds=77 --cluster local -n team -o job | kubectl apply -f -"
    assert any(line.strip().startswith(expected) for line in name_taken(a_job(startTimeoutSeconds=77), on_cluster(RUNNING), typed))


@pytest.mark.parametrize(
    ("wanted", "there", "options", "expected"),
    [
        (
            "mine",
            "mine",
            ("--cluster", "mine"),
            "lockstep render -f job.yaml --cluster mine -n team --set cluster=mine -o job | kubectl apply -f -",
        ),
        (None, "mine", (), "lockstep render -f job.yaml --cluster local -n team --set cluster=mine -o job | kubectl apply -f -"),
        ("mine", "mine", (), "kubectl apply -n team -f job.yaml"),
        ("mine", None, (), "lockstep render -f job.yaml --cluster local -n team -o job | kubectl apply -f -"),
    ],
)
def test_a_change_leaves_the_job_the_cluster_that_it_may_not_change(
    wanted: str | None, there: str | None, options: tuple[str, ...], expected: str
) -> None:
    typed = SubmittedAs(Typed("job.yaml", options), "local", "team", "cluster local")
    ours = a_job(startTimeoutSeconds=77, **({"cluster": wanted} if wanted else {}))
    lines = name_taken(ours, on_cluster(RUNNING, **({"cluster": there} if there else {})), typed)
    assert [line.strip().partition("   #")[0] for line in lines if "apply" in line] == [expected]


def test_commands_for_a_job_that_has_ended_lead_to_the_same_context() -> None:
    with pytest.raises(ConfigError) as raised:
        refuse_ended(a_job(), on_cluster(DONE), "demo -n team --context c", "", Typed("job.yaml", ("-n", "team"), context="c"))
    assert [line for line in raised.value.args[1:] if "--context c" not in line] == []


def test_what_was_typed_with_fresh_is_repeated_with_it() -> None:
    change = "training.checkpoint.resumeFrom=None"
    typed = SubmittedAs(Typed("job.yaml", ("-n", "team"), (change,), context="c"), "local", "team", "cluster local", " --context c")
    training = {**SPEC["training"], "checkpoint": {"resumeFrom": "None"}}
    running = name_taken(a_job(training=training), on_cluster(RUNNING), typed)
    expected = f"lockstep render -f job.yaml -n team --cluster local --set {change} -o job | kubectl apply --context c -f -"
    assert any(line.strip().startswith(expected) for line in running)
    (delete,) = [line for line in name_taken(a_job(training=training), on_cluster(BROKEN), typed) if "lockstep delete" in line]
    assert delete.startswith("  lockstep delete demo -n team --context c   #")
    assert "then lockstep run -f job.yaml -n team --context c --fresh starts yours" in delete


def test_a_job_that_is_being_deleted_is_waited_for() -> None:
    going = on_cluster(RUNNING)
    going["metadata"]["deletionTimestamp"] = "2026-11-27T12:00:00Z"
    (sentence,) = name_taken(a_job(), going, TYPED)
    assert "is being deleted" in sentence


def conditions(**of: tuple[str, str]) -> Object:
    return {"conditions": [{"type": kind, "status": value, "reason": reason, "message": "m"} for kind, (value, reason) in of.items()]}


@pytest.mark.parametrize(
    ("status", "accepted", "refused", "is_final"),
    [
        ({}, False, "", False),
        (conditions(Accepted=("True", "Accepted"), Progressing=("False", "Scheduling")), True, "", False),
        (conditions(Accepted=("False", "InvalidSpec"), Progressing=("False", "InvalidSpec")), False, "m", True),
        (conditions(Accepted=("False", "ClusterNotFound"), Progressing=("False", "ClusterNotFound")), False, "m", True),
        (conditions(Accepted=("False", "ServiceAccountNotFound"), Progressing=("False", "ServiceAccountNotFound")), False, "m", False),
        (conditions(Accepted=("False", "PreviousJobRemains"), Progressing=("False", "PreviousJobRemains")), False, "m", False),
        (conditions(Accepted=("False", "InvalidSpec"), Progressing=("True", "Running")), False, "", False),
    ],
)
def test_a_job_is_refused_only_where_its_own_words_keep_it_from_a_start(
    status: Object, accepted: bool, refused: str, is_final: bool
) -> None:
    now = standing(status)
    assert (now.accepted, now.refused, now.is_final) == (accepted, refused, is_final)


def test_only_what_is_left_of_an_earlier_job_passes_by_itself() -> None:
    def passes(reason: Reason) -> bool:
        return standing(conditions(Accepted=("False", reason), Progressing=("False", reason))).passes

    assert [reason for reason in Reason if passes(reason)] == [Reason.PREVIOUS_JOB_REMAINS]


def test_every_field_that_nobody_may_change_is_known_as_such() -> None:
    def ruled(model: type[Model]) -> set[str]:
        return {str(rule.field) for rule in model.RULES if "may not be changed after creation" in rule.message}

    of_training = {f"training.{field}" for field in ruled(Training)}
    known = {field if not field.startswith("training.model.") else "training.model" for field in FIXED_FIELDS}
    assert known == ruled(TrainingJobSpec) | of_training | {"storage"}
