"""Where the quickstart runs, and which job it sends."""

from __future__ import annotations

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
from lockstep.api.errors import ConfigError
from lockstep.api.job import TrainingJob
from lockstep.cli.clusters import demo, quickstart
from lockstep.cli.shared.jobargs import TargetOptions
from lockstep.platforms.local import environment
from lockstep.platforms.places.orders import Order
from lockstep.platforms.places.values import Volumes, Words
from support.api_stub import ApiStub, served
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
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, system: str, user: int, reason: str | None
) -> None:
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setenv("LOCKSTEP_STATE", str(tmp_path))
    monkeypatch.setattr(quickstart, "_cluster", lambda where, embedded: 22)
    monkeypatch.setattr(quickstart, "train_and_show", lambda stage: 22 if stage == 22 else 11)
    with pytest.raises(quickstart.typer.Exit) as ended:
        quickstart.quickstart(TargetOptions())
    assert ended.value.exit_code == (22 if reason is None else 11)
    assert (reason or "took") in capsys.readouterr().out


def test_a_cluster_of_your_own_is_used_without_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", "/somewhere")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    seen: list[tuple[str | None, bool]] = []
    monkeypatch.setattr(quickstart, "_cluster", lambda where, embedded: seen.append((where.context, embedded)))
    monkeypatch.setattr(quickstart, "train_and_show", lambda stage: 0)
    with pytest.raises(quickstart.typer.Exit):
        quickstart.quickstart(TargetOptions(context="mine"))
    assert seen == [("mine", False)]


Object = dict[str, Any]
SAMPLE: Object = yaml.safe_load((CHECKOUT / "manifests/samples/trainingjob.yaml").read_text(encoding="utf-8"))


DEMO = TrainingJob.model_validate({"metadata": SAMPLE["metadata"], "spec": SAMPLE["spec"]})


def there(status: Object | None = None, **spec: Any) -> Object:
    """The demo as an API server has it."""
    return {"metadata": {"name": "demo", "namespace": "lockstep", "uid": "1"}, "spec": SAMPLE["spec"] | spec, "status": status or {}}


class RecordedJob:
    """The demo in a place that keeps what it is asked."""

    def __init__(self, job: Object) -> None:
        self.job, self.name, self.at, self.is_deleted = job, "demo", "demo --there", False

    @property
    def status(self) -> Object:
        return self.job["status"]

    def delete(self) -> str:
        self.is_deleted = True
        return ""


class RecordedPlace:
    """A place that has `jobs` and runs none."""

    words = Words("--there", "there")

    def __init__(self, *jobs: RecordedJob) -> None:
        self._jobs, self.orders = jobs, list[Order]()

    def jobs(self) -> list[RecordedJob]:
        return [job for job in self._jobs if not job.is_deleted]

    def volumes_to_fill(self, *_: object) -> Volumes:
        return {}

    def run(self, order: Order) -> int:
        assert not self._jobs or not self._jobs[0].status or self._jobs[0].is_deleted, "an ended job has the name"
        self.orders.append(order)
        return 1


def trained(monkeypatch: pytest.MonkeyPatch, existing: Object | None, *, has_run: bool) -> tuple[str, bool]:
    """Where the order resumes from, and whether it says that it is typed afresh, in a place with this job and a run's folder or none."""
    place = RecordedPlace(*([] if existing is None else [RecordedJob(existing)]))

    async def fill(*_: object) -> bool:
        return has_run

    monkeypatch.setattr(quickstart, "_fill", fill)
    monkeypatch.setattr(quickstart, "demo_folder", lambda: Path("made"))
    monkeypatch.setattr(quickstart, "backend_of", lambda *_: place)
    assert quickstart.train_and_show(quickstart.Stage(TargetOptions(".lockstep/workspace"))) == 1
    (order,) = place.orders
    assert order.job.spec.training is not None
    return order.job.spec.training.checkpoint.resume_from, order.typed.is_fresh


ENDED = {"conditions": [{"type": "Complete", "status": "True"}]}


def test_the_first_quickstart_runs_the_file_that_it_names(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert trained(monkeypatch, None, has_run=False) == ("Auto", False)
    assert "==> Train: lockstep run -f manifests/samples/trainingjob.yaml --there\n" in capsys.readouterr().out


@pytest.mark.parametrize("existing", [there(ENDED), None])
def test_a_second_one_deletes_what_has_ended_and_trains_from_the_beginning(
    existing: Object | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert trained(monkeypatch, existing, has_run=True) == ("None", True)
    assert "trainingjob.yaml --there --fresh\n" in capsys.readouterr().out


@pytest.mark.parametrize("begun", ["Auto", "None"])
def test_one_that_still_runs_is_followed_as_it_was_begun(begun: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job = there()
    job["spec"] = json.loads(json.dumps(job["spec"]))
    job["spec"]["training"]["checkpoint"]["resumeFrom"] = begun
    assert trained(monkeypatch, job, has_run=True)[0] == begun


@pytest.mark.parametrize("changed", [{"nodes": 1}, {"training": None, "script": {"path": "mine.py"}}])
def test_a_demo_of_somebody_s_own_is_never_replaced(changed: Object) -> None:
    with pytest.raises(
        ConfigError, match=r"has a job demo that differs from .*, and nothing was changed: .*lockstep delete demo -n lockstep"
    ):
        quickstart.refuse_other_demo(DEMO, there(**changed))


def test_what_the_api_server_adds_to_a_demo_does_not_make_it_another() -> None:
    defaults = {"restart": {"maxRestarts": 3}, "suspend": False}
    quickstart.refuse_other_demo(DEMO, there(**defaults))
    quickstart.refuse_other_demo(
        DEMO, json.loads(json.dumps(there()).replace('"everySteps": 20}', '"everySteps": 20, "resumeFrom": "None"}'))
    )


@pytest.mark.parametrize(("words", "asks"), [([], True), (["--yes"], False), (["--context", "c"], False)])
def test_a_cluster_that_kubeconfig_names_gets_nothing_before_a_question(
    words: list[str], asks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[bool] = []
    monkeypatch.setattr(quickstart, "_cluster", lambda where, embedded: ran.append(embedded))
    monkeypatch.setattr(quickstart, "train_and_show", lambda stage: 0)
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
    demo.print_result({}, "  lockstep get\n", "here")
    shown = capsys.readouterr().out.partition("\nNext:\n")[2]
    assert shown == of_checkout * f"  export PATH={tmp_path}/.venv/bin:$PATH\n" + "  lockstep get\n"
