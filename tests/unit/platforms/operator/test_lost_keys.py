"""The operator's key or its authority is gone, and was made anew: gangs that run are heard or said to be out of reach, and nobody is
believed without proof.
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from lockstep.api.names import KEY_SECRET, KEY_VOLUME, REPORT_AUDIENCE, TLS_SECRET, key_secret_name
from lockstep.api.objects import Object
from lockstep.kube.clock import ServerClock
from lockstep.kube.cluster import ApiError
from lockstep.plan.observed import Observed
from lockstep.plan.reconcile.reconcile import Plan, reconcile
from lockstep.plan.render.objects import RenderContext
from lockstep.plan.render.run import report_target
from lockstep.plan.waiting.containers import lacks_secret
from lockstep.platforms.operator import report_server
from lockstep.platforms.operator.certificate import authority_made, make_certificates, service_names
from lockstep.platforms.operator.execute import Executor
from lockstep.platforms.operator.memory.inventory import Inventory
from lockstep.platforms.operator.operator import Settings
from lockstep.platforms.operator.replica import Replica
from lockstep.platforms.operator.secrets import UnusableSecret, certificates, job_key, key_secret, master_key, run_key
from lockstep_gang.contract.report import JOB_HEADER, job_header, report_body
from unit.plan.reconcile.test_reconcile import NOW, UID, after, condition, fresh, pod, report, stored
from unit.platforms.operator.test_report_server import REPORT, inventory, owned, reviewed, served, signed

MASTER, LOST = b"m" * 32, b"l" * 32
DNS = service_names("lockstep-operator", "lockstep-system")
TODAY = datetime(2026, 1, 1, tzinfo=UTC)
NOT_HEARD_SECONDS = 100.0


def mounting(secret: str) -> Inventory:
    """Job x, whose pods mount this Secret."""
    seen = inventory()
    template = {"spec": {"volumes": [{"name": KEY_VOLUME, "secret": {"secretName": secret}}]}}
    stateful_set = owned("StatefulSet", "x", "set-uid", "job-uid", spec={"replicas": 2, "template": template})
    seen.observe("StatefulSet", stateful_set, deleted=False)
    return seen


def code(secret: str, signed_by: bytes, review: Object | None = None) -> tuple[int, bool]:
    """(reply, whether the job is then said to report with another key)."""

    async def post() -> tuple[int, bool]:
        async with served(review, mounting(secret)) as scene:
            body = report_body(REPORT)
            status, _ = await scene.post(body, signed(body, master=signed_by))
            assert (scene.server.reports.of("job-uid") is not None) == (status == 200)
            return status, scene.server.reports.is_unverified("job-uid")

    return asyncio.run(post())


OWN, OF_LOST, OF_OLDER = key_secret(MASTER, "x", "job-uid"), key_secret(LOST, "x", "job-uid"), key_secret_name("x")


@pytest.mark.parametrize("secret", [OF_LOST, OF_OLDER], ids=["a lost key", "an older version"])
def test_a_gang_whose_key_another_operator_made_is_heard_by_the_token_of_its_live_node_zero(secret: str) -> None:
    assert code(secret, LOST) == (200, False)
    assert code(secret, MASTER) == (200, False)
    for stranger in (
        reviewed(authenticated=False),
        reviewed(audiences=["https://kubernetes.default.svc"]),
        reviewed(pod="x-1", uid="pod-1"),
        reviewed(uid="an-earlier-pod"),
        reviewed(namespace="other"),
        reviewed(user={"username": "system:serviceaccount:ns:ml-dev-sa"}),
    ):
        assert code(secret, LOST, stranger)[0] in (401, 403)
    assert REPORT_AUDIENCE in reviewed()["audiences"]


def test_a_gang_whose_key_this_operator_made_has_to_sign_with_it_whatever_token_comes_along() -> None:
    assert code(OWN, MASTER) == (200, False)
    assert code(OWN, LOST) == (401, True)
    assert code(OWN, LOST, reviewed(authenticated=False)) == (401, False)


async def test_reports_without_a_fitting_signature_cost_the_api_server_one_question_in_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_server, "ASKED_SECONDS", 3600.0)
    body, stranger = report_body(REPORT), {JOB_HEADER: job_header(replace(REPORT.job, uid="of-no-job"))}
    async with served(reviewed(authenticated=False), mounting(OF_LOST)) as scene:
        for number in range(50):
            assert (await scene.post(body, signed(body, master=LOST, token=f"junk-{number}")))[0] == 401
        assert (await scene.post(body, signed(body, master=LOST) | stranger))[0] == 401
        assert scene.asked == ["junk-0"]


async def test_a_token_that_was_good_is_asked_for_again_at_every_report_of_such_a_gang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_server, "ASKED_SECONDS", 3600.0)
    async with served(seen=mounting(OF_LOST)) as scene:
        for number in range(3):
            body = report_body(replace(REPORT, sequence=10 + number))
            assert (await scene.post(body, signed(body, master=LOST)))[0] == 200
        assert set(scene.asked) == {"t"}


# What status says of it.


def context(master: bytes, ca: str = "PEM", **more: Any) -> RenderContext:
    return RenderContext(
        "agent:1", job_key(master, UID), UID, report_target("https://here/v1/report", ca), NOW, key_secret=key_secret(master, "x", UID),
        run_key=run_key(master, UID), **more,
    )  # fmt: skip


def gang(started_by: RenderContext) -> Observed:
    observed = fresh()
    observed = after(observed, reconcile(observed, None, started_by, NOW))
    item = observed.objects[("StatefulSet", "x")]
    marks = {"annotations": item["metadata"]["annotations"]}
    pods = tuple({**pod(node), "metadata": {**pod(node)["metadata"], **marks}} for node in range(2))
    observed = replace(observed, pods=pods)
    return after(observed, reconcile(observed, report(), started_by, NOW))


def untouched(plan: Plan) -> bool:
    return (plan.create, plan.apply, plan.delete) == ((), (), ())


def test_a_gang_that_trusts_an_earlier_authority_is_said_to_be_out_of_reach_with_when_and_what_to_do() -> None:
    observed = gang(context(MASTER, "OLD PEM"))
    plan = reconcile(observed, None, context(LOST, authority_made=NOW - 3600), NOW + NOT_HEARD_SECONDS)
    assert untouched(plan)
    status, reason, message = condition(plan, "Progressing")
    assert (status, reason) == ("Unknown", "NoReport")
    for word in ("certificate authority was replaced at 2027-01-15T07:00:00Z", "lockstep stop x -n ns", "lockstep resume x -n ns"):
        assert word in message
        assert word in condition(plan, "Accepted")[2]


def test_a_gang_of_a_lost_key_runs_on_and_condition_accepted_says_how_its_reports_are_taken() -> None:
    observed = gang(context(LOST))
    plan = reconcile(observed, replace(report(), received=NOW + 50), context(MASTER), NOW + 60)
    assert untouched(plan)
    assert condition(plan, "Progressing")[:2] == ("True", "Running")
    assert condition(plan, "Accepted")[0] == "True"
    assert "key was replaced" in condition(plan, "Accepted")[2]
    assert "lockstep stop x -n ns" in condition(plan, "Accepted")[2]


def test_a_secret_that_is_lost_with_the_key_is_not_made_again_with_another_key() -> None:
    """Whoever has another key than the other agents can't join them."""
    observed = gang(context(LOST))
    waiting = {**observed.pods[1], "status": {"phase": "Pending"}}
    left = {key: item for key, item in observed.objects.items() if key[0] != "Secret"}
    observed = replace(observed, pods=(observed.pods[0], waiting), objects=left)
    assert [item["kind"] for item in reconcile(observed, report(), context(LOST), NOW + 5).create] == ["Secret"]
    plan = reconcile(observed, report(), context(MASTER), NOW + 5)
    assert plan.create == ()
    assert "key was replaced" in condition(plan, "Accepted")[2]


def test_stop_and_resume_give_such_a_gang_a_secret_of_this_operator() -> None:
    observed = gang(context(LOST))
    observed = replace(observed, job={**observed.job, "spec": {**observed.job["spec"], "suspend": True}})
    stop = reconcile(observed, report(), context(MASTER), NOW + 60)
    (scaled,) = stop.apply
    assert scaled["spec"]["replicas"] == 0
    observed = replace(after(observed, stop), pods=())
    observed = replace(observed, job={**observed.job, "spec": {**observed.job["spec"], "suspend": False}})
    start = reconcile(observed, None, context(MASTER), NOW + 90)
    (secret,) = [item for item in start.create if item["kind"] == "Secret"]
    assert secret["metadata"]["name"] == key_secret(MASTER, "x", UID)
    (stateful_set,) = [item for item in start.apply if item["kind"] == "StatefulSet"]
    volumes = stateful_set["spec"]["template"]["spec"]["volumes"]
    assert [v["secret"]["secretName"] for v in volumes if v["name"] == KEY_VOLUME] == [key_secret(MASTER, "x", UID)]
    observed = after(observed, start)
    observed = replace(observed, pods=gang(context(MASTER)).pods)
    assert "was replaced" not in str(reconcile(observed, report(), context(MASTER), NOW + 95).status)


def test_a_gang_whose_secret_somebody_replaced_is_said_to_report_with_another_key() -> None:
    observed = gang(context(MASTER))
    plan = reconcile(observed, None, context(MASTER, is_unverified=True), NOW + NOT_HEARD_SECONDS)
    message = condition(plan, "Progressing")[2]
    assert condition(plan, "Progressing")[1] == "NoReport"
    assert f"kubectl delete secret {key_secret(MASTER, 'x', UID)} -n ns" in message


def test_a_gang_of_an_older_version_is_not_said_to_have_lost_anything() -> None:
    older = replace(context(MASTER), key_secret="", run_key="")
    plan = reconcile(gang(older), report(), context(MASTER), NOW + 5)
    assert untouched(plan)
    assert condition(plan, "Accepted")[2] == "the job fits its cluster"


# Secrets of jobs.


def test_the_name_of_a_job_s_secret_is_its_own_and_nobody_else_s_to_tell() -> None:
    names = {key_secret(master, job, uid) for master in (MASTER, LOST) for job in ("x", "y") for uid in ("u", "v")}
    assert len(names) == 8
    assert re.fullmatch(f"{key_secret_name('x', UID)}-[0-9a-f]{{16}}", key_secret(MASTER, "x", UID))
    assert len(key_secret(MASTER, "x" * 52, UID)) <= 253


class NoReading:
    """An API server that has every Secret already, and lets nobody read one."""

    async def create(self, item: Object) -> Object:
        raise ApiError(409, "AlreadyExists", item["metadata"]["name"])

    async def get(self, kind: str, namespace: str, name: str) -> Object:
        raise AssertionError(f"{kind} {name} was read")


@pytest.mark.parametrize("name", ["marked", "of an older version"])
def test_a_job_s_secret_that_is_there_is_its_own_without_being_read(name: str) -> None:
    started_by = context(MASTER) if name == "marked" else replace(context(MASTER), key_secret="")
    observed = fresh()
    (secret,) = [item for item in reconcile(observed, None, started_by, NOW).create if item["kind"] == "Secret"]
    known = Inventory()
    known.observe("TrainingJob", stored(observed.job), deleted=False)
    executor = Executor(NoReading(), lambda kind, item: known.observe_write(kind, item) and None)  # type: ignore[arg-type]
    assert asyncio.run(executor.write_objects(observed, Plan(create=(secret,)))) is None
    again = known.observed(("ns", "x"))
    assert [key for key in again.objects if key[0] == "Secret"] == [("Secret", secret["metadata"]["name"])]
    known.forget_secret(("ns", "x"))
    again = known.observed(("ns", "x"))
    assert not again.objects


@pytest.mark.parametrize("secret", [key_secret(MASTER, "x", UID), OF_OLDER])
def test_the_kubelet_s_word_that_a_job_s_secret_is_gone_is_heard_under_either_name(secret: str) -> None:
    waiting = {**pod(0), "status": {"phase": "Pending"}}
    event = {
        "metadata": {"name": "e"}, "involvedObject": {"uid": "pod-0"},
        "message": f'MountVolume.SetUp failed for volume "{KEY_VOLUME}" : secret "{secret}" not found',
    }  # fmt: skip
    assert lacks_secret(replace(fresh(), pods=(waiting,), warnings=(event,)))
    other = {**event, "message": 'secret "x-agents-of-mine" not found'}
    assert not lacks_secret(replace(fresh(), pods=(waiting,), warnings=(other,)))


# The operator's own Secrets.


class Store:
    """Secrets of the operator's namespace."""

    def __init__(self) -> None:
        self.secrets: dict[str, Object] = {}
        self.requested: Any = None
        self.clock = ServerClock()

    async def get(self, kind: str, namespace: str, name: str) -> Object | None:
        return self.secrets.get(name)

    async def create(self, item: Object) -> Object:
        name = item["metadata"]["name"]
        self.secrets[name] = json.loads(json.dumps(stored(item)))
        return self.secrets[name]

    def fenced(self, check: Any) -> Store:
        return self


def replica(store: Store) -> Replica:
    master = asyncio.run(master_key(store, "lockstep-system"))  # type: ignore[arg-type]
    tls = asyncio.run(certificates(store, "lockstep-system", DNS, TODAY))  # type: ignore[arg-type]
    return Replica(store, Settings("agent:1", metrics_port=0), master, tls)  # type: ignore[arg-type]


@pytest.mark.parametrize("lost", [(KEY_SECRET,), (TLS_SECRET,), (KEY_SECRET, TLS_SECRET)])
def test_a_running_operator_writes_its_own_secrets_again_as_they_were(lost: tuple[str, ...]) -> None:
    store = Store()
    one = replica(store)
    before = dict(store.secrets)
    for name in lost:
        del store.secrets[name]
    asyncio.run(one.keep_secrets(TODAY))
    assert {name: item["data"] for name, item in store.secrets.items()} == {name: item["data"] for name, item in before.items()}


@pytest.mark.parametrize("data", [None, {}, {"ca.crt": "bm90aGluZw=="}, dict.fromkeys(("ca.crt", "ca.key", "tls.crt", "tls.key"), "AAAA")])
def test_a_secret_of_the_operator_that_can_not_be_read_is_named_and_ends_no_running_operator(data: Object | None) -> None:
    store = Store()
    one = replica(store)
    before = one._operator.tls
    store.secrets[TLS_SECRET] = {**store.secrets[TLS_SECRET], "data": data}
    with pytest.raises(UnusableSecret, match=f"Secret {TLS_SECRET} in namespace lockstep-system can't be read"):
        asyncio.run(one.keep_secrets(TODAY))
    assert one._operator.tls == before
    store.secrets[KEY_SECRET] = {**store.secrets[KEY_SECRET], "data": {"key": base64.b64encode(b"short").decode()}}
    with pytest.raises(UnusableSecret, match=f"Secret {KEY_SECRET} in namespace lockstep-system has no field `key` of 32 bytes"):
        asyncio.run(master_key(store, "lockstep-system"))  # type: ignore[arg-type]


def test_the_authority_tells_when_it_was_made() -> None:
    assert authority_made(make_certificates(DNS, TODAY)) == TODAY
