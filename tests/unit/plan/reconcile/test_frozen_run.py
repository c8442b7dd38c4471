"""Frozen runs that somebody deletes, relabels or writes himself: a gang that runs goes on, and nothing is applied that the operator didn't
write.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from lockstep.api.names import ANNOTATION_RUN_HASH, ANNOTATION_RUN_PROOF, LABEL_JOB, run_name
from lockstep.api.objects import Object
from lockstep.kube.cluster import ApiError
from lockstep.plan.observed import Observed
from lockstep.plan.reconcile.accept import Accepted, accept
from lockstep.plan.reconcile.reconcile import Plan, reconcile
from lockstep.plan.render.objects import TEMPLATE_KEY, Frozen, GangRun, RenderContext
from lockstep.platforms.operator.execute import Executor
from lockstep.platforms.operator.memory.history import RememberedRuns
from lockstep.platforms.operator.secrets import job_key, run_key
from lockstep_gang.contract.report import State
from unit.plan.reconcile.test_reconcile import CONTEXT, NOW, UID, after, asked, condition, fresh, pod, replicas, report, settled, stored

SIGNING = replace(CONTEXT, run_key=run_key(b"m" * 32, UID))
NEWER = replace(SIGNING, agent_image="agent:2")
"""Of an operator that would freeze the job to another run."""


def hashed(index: int, run_hash: str) -> Object:
    item = pod(index)
    return {**item, "metadata": {**item["metadata"], "annotations": {ANNOTATION_RUN_HASH: run_hash}}}


def gang(context: RenderContext = SIGNING) -> Observed:
    """Two pods that run, as `context`'s operator started them."""
    observed = fresh()
    observed = after(observed, reconcile(observed, None, context, NOW))
    run_hash = frozen(observed)["metadata"]["name"].rpartition("-")[2]
    observed = replace(observed, pods=(hashed(0, run_hash), hashed(1, run_hash)))
    return after(observed, reconcile(observed, report(), context, NOW))


def frozen(observed: Observed) -> Object:
    return next(item for (kind, name), item in observed.objects.items() if kind == "ConfigMap" and "-run-" in name)


def run_of(observed: Observed) -> Frozen:
    item = frozen(observed)
    return Frozen("x", "ns", 2, item["data"]["run.json"], item["data"][TEMPLATE_KEY])


def without_run(observed: Observed) -> Observed:
    return replace(observed, objects={key: item for key, item in observed.objects.items() if "-run-" not in key[1]})


def with_run(observed: Observed, item: Object) -> Observed:
    return replace(observed, objects={**observed.objects, ("ConfigMap", item["metadata"]["name"]): item})


def harmful(item: Object) -> Object:
    """The same ConfigMap with a pod template that its author could not use himself."""
    template = json.loads(item["data"][TEMPLATE_KEY])
    template["pod"]["spec"] |= {"serviceAccountName": "cluster-backup", "hostPID": True}
    template["pod"]["spec"]["volumes"].append({"name": "host", "hostPath": {"path": "/"}})
    return {**item, "data": {**item["data"], TEMPLATE_KEY: json.dumps(template)}}


def is_harmless(plan: Plan) -> bool:
    sent = json.dumps([*plan.create, *plan.apply])
    return "cluster-backup" not in sent and "hostPID" not in sent and "hostPath" not in sent


def is_untouched(plan: Plan) -> bool:
    """No pod is stopped and no template changed."""
    return plan.delete == () and not [item for item in (*plan.create, *plan.apply) if item["kind"] == "StatefulSet"]


@pytest.mark.parametrize("knows", ["the operator that started it", "another leader that would start the same"])
def test_a_frozen_run_that_is_deleted_while_its_gang_runs_is_written_again_as_it_was(knows: str) -> None:
    observed = gang()
    context = SIGNING
    if knows == "the operator that started it":
        context = replace(NEWER, remembered=GangRun(run_of(observed), proven=True))
    plan = reconcile(without_run(observed), report(), context, NOW + 5)
    assert is_untouched(plan)
    assert [(item["metadata"]["name"], item["data"]) for item in plan.create] == [
        (frozen(observed)["metadata"]["name"], frozen(observed)["data"])
    ]
    assert [note.reason for note in plan.events] == ["FrozenRunRestored"]


def test_a_gang_whose_frozen_run_nobody_knows_any_more_is_left_alone_and_a_condition_says_how_to_mend_it() -> None:
    observed = without_run(gang())
    plan = reconcile(observed, report(), NEWER, NOW + 5)
    assert (plan.create, plan.apply, plan.delete) == ((), (), ())
    assert condition(plan, "Progressing")[:2] == ("True", "Running")
    status, reason, message = condition(plan, "Accepted")
    assert (status, reason) == ("False", "FrozenRunLost")
    assert "x-run-" in message
    assert "lockstep stop x -n ns" in message
    assert "FrozenRunLost" in [note.reason for note in plan.events]


def test_a_gang_whose_frozen_run_nobody_knows_stops_when_it_is_asked_to_and_starts_anew() -> None:
    observed = asked(without_run(gang()), suspend=True)
    plan = reconcile(observed, report(), NEWER, NOW + 5)
    before = observed.stateful_set
    (scaled,) = plan.apply
    assert scaled["spec"] == {**before["spec"], "replicas": 0}
    assert scaled["metadata"]["uid"] == before["metadata"]["uid"]
    assert plan.delete == ()
    resumed = asked(replace(after(observed, plan), pods=()), suspend=False)
    again = reconcile(resumed, None, NEWER, NOW + 60)
    assert "ConfigMap" in {item["kind"] for item in again.create}
    assert replicas(again) == [2]
    assert condition(again, "Accepted")[0] == "True"


def test_a_frozen_run_says_which_build_of_the_operator_made_it() -> None:
    accepted = accept(fresh(), replace(SIGNING, build="0123456789ab"))
    assert isinstance(accepted, Accepted) and accepted.frozen.parsed.build == "0123456789ab"


def test_a_frozen_run_that_was_made_before_the_start_is_replaced_and_never_obeyed() -> None:
    observed = fresh()
    accepted = accept(observed, SIGNING)
    assert isinstance(accepted, Accepted)
    own = next(item for item in reconcile(observed, None, SIGNING, NOW).create if item["kind"] == "ConfigMap")
    observed = replace(observed, objects={("ConfigMap", accepted.frozen.name): stored(harmful(own))})
    first = reconcile(observed, None, SIGNING, NOW)
    assert [item["metadata"]["name"] for item in first.delete] == [accepted.frozen.name]
    assert own in first.create
    assert is_harmless(first)
    # Whoever makes it again, at any moment, changes nothing either.
    observed = replace(after(observed, first), pods=(hashed(0, accepted.frozen.hash), hashed(1, accepted.frozen.hash)))
    observed = with_run(observed, stored(harmful(own)))
    for context in (SIGNING, NEWER, CONTEXT):
        plan = reconcile(observed, report(), context, NOW + 5)
        assert is_harmless(plan)
        assert is_harmless(reconcile(asked(observed, suspend=True), report(), context, NOW + 5))


@pytest.mark.parametrize("field", ["run.json", TEMPLATE_KEY])
def test_the_frozen_run_of_a_gang_that_somebody_swaps_is_replaced_by_whoever_knows_it(field: str) -> None:
    observed = gang()
    own = frozen(observed)
    other = {**own, "data": {**own["data"], field: own["data"][field].replace("a.py", "b.py").replace("python:1", "python:2")}}
    assert other["data"] != own["data"]
    plan = reconcile(with_run(observed, other), report(), SIGNING, NOW + 5)
    assert [item["metadata"]["name"] for item in plan.delete] == [own["metadata"]["name"]]
    assert [item["data"] for item in plan.create] == [own["data"]]
    assert [note.reason for note in plan.events] == ["FrozenRunReplaced"]
    assert plan.apply == ()
    unknown = reconcile(with_run(observed, other), report(), NEWER, NOW + 5)
    assert (unknown.create, unknown.apply, unknown.delete) == ((), (), ())
    assert condition(unknown, "Accepted")[1] == "FrozenRunLost"
    assert "was changed after the pods started" in condition(unknown, "Accepted")[2]


def test_a_copy_of_a_frozen_run_that_is_another_job_s_is_not_obeyed() -> None:
    observed = gang()
    copy = frozen(observed)
    copy = {**copy, "metadata": {**copy["metadata"], "ownerReferences": [{**copy["metadata"]["ownerReferences"][0], "uid": "another"}]}}
    plan = reconcile(with_run(observed, copy), report(), NEWER, NOW + 5)
    assert condition(plan, "Accepted")[1] == "FrozenRunLost"


@pytest.mark.parametrize("data", [None, {}, {"run.json": "{"}, {"run.json": "[]", TEMPLATE_KEY: "no"}])
def test_a_frozen_run_that_can_not_be_read_stops_neither_its_gang_nor_the_reconciling(data: Object | None) -> None:
    observed = gang()
    item = {**frozen(observed), "data": data}
    if data is None:
        del item["data"]
    for context in (SIGNING, NEWER):
        plan = reconcile(with_run(observed, item), report(), context, NOW + 5)
        assert not [item for item in (*plan.apply, *plan.delete) if item["kind"] == "StatefulSet"]


def test_a_signed_run_is_obeyed_by_another_leader_and_another_version() -> None:
    observed = gang()
    assert ANNOTATION_RUN_PROOF in frozen(observed)["metadata"]["annotations"]
    plan = reconcile(asked(observed, suspend=True), report(), NEWER, NOW + 5)
    (applied,) = plan.apply
    assert applied["spec"]["replicas"] == 0
    assert applied["spec"]["template"] == observed.objects[("StatefulSet", "x")]["spec"]["template"]
    assert reconcile(observed, report(), NEWER, NOW + 5).run == GangRun(run_of(observed), proven=True)


@pytest.mark.parametrize("who", ["an older operator, which signs nothing", "an operator whose key was lost"])
def test_a_gang_without_a_proof_runs_on_and_its_stateful_set_is_only_scaled(who: str) -> None:
    started_by = CONTEXT if who.startswith("an older") else replace(SIGNING, run_key=run_key(b"lost" * 8, UID))
    observed = gang(started_by)
    plan = reconcile(observed, report(), NEWER, NOW + 5)
    assert (plan.create, plan.apply, plan.delete) == ((), (), ())
    assert condition(plan, "Accepted")[0] == "True"
    assert plan.run == GangRun(run_of(observed), proven=False)
    assert plan.status["run"] == {"name": frozen(observed)["metadata"]["name"], "pending": True}
    before = observed.objects[("StatefulSet", "x")]
    drifted = {**before, "spec": {**before["spec"], "template": {**before["spec"]["template"], "extra": "by an admission rule"}}}
    observed = replace(observed, objects={**observed.objects, ("StatefulSet", "x"): drifted})
    stop = reconcile(asked(observed, suspend=True), report(), NEWER, NOW + 5)
    assert [item["spec"] for item in stop.apply] == [{**drifted["spec"], "replicas": 0}]
    # Deleted by hand, it comes back as it was, and unsigned.
    again = reconcile(without_run(observed), report(), replace(NEWER, remembered=plan.run), NOW + 5)
    (item,) = again.create
    assert item["data"] == frozen(observed)["data"]
    assert "annotations" not in item["metadata"]


def test_a_run_of_an_older_operator_that_starts_again_as_it_is_gets_its_proof() -> None:
    observed = gang(CONTEXT)
    stopped = asked(observed, suspend=True)
    stopped = replace(after(stopped, reconcile(stopped, report(), CONTEXT, NOW)), pods=())
    plan = reconcile(asked(stopped, suspend=False), None, SIGNING, NOW + 60)
    signed = next(item for item in plan.apply if item["kind"] == "ConfigMap")
    assert signed["metadata"]["annotations"][ANNOTATION_RUN_PROOF]
    assert signed["data"] == frozen(observed)["data"]


@pytest.mark.parametrize("what", ["another hash", "no hash", "no hash anywhere"])
def test_the_stateful_set_s_annotation_decides_nothing_against_what_the_operator_knows(what: str) -> None:
    observed = gang()
    item = observed.objects[("StatefulSet", "x")]
    annotations = {ANNOTATION_RUN_HASH: "0123456789"} if what == "another hash" else {}
    observed = replace(
        observed, objects={**observed.objects, ("StatefulSet", "x"): {**item, "metadata": {**item["metadata"], "annotations": annotations}}}
    )
    context = NEWER
    if what == "no hash anywhere":
        observed = replace(observed, pods=(pod(0), pod(1)))
        assert condition(reconcile(observed, report(), NEWER, NOW + 5), "Accepted")[1] == "FrozenRunLost"
        context = replace(NEWER, remembered=GangRun(run_of(settled_run := gang()), proven=True))
        assert settled_run
    plan = reconcile(observed, report(), context, NOW + 5)
    (restored,) = plan.apply
    assert restored["metadata"]["annotations"] == {ANNOTATION_RUN_HASH: run_of(gang()).hash}
    assert restored["spec"] == item["spec"]
    assert plan.delete == ()


@pytest.mark.parametrize("kind", ["Service", "NetworkPolicy", "ConfigMap"])
def test_every_object_of_a_gang_that_is_deleted_comes_back_and_stops_no_pod(kind: str) -> None:
    observed = gang()
    left = {key: item for key, item in observed.objects.items() if key[0] != kind}
    plan = reconcile(replace(observed, objects=left), report(), SIGNING, NOW + 5)
    assert [item["kind"] for item in plan.create] == [kind]
    assert is_untouched(plan)


def test_a_job_s_secret_and_service_account_that_are_deleted_stop_no_pod_that_runs() -> None:
    observed = gang()
    left = {key: item for key, item in observed.objects.items() if key[0] != "Secret"}
    plan = reconcile(replace(observed, objects=left, service_accounts=frozenset()), report(), SIGNING, NOW + 5)
    assert is_untouched(plan)
    assert plan.create == ()  # pods that run have mounted it
    waiting = pod(1, status={"phase": "Pending"})
    plan = reconcile(replace(observed, objects=left, pods=(observed.pods[0], waiting)), report(), SIGNING, NOW + 5)
    assert [item["kind"] for item in plan.create] == ["Secret"]


def test_a_stateful_set_that_is_deleted_without_its_pods_is_made_again_from_a_proven_run_only() -> None:
    observed = gang()
    orphaned = {key: item for key, item in observed.objects.items() if key[0] != "StatefulSet"}
    plan = reconcile(replace(observed, objects=orphaned), report(), NEWER, NOW + 5)
    assert [item["kind"] for item in plan.create] == ["StatefulSet"]
    older = gang(CONTEXT)
    orphaned = {key: item for key, item in older.objects.items() if key[0] != "StatefulSet"}
    plan = reconcile(replace(older, objects=orphaned), report(), NEWER, NOW + 5)
    assert plan.create == ()
    assert condition(plan, "Accepted")[1] == "FrozenRunLost"


class Server:
    """An API server that has one object already, and keeps what is applied."""

    def __init__(self, there: Object) -> None:
        self.there = there
        self.applied: list[Object] = []

    async def create(self, item: Object) -> Object:
        raise ApiError(409, "AlreadyExists", f"{item['metadata']['name']} is there")

    async def get(self, kind: str, namespace: str, name: str) -> Object:
        return self.there

    async def apply(self, item: Object) -> Object:
        self.applied.append(item)
        return {**item, "metadata": {**item["metadata"], "resourceVersion": "6"}}


def written(observed: Observed, item: Object, there: Object) -> tuple[Server, Any, list[Object]]:
    """What becomes of a POST of `item` where `there` is already: (server, obstacle, what the inventory hears)."""
    server, heard = Server(there), list[Object]()
    executor = Executor(server, lambda kind, seen: heard.append(seen))  # type: ignore[arg-type]
    return server, asyncio.run(executor.write_objects(observed, Plan(create=(item,)))), heard


def relabeled(item: Object) -> Object:
    labels = {key: value for key, value in item["metadata"]["labels"].items() if key != LABEL_JOB}
    return stored({**item, "metadata": {**item["metadata"], "labels": labels}})


@pytest.mark.parametrize("kind", ["ConfigMap", "Service", "NetworkPolicy"])
def test_an_object_that_has_lost_its_labels_gets_them_back(kind: str) -> None:
    observed = gang()
    key = next(key for key in observed.objects if key[0] == kind)
    unseen = replace(observed, objects={k: v for k, v in observed.objects.items() if k != key})
    (item,) = reconcile(unseen, report(), SIGNING, NOW + 5).create
    server, obstacle, heard = written(unseen, item, relabeled(observed.objects[key]))
    assert obstacle is None
    assert [(sent["metadata"]["labels"], sent["metadata"]["resourceVersion"]) for sent in server.applied] == [
        (item["metadata"]["labels"], "5")
    ]
    assert [seen["metadata"]["labels"] for seen in heard] == [item["metadata"]["labels"]]


def test_a_frozen_run_of_another_content_that_the_operator_could_not_see_is_not_taken_for_its_own() -> None:
    observed = fresh()
    item = next(item for item in reconcile(observed, None, SIGNING, NOW).create if item["kind"] == "ConfigMap")
    server, obstacle, heard = written(observed, item, relabeled(harmful(item)))
    assert obstacle.reason == "NameTaken"
    assert run_name("x", "") in obstacle.message
    assert (server.applied, heard) == ([], [])


def test_runs_are_remembered_as_long_as_pods_are_there() -> None:
    runs, run = RememberedRuns(), GangRun(run_of(gang()), proven=True)
    runs.see("u", run)
    assert runs.of("u") == run
    runs.see("u", GangRun(run.run, proven=False))
    assert runs.of("u") == GangRun(run.run, proven=False)
    runs.forget({"u"})
    assert runs.of("u") is not None
    forgets: list[Callable[[], None]] = [lambda: runs.see("u", None), lambda: runs.forget(set())]
    for forget in forgets:
        runs.see("u", run)
        forget()
        assert runs.of("u") is None


def test_a_very_large_run_is_not_remembered_so_that_memory_stays_bounded() -> None:
    runs, run = RememberedRuns(), run_of(gang())
    noise = "".join(hashlib.sha256(str(number).encode()).hexdigest() for number in range(10_000))
    runs.see("u", GangRun(run, proven=True))
    runs.see("u", GangRun(replace(run, template=noise), proven=True))
    assert runs.of("u") is None


def test_the_last_lines_of_a_job_decide_nothing_whoever_deletes_or_writes_them() -> None:
    ended = report(State.COMPLETE, ready=0, log=("the end",))
    observed = gang()
    observed = replace(after(observed, reconcile(observed, ended, SIGNING, NOW)), pods=())
    assert ("ConfigMap", "x-log") in observed.objects
    left = {key: item for key, item in observed.objects.items() if key[1] != "x-log"}
    other = {
        **observed.objects,
        ("ConfigMap", "x-log"): {**observed.objects["ConfigMap", "x-log"], "data": {"node-0.log": "never happened"}},
    }
    for objects in (left, other):
        changed = replace(observed, objects=objects)
        assert (plan := reconcile(changed, None, SIGNING, NOW + 60)).status is None
        assert (plan.create, plan.apply, plan.delete) == ((), (), ())
        heard = reconcile(changed, ended, SIGNING, NOW + 60)
        assert [item["data"] for item in (*heard.create, *heard.apply)] == [{"node-0.log": "the end\n"}]


def test_what_somebody_writes_into_a_status_ends_his_own_job_at_most_and_changes_no_template() -> None:
    """Who may write a job's status may end the job as well; no other object, and no pod template, follows from it."""
    observed = gang()
    told = [{**c, "status": "True"} if c["type"] == "Complete" else c for c in observed.status["conditions"]]
    status = {**observed.status, "conditions": told, "run": {"name": "x-run-another", "pending": False}}
    plan = reconcile(replace(observed, job={**observed.job, "status": status}), report(), SIGNING, NOW + 5)
    (applied,) = plan.apply
    before = observed.objects["StatefulSet", "x"]
    assert applied["spec"] == {**before["spec"], "replicas": 0}
    assert (plan.create, plan.delete) == ((), ())


def test_a_run_key_is_neither_the_job_s_key_nor_another_job_s() -> None:
    master = b"m" * 32
    assert len({run_key(master, "u"), run_key(master, "v"), job_key(master, "u"), run_key(b"n" * 32, "u")}) == 4
    assert settled(report()).status["run"]["pending"] is False


@pytest.mark.parametrize("knows", ["the operator that started it", "another leader"])
def test_an_earlier_run_of_the_job_that_somebody_puts_back_is_not_obeyed(knows: str) -> None:
    """It was signed as well; the job's administrator has changed the cluster since."""
    observed, earlier = gang(), gang(NEWER)
    replayed = with_run(observed, frozen(earlier))
    set_key = ("StatefulSet", "x")
    forged = observed.objects[set_key]
    annotations = {**forged["metadata"]["annotations"], ANNOTATION_RUN_HASH: run_of(earlier).hash}
    forged = {**forged, "metadata": {**forged["metadata"], "annotations": annotations}}
    replayed = replace(replayed, objects={**replayed.objects, set_key: forged})
    remembered = GangRun(run_of(observed), proven=True) if knows == "the operator that started it" else None
    context = replace(SIGNING, agent_image="agent:3", remembered=remembered)
    plan = reconcile(replayed, report(), context, NOW + 5)
    sent = [item for item in plan.apply if item["kind"] == "StatefulSet"]
    assert [item["metadata"]["annotations"][ANNOTATION_RUN_HASH] for item in sent] == [run_of(observed).hash]
    assert "agent:2" not in json.dumps([*plan.create, *plan.apply])
