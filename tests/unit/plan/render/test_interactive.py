"""What an Interactive job's objects are, beside those of every job."""

from __future__ import annotations

import json
from typing import Any

from golden.plan_cases import CONTEXT, cluster, job, of_kind, trainer_of, variables_of
from lockstep.plan.render.objects import render
from lockstep.plan.render.resolve import resolve
from lockstep.plan.render.resolved import PlatformDefaults
from lockstep_gang.contract.interactive import Interactive
from lockstep_gang.contract.run import parse_run


def objects(**spec: Any) -> list[dict[str, Any]]:
    given = job(name="ml-dev-env", type="Interactive", **spec)
    return render(resolve(given, cluster("local"), PlatformDefaults(namespace="team")), CONTEXT)


def run_of(made: list[dict[str, Any]]) -> Any:
    return parse_run(of_kind(made, "ConfigMap")[0]["data"]["run.json"])


def test_pods_and_their_own_claims_can_be_selected_by_app() -> None:
    (stateful_set,) = of_kind(objects(storage={"mode": "PerPod"}), "StatefulSet")
    assert stateful_set["spec"]["template"]["metadata"]["labels"]["app"] == "ml-dev-env-multi"
    assert {claim["metadata"]["labels"]["app"] for claim in stateful_set["spec"]["volumeClaimTemplates"]} == {"ml-dev-env-multi"}


def test_a_shell_sees_what_a_rank_is_told_of_the_environment() -> None:
    made = objects(nodes=3, ranksPerNode=2)
    variables = variables_of(made)
    assert (variables["WORLD_SIZE"], variables["NNODES"], variables["LOCKSTEP_SOCKET"]) == ("6", "3", "/lockstep/agent.sock")
    assert {"NODE_RANK", "MASTER_ADDR", "GPUS_PER_NODE"} <= {variable["name"] for variable in trainer_of(made)["env"]}


def test_nodes_have_no_command_of_their_own_and_look_for_no_script() -> None:
    run = run_of(objects())
    assert run.command == ()
    assert run.preflight.paths == ()


def test_a_warning_comes_half_an_hour_before_the_release_or_after_half_the_time() -> None:
    assert run_of(objects()).interactive == Interactive(28800, 27000)
    assert run_of(objects(idleSeconds=600)).interactive == Interactive(600, 300)
    assert run_of(objects(idleSeconds=0)).interactive.idle_seconds == 0


def test_a_batch_job_has_none_of_it() -> None:
    made = render(resolve(job(), cluster("local"), PlatformDefaults(namespace="team")), CONTEXT)
    assert run_of(made).interactive is None
    assert "ml-dev-env-multi" not in json.dumps(made)
    assert "WORLD_SIZE" not in variables_of(made)
