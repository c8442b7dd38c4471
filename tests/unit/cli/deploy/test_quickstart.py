"""Where the quickstart runs, and which job it sends."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from golden.plan_cases import CHECKOUT
from lockstep import programs
from lockstep.api.errors import ConfigError
from lockstep.cli.clusters import demo, quickstart
from lockstep.cli.shared.jobargs import TargetOptions
from lockstep.kube import jobs
from lockstep.kube.exec import PodPlace
from lockstep.platforms.local import environment
from support.api_stub import ApiStub, served
from support.fake_cluster import FakeCluster
from support.in_process import lockstep


@pytest.mark.parametrize(
    ("system", "user", "reason"),
    [
        ("Linux", 0, None),
        ("Linux", 1000, "The embedded cluster needs root"),
        ("Darwin", 0, "Darwin has no network namespaces for an embedded cluster"),
    ],
)
def test_the_job_runs_as_processes_where_the_embedded_cluster_can_t(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], system: str, user: int, reason: str | None
) -> None:
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(quickstart, "_run_local", lambda: 11)
    monkeypatch.setattr(quickstart, "_run_on_cluster", lambda context, embedded: 22)
    with pytest.raises(quickstart.typer.Exit) as ended:
        quickstart.quickstart(TargetOptions())
    assert ended.value.exit_code == (22 if reason is None else 11)
    assert (reason or "took") in capsys.readouterr().out


def test_a_cluster_of_your_own_is_used_without_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", "/somewhere")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    seen: list[tuple[str | None, bool]] = []
    monkeypatch.setattr(quickstart, "_run_on_cluster", lambda where, embedded: seen.append((where.context, embedded)) or 0)
    with pytest.raises(quickstart.typer.Exit):
        quickstart.quickstart(TargetOptions(context="mine"))
    assert seen == [("mine", False)]


Object = dict[str, Any]
SAMPLE: Object = yaml.safe_load((CHECKOUT / "manifests/samples/trainingjob.yaml").read_text(encoding="utf-8"))


def there(status: Object | None = None, **spec: Any) -> Object:
    """The demo as an API server has it."""
    return {"metadata": {"name": "demo", "namespace": "lockstep", "uid": "1"}, "spec": SAMPLE["spec"] | spec, "status": status or {}}


def trained(monkeypatch: pytest.MonkeyPatch, existing: Object | None, has_run: bool = False) -> list[Object]:
    """What is sent where the cluster has `existing`, and the volume a run's folder or none."""
    sent: list[Object] = []

    async def output_of(place: PodPlace, command: list[str]) -> bytes:
        return f"{has_run}\n".encode()

    async def delete(cluster: Any, namespace: str, name: str) -> None:
        cluster.objects.pop(("TrainingJob", name), None)

    async def follow(cluster: Any, namespace: str, name: str) -> Object:
        return {"followed": name}

    monkeypatch.setattr(programs, "output_of", output_of)
    monkeypatch.setattr(jobs, "delete_job", delete)
    monkeypatch.setattr(quickstart, "_follow", follow)
    cluster = FakeCluster(*([] if existing is None else [existing | {"kind": "TrainingJob"}]), on_create=sent.append).as_cluster
    assert asyncio.run(quickstart._train(cluster, PodPlace(cluster, "lockstep", "demo-reader-1", "reader"), "demo")) == {"followed": "demo"}
    return sent


def test_the_first_quickstart_sends_the_file_that_it_names_as_kubectl_would(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (sent,) = trained(monkeypatch, None)
    assert "Train: kubectl apply -n lockstep -f manifests/samples/trainingjob.yaml; kubectl logs" in capsys.readouterr().out
    assert sent["spec"] == SAMPLE["spec"]
    applied = json.loads(sent["metadata"]["annotations"][jobs.LAST_APPLIED])
    assert applied == {**SAMPLE, "metadata": {"annotations": {}, "name": "demo", "namespace": "lockstep"}}


def test_a_second_one_says_what_it_changes_of_the_file(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (sent,) = trained(monkeypatch, there({"conditions": [{"type": "Complete", "status": "True"}]}), has_run=True)
    assert "trainingjob.yaml with training.checkpoint.resumeFrom=None; kubectl logs" in capsys.readouterr().out
    assert sent["spec"]["training"]["checkpoint"] == {"everySteps": 20, "resumeFrom": "None"}
    assert json.loads(sent["metadata"]["annotations"][jobs.LAST_APPLIED])["spec"] == sent["spec"]


def test_one_that_still_runs_is_followed_and_not_replaced(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert trained(monkeypatch, there()) == []
    assert "demo runs already" in capsys.readouterr().out


@pytest.mark.parametrize("changed", [{"nodes": 1}, {"suspend": True}, {"training": None, "script": {"path": "mine.py"}}])
def test_a_demo_of_somebody_s_own_is_never_replaced(changed: Object) -> None:
    with pytest.raises(
        ConfigError, match=r"has a job demo that differs from .*, and nothing was changed: .*lockstep delete demo -n lockstep"
    ):
        quickstart.refuse_other_demo(there(**changed))


def test_what_the_api_server_adds_to_a_demo_does_not_make_it_another() -> None:
    defaults = {"restart": {"maxRestarts": 3}, "suspend": False}
    quickstart.refuse_other_demo(there(**defaults))
    quickstart.refuse_other_demo(json.loads(json.dumps(there()).replace('"everySteps": 20}', '"everySteps": 20, "resumeFrom": "None"}')))


def test_without_a_cluster_the_command_that_is_shown_is_the_run_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCKSTEP_STATE", str(tmp_path))
    monkeypatch.setattr(quickstart, "demo_folder", lambda: tmp_path / "made")
    ran: list[str] = []

    def run_local(order: Any, root: Path) -> int:
        ran.append(order.job.spec.training.checkpoint.resume_from)
        return 1

    monkeypatch.setattr("lockstep.platforms.local.run.run_local", run_local)
    assert quickstart._run_local() == 1
    (tmp_path / "quickstart/workspace/runs/demo").mkdir(parents=True)
    assert quickstart._run_local() == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if "lockstep run" in line]
    assert ran == ["Auto", "None"]
    assert [line.partition("--workspace ")[2] for line in lines] == [
        f"{tmp_path}/quickstart", f"{tmp_path}/quickstart --fresh",
    ]  # fmt: skip


@pytest.mark.parametrize(("words", "asks"), [([], True), (["--yes"], False), (["--context", "c"], False)])
def test_a_cluster_that_kubeconfig_names_gets_nothing_before_a_question(
    words: list[str], asks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[bool] = []
    monkeypatch.setattr(quickstart, "_run_on_cluster", lambda context, embedded: ran.append(embedded) or 0)
    with served(ApiStub(), tmp_path) as kubeconfig:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
        done = lockstep("quickstart", *words)
    assert (done.returncode, ran) == ((2, []) if asks else (0, [False]))
    assert (
        "and nothing was done: unset KUBECONFIG to use a Kubernetes of this machine's own, or confirm with --yes" in done.stderr
    ) is asks


def test_the_embedded_cluster_s_own_kubeconfig_is_no_other_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lockstep.cli.shared.embedded import embedded_layout

    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path))
    monkeypatch.setenv("KUBECONFIG", str(embedded_layout().kubeconfig))
    assert not quickstart._is_cluster_of_kubeconfig()
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "other"))
    assert quickstart._is_cluster_of_kubeconfig()


@pytest.mark.parametrize(
    ("words", "kubeconfig", "says"),
    [
        ([], True, "nothing was done: unset KUBECONFIG"),
        (["--context", "nosuch", "--yes"], True, "nosuch"),
        (["--yes"], False, "which is not there"),
    ],
)
def test_nothing_is_fetched_for_a_cluster_that_won_t_be_used(
    words: list[str], kubeconfig: bool, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "importlib", SimpleNamespace(util=SimpleNamespace(find_spec=lambda _: None)))
    monkeypatch.setattr("lockstep.environments.full_environment", lambda _: pytest.fail("the environment is made"))
    with served(ApiStub(), tmp_path) as served_at:
        monkeypatch.setenv("KUBECONFIG", str(served_at) if kubeconfig else str(tmp_path / "nowhere"))
        done = lockstep("quickstart", *words)
    assert done.returncode in (1, 2) and says in done.stderr, done.stderr


@pytest.mark.parametrize("of_checkout", [True, False])
def test_the_path_is_told_where_the_command_runs_from_a_checkout_s_own_environment(
    of_checkout: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv" if of_checkout else tmp_path / "cache/venv"))
    demo.print_result({}, "  lockstep get\n")
    shown = capsys.readouterr().out.partition("\nNext:\n")[2]
    assert shown == of_checkout * f"  export PATH={tmp_path}/.venv/bin:$PATH\n" + "  lockstep get\n"
