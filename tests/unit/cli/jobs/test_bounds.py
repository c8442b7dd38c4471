"""Verbs about jobs wait, look and read no longer than they promise."""

from __future__ import annotations

import asyncio
import gc
import io
import json
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, nullcontext
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from typer.testing import CliRunner

from lockstep.api.errors import ConfigError
from lockstep.cli.jobs import change, get
from lockstep.cli.main import app, main
from lockstep.cli.shared.terminal import console
from lockstep.plan.pages.top import top_page
from lockstep.platforms.hosts import backend as runonhosts
from lockstep.platforms.jobs import hubconfig, looks
from lockstep.platforms.jobs.top import looks_of_job
from lockstep.platforms.kubernetes import submit
from lockstep.platforms.local.backend import LocalBackend
from lockstep.platforms.places.values import Volume
from reference.verbs import cli_page
from support.checkout import ROOT
from unit.platforms.jobs.test_logs import local  # noqa: F401 (a fixture)
from unit.silent_place import SilentPlace
from unit.virtual_time import VirtualClock, clock_of

Object = dict[str, Any]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> VirtualClock:
    return clock_of(monkeypatch, change, get, runonhosts, submit, looks, now=0.0)


def progress(reason: str, **more: str) -> Object:
    others = [{"type": kind, "status": status, "message": "so it is"} for kind, status in more.items()]
    return {"conditions": [{"type": "Progressing", "status": "True", "reason": reason, "message": "so it is"}, *others]}


def test_the_page_of_all_verbs_in_docs_has_their_defaults_and_words() -> None:
    assert (ROOT / "docs/reference/cli.md").read_text(encoding="utf-8") == cli_page()


@pytest.mark.parametrize(
    ("verb", "said"), [("wait", "job x is not Ended after 3600 s: "), ("stop", "job x has not stopped within 600 s: ")]
)
def test_a_job_that_does_not_get_there_is_waited_for_so_long(
    clock: VirtualClock, monkeypatch: pytest.MonkeyPatch, verb: str, said: str
) -> None:
    def look_again(before: Object | None = None) -> Object:
        clock.sleep(9.5)
        return {}

    job = SimpleNamespace(name="x", status={}, look_again=look_again, suspend=lambda now: True)
    monkeypatch.setattr(get, "find_job", lambda *_: job)
    monkeypatch.setattr(change, "_not_ended", lambda *_, **__: [job])
    assert str(CliRunner().invoke(app, [verb, "x"]).exception).startswith(said)
    assert clock.now == pytest.approx(float(said.split(" s:", maxsplit=1)[0].rpartition(" ")[2]), abs=10.0)


@pytest.mark.parametrize("end", ["Complete", "Failed"])
@pytest.mark.parametrize("words", [["stop", "x"], *(["wait", "x", "--for", one.value] for one in get.Awaited)], ids=" ".join)
def test_a_verb_that_waits_ends_with_the_job_whatever_it_waits_for(
    clock: VirtualClock, monkeypatch: pytest.MonkeyPatch, words: list[str], end: str
) -> None:
    def look_again(before: Object | None = None) -> Object:
        return progress("Running") if clock.now < 5 else progress(end, **{end: "True"})

    job = SimpleNamespace(name="x", status={}, look_again=look_again, suspend=lambda now: True)
    monkeypatch.setattr(get, "find_job", lambda *_: job)
    monkeypatch.setattr(change, "_not_ended", lambda *_, **__: [job])
    is_reached = words[-1] == "Running" or (end == "Complete" and words[-1] in ("x", "Complete", "Ended"))
    assert (CliRunner().invoke(app, words).exit_code, clock.now < 10) == (0 if is_reached else 1, True)


def test_a_state_is_said_after_two_seconds_and_that_no_operator_looks_after_twenty(
    clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[float, str]] = []
    monkeypatch.setattr(submit, "say", lambda line: told.append((clock.now, line)))
    watch = submit.StartWatch(cast(Any, SimpleNamespace(name="x", namespace="ns", at="x")), cast(Any, None), is_new=True)
    for look in range(120):
        watch({} if look < 60 else progress("Unschedulable"))
        clock.sleep(0.5)
    unseen = "no operator has looked at job x for 20 s: lockstep doctor -n ns"
    assert told == [(20.5, unseen), (32.0, "x: Unschedulable: so it is")]


@pytest.mark.parametrize(("size", "is_kept"), [((200 << 10) - 1000, True), (200 << 10, False)])
def test_a_job_of_more_than_200_kibibytes_is_created_without_a_copy_of_itself(size: int, is_kept: bool) -> None:
    written = {"metadata": {"name": "x"}, "spec": {"script": {"args": ["a" * size]}}}
    wanted = cast(Any, SimpleNamespace(written=lambda: written))
    assert ("last-applied-configuration" in json.dumps(submit._document(wanted, "ns")["metadata"])) == is_kept


def test_a_start_on_hosts_is_looked_at_every_third_of_a_second(clock: VirtualClock) -> None:
    looks: list[float] = []

    async def current(patience: float) -> Object:
        looks.append(clock.now)
        return progress("Starting", **({"RanksReady": "True"} if len(looks) == 4 else {}))

    clock.now = 100.0
    assert runonhosts._until_running(cast(Any, SimpleNamespace(name="x", at="x", status=progress("Starting"), current=current))) == 0
    assert looks == pytest.approx([100.0, 100.3, 100.6, 100.9])


def test_a_loss_curve_is_read_again_after_ten_seconds(clock: VirtualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[float] = []

    class Watch:
        async def ask(self, points: int) -> Object:
            read.extend([clock.now] if points else [])
            return {0: {"curve": {"1": {"loss": 2.0}}}}

    job = {"metadata": {"name": "x", "namespace": "", "uid": "u"}, "spec": {}, "status": {}}

    async def look() -> tuple[Object, bool]:
        return job, False

    monkeypatch.setattr("lockstep.platforms.jobs.top.NodesWatch", lambda *_: nullcontext(Watch()))

    async def story() -> None:
        looks = count()
        async for _ in looks_of_job("x", {}, look, lambda answers: [], 2.5):
            if next(looks) == 10:
                return

    clock.run(story())
    assert read == [0, 10, 20]


def test_half_an_hour_is_left_to_remove_the_files_of_a_job(clock: VirtualClock) -> None:
    @asynccontextmanager
    async def volume(*_: object) -> AsyncIterator[Volume]:
        yield Volume(SilentPlace(), "/w", "/d")

    assert clock.seconds_of(change._remove(cast(Any, SimpleNamespace(name="x", volume=volume)), 0)) == 1800


@pytest.mark.parametrize(("size", "is_read"), [(4_000_000, True), (4 << 20, False)])
def test_a_hub_has_five_seconds_for_a_config_of_four_mebibytes(monkeypatch: pytest.MonkeyPatch, size: int, is_read: bool) -> None:
    limits: list[float] = []

    def open_(request: object, timeout: float) -> io.BytesIO:
        limits.append(timeout)
        return io.BytesIO(json.dumps({"a": "x" * size}).encode())

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(hubconfig, "build_opener", lambda *_: SimpleNamespace(open=open_))
    with nullcontext() if is_read else pytest.raises(ConfigError, match="holds no JSON"):
        assert len(hubconfig.hub_config("a/b", None)[0]["a"]) == size
    assert limits == [5.0]


def test_a_pipe_is_240_characters_wide() -> None:
    written = io.StringIO()
    console(file=written).print("x" * 300)
    assert [*map(len, written.getvalue().splitlines())] == [240, 60]


def test_garbage_is_looked_for_after_50_000_new_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = gc.get_threshold()
    monkeypatch.setattr(sys, "argv", ["lockstep", "--help"])
    try:
        with pytest.raises(SystemExit):
            main()
        assert gc.get_threshold()[0] == 50_000
    finally:
        gc.set_threshold(*usual)


def test_a_curve_has_sixty_points_and_bars(local: Path) -> None:  # noqa: F811
    lines = (json.dumps({"step": step, "loss": 3.0}) for step in range(1, 601))
    (local / "workspace/runs/x/logs/train_log.jsonl").write_text("\n".join(lines))

    async def look() -> looks.Look:
        async with aclosing(LocalBackend(local).job("x").looks(1.0)) as every:
            return await anext(every)

    page, _, _ = asyncio.run(look())
    assert len(page["loss"]) == 60
    (loss,) = (line for line in top_page(page | {"loss": page["loss"] * 2}, 0.0) if line.startswith("loss "))
    assert loss.count("▁") == 60
