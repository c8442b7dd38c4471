"""Advice by place: on hosts nothing is said of pods, images and what else only a cluster has."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from typing import Any

import pytest

from lockstep_gang.contract.messages import OutOfMemory
from lockstep_gang.contract.placewords import IN_PODS, ON_HOSTS, PlaceWords, words_of
from lockstep_gang.contract.preflight import DeviceResult, Expected, Looked, Met, SelfTestResult, VolumeFacts
from lockstep_gang.contract.run import HostPlace
from lockstep_gang.coordinator.network import trouble_of
from lockstep_gang.lifecycle.causes import _REMEDIES
from lockstep_gang.lifecycle.preflight.checks import judge_all, silent
from lockstep_gang.lifecycle.preflight.nodes import without_torch
from lockstep_gang.lifecycle.preflight.self_test import judge_self_test
from lockstep_spec.choices import StorageMode
from unit.gang.cases import make_run
from unit.gang.story import started

ONLY_IN_A_CLUSTER = re.compile(
    r"\bpods?\b|\bimage\b|NetworkPolicy|network polic|\bclaim\b|container|device plugin|Service\b|cluster's|kubectl|\bvolume\b",
    re.IGNORECASE,
)
HOST = {"host": HostPlace(), "addresses": ("10.0.0.1", "10.0.0.2")}
GOOD = Looked(
    port=4000, volume=VolumeFacts("", 1 << 40, 0), versions={"python": "3.11.7", "torch": "2.9.0"}, received_ms=1_000_000, sent_ms=1_000_100
)  # fmt: skip


@pytest.mark.parametrize("name", [field.name for field in fields(PlaceWords)])
def test_on_hosts_nothing_is_said_of_what_only_a_cluster_has(name: str) -> None:
    words = getattr(ON_HOSTS, name)
    assert words
    assert ONLY_IN_A_CLUSTER.search(words) is None, words


def test_a_run_has_the_words_of_its_place() -> None:
    assert words_of(make_run()) is IN_PODS
    assert words_of(make_run(host=HostPlace())) is ON_HOSTS


@pytest.mark.parametrize(
    ("looked", "met", "words"),
    [
        ({"unresolved": {"lab1": "Name or service not known"}}, Met(), "names"),
        ({"unfinished": ("unresolved",)}, Met(), "dns"),
        ({}, Met(unreachable={"0": "no answer in 5 s"}), "peers"),
        ({}, Met(sees_marker=True), "own"),
        ({"versions": {"python": "3.12.1", "torch": "2.9.0"}}, Met(), "python"),
        ({"versions": {"python": "3.11.7", "torch": "2.8.0"}}, Met(), "libraries"),
    ],
)  # fmt: skip
def test_a_preflight_on_hosts_advises_for_hosts(looked: dict[str, Any], met: Met, words: str) -> None:
    run = make_run(storage=StorageMode.PER_POD, preflight=Expected(), **HOST)
    facts = [(0, GOOD, 1000.0, 1000.1), (1, replace(GOOD, **looked), 1000.0, 1000.1)]
    (finding,) = judge_all(run, facts, {0: Met(), 1: replace(met, sees_marker=met.sees_marker or False)})
    assert finding.fix == getattr(ON_HOSTS, words)


def test_torch_is_missing_from_an_environment_and_a_host_that_hangs_is_restarted() -> None:
    run = make_run(**HOST)
    looked = [(0, replace(GOOD, versions={}), 1000.0, 1000.1)]
    (finding,) = without_torch(run, looked, "self-test", "the self-test")
    assert finding.fix == "install torch in the environment, or set spec.preflight to Basic"
    assert silent(run, [0], 5, {})[0].fix == ON_HOSTS.hung
    (finding,) = judge_self_test(run, {0: SelfTestResult(devices=(DeviceResult(0, error="RuntimeError: no"),))})
    assert finding.fix == "look at the job's environment there: ranks would meet the same"


@pytest.mark.parametrize("place", [IN_PODS, ON_HOSTS])
def test_every_remedy_is_a_sentence_in_every_place(place: PlaceWords) -> None:
    for _, what in _REMEDIES:
        text = what.format(**vars(place))
        assert text and (place is IN_PODS or not ONLY_IN_A_CLUSTER.search(text))


@pytest.mark.parametrize(
    ("end", "words"),
    [
        ({"code": None, "signal": "SIGBUS"}, ON_HOSTS.more_shared_memory),
        (
            {"code": 1, "last_lines": ("RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error.",)},
            ON_HOSTS.more_shared_memory,
        ),
        ({"code": None, "signal": "SIGKILL", "out_of_memory": OutOfMemory(1 << 30)}, f"{ON_HOSTS.memory_limit} 1 GiB"),
        ({"code": None, "signal": "SIGSYS"}, "a seccomp profile forbids"),
    ],
)
def test_a_rank_s_end_on_a_host_is_told_for_hosts(end: dict[str, Any], words: str) -> None:
    story = started(**HOST).exits(1, **end)
    assert words in story.gang.stop_reason
    assert ONLY_IN_A_CLUSTER.search(story.gang.stop_reason) is None


def test_what_keeps_a_host_from_another_is_a_firewall() -> None:
    trouble = trouble_of(TimeoutError(), "10.0.0.1", 29400, "node 0", ON_HOSTS)
    assert trouble.text == "node 0 at 10.0.0.1:29400 can't be reached (no answer): a firewall or the network blocks it"
