"""What a host lacks of an environment, from its facts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lockstep.api.errors import ConfigError
from lockstep.api.hosts import Host
from lockstep.plan.cluster.finding import Outcome
from lockstep.plan.hosts.facts import BadAnswer, Version
from lockstep.plan.hosts.setup import (
    HostParts,
    HostPython,
    choose_python,
    environment_findings,
    environment_name,
    mixed_pythons,
    plan_lines,
    read_parts,
    root_steps,
    setup_of,
)  # fmt: skip

LOCK, TRAINER = "torch==2.15.0", "aa" * 32
DATA = "/home/ada/.local/share/lockstep"
PARTS = HostParts(
    name="lab0", user="ada", home="/home/ada", system="Linux", machine="x86_64", glibc=Version(2, 36), data=DATA,
        pythons={"3.11": "/usr/bin/python3"},
    has_units=True, lingers=True,
)  # fmt: skip
HOST = Host(name="lab0")
FOLDERS = ("/home/ada/lockstep/workspace", "/home/ada/lockstep/datasets")
NAME = environment_name(LOCK, HostPython("3.11", "/usr/bin/python3"), "x86_64", TRAINER)
READY = replace(PARTS, environments=(NAME,), current=NAME, folders=FOLDERS)


def shown(parts: HostParts, stated: str | None = None) -> list[str]:
    return list(plan_lines(setup_of(HOST, parts, stated, LOCK, TRAINER), 83, "from PyPI"))


def test_a_bare_host_gets_an_environment_and_folders() -> None:
    assert shown(replace(PARTS, lingers=False)) == [
        "lab0: x86_64, Python 3.11 its own (/usr/bin/python3)",
        f"  make    {DATA}/{NAME}: 83 packages from PyPI, and Lockstep's trainer",
        "  make    ~/lockstep/workspace",
        "  make    ~/lockstep/datasets",
        "  linger  switch on, so that jobs survive the end of a login and a reboot",
    ]


def test_a_host_that_lacks_nothing_is_ready() -> None:
    setup = setup_of(HOST, READY, None, LOCK, TRAINER)
    assert setup.is_done
    assert not setup.makes
    assert shown(READY)[1:] == [f"  ready: {DATA}/{NAME}"]


@pytest.mark.parametrize(
    ("pythons", "environments", "runs"),
    [({"3.10": "/p"}, (), True), ({"3.8": "/p", "3.11": "/q"}, (), False), ({"3.8": "/p"}, (NAME,), True), ({}, (), False)],
)
def test_programs_run_on_python3_if_it_is_new_enough_and_else_on_an_environment_s(
    pythons: dict[str, str], environments: tuple[str, ...], runs: bool
) -> None:
    assert replace(PARTS, pythons=pythons, environments=environments).runs_programs is runs


def test_a_host_that_may_not_linger_is_done_all_the_same() -> None:
    setup = setup_of(HOST, replace(READY, lingers=False), None, LOCK, TRAINER)
    assert setup.is_done
    assert setup.lingers


def test_environments_that_no_job_names_are_removed_and_others_stay() -> None:
    parts = replace(READY, environments=("env-" + "0" * 16, "env-" + "1" * 16, NAME), used=("env-" + "1" * 16,))
    setup = setup_of(HOST, parts, None, LOCK, TRAINER)
    assert setup.obsolete == ("env-" + "0" * 16,)
    assert not setup.is_done


def test_an_environment_that_is_there_is_taken_again_without_being_made() -> None:
    setup = setup_of(HOST, replace(READY, current="env-" + "1" * 16), None, LOCK, TRAINER)
    assert not setup.makes
    assert not setup.is_done
    assert f"  use     {DATA}/{NAME}, which is there" in shown(replace(READY, current="env-" + "1" * 16))


@pytest.mark.parametrize(
    ("pythons", "stated", "expected"),
    [
        ({"3.11": "/usr/bin/python3"}, None, HostPython("3.11", "/usr/bin/python3")),
        ({"3.13": "/usr/bin/python3", "3.11": "/opt/python3.11"}, None, HostPython("3.13", "/usr/bin/python3")),
        ({"3.9": "/usr/bin/python3", "3.11": "/opt/python3.11"}, None, HostPython("3.11", "/opt/python3.11")),
        ({"3.6": "/usr/bin/python3"}, None, HostPython("3.12", "")),
        ({}, None, HostPython("3.12", "")),
        ({"3.11": "/usr/bin/python3"}, "3.12", HostPython("3.12", "")),
        ({"3.13": "/usr/bin/python3", "3.12": "/usr/bin/python3.12"}, "3.12", HostPython("3.12", "/usr/bin/python3.12")),
    ],
)
def test_the_host_s_own_python_is_taken_where_it_will_do(pythons: dict[str, str], stated: str | None, expected: HostPython) -> None:
    assert choose_python(replace(PARTS, pythons=pythons), stated) == expected


def test_all_that_changes_an_environment_changes_its_name() -> None:
    python = HostPython("3.11", "/usr/bin/python3")
    names = {
        environment_name(LOCK, python, "x86_64", TRAINER),
        environment_name(LOCK + " ", python, "x86_64", TRAINER),
        environment_name(LOCK, HostPython("3.12", "/usr/bin/python3"), "x86_64", TRAINER),
        environment_name(LOCK, HostPython("3.11", ""), "x86_64", TRAINER),
        environment_name(LOCK, python, "aarch64", TRAINER),
        environment_name(LOCK, python, "x86_64", "bb" * 32),
    }
    assert len(names) == 6
    assert environment_name(LOCK, python, "x86_64", TRAINER) in names


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"system": "Darwin"}, "Darwin on x86_64"),
        ({"machine": "ppc64le"}, "Linux on ppc64le"),
        ({"glibc": None}, "Linux on x86_64 without glibc"),
    ],
)
def test_a_machine_that_no_wheels_are_for_is_refused(changes: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=f"host lab0 has {what}: hosts are Linux with glibc"):
        setup_of(HOST, replace(PARTS, **changes), None, LOCK, TRAINER)


def test_a_python_that_is_too_old_for_the_trainer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"environment\.python is 3\.10, and the trainer needs 3\.11 or newer"):
        setup_of(HOST, PARTS, "3.10", LOCK, TRAINER)


def test_gpus_without_a_driver_and_a_refused_linger_are_root_s_to_mend() -> None:
    setup = setup_of(HOST, replace(PARTS, devices=2, gpus=0), None, LOCK, TRAINER)
    lines = list(root_steps(setup, refused=True))
    assert "2 NVIDIA GPUs are on its bus and the driver shows 0" in lines[0]
    assert "sudo loginctl enable-linger ada" in lines[1]
    assert list(root_steps(setup_of(HOST, replace(PARTS, devices=2, gpus=2), None, LOCK, TRAINER))) == []


def test_unlike_pythons_are_told() -> None:
    other = replace(PARTS, name="lab1", pythons={"3.12": "/usr/bin/python3"})
    setups = [setup_of(HOST, PARTS, None, LOCK, TRAINER), setup_of(Host(name="lab1"), other, None, LOCK, TRAINER)]
    assert (
        mixed_pythons(setups)
        == "the hosts have unlike Pythons (3.11 on lab0; 3.12 on lab1): environment.python in the cluster file gives all of them one"
    )
    assert mixed_pythons(setups[:1]) == ""


ANSWER = {
    "user": "ada", "home": "/home/ada", "system": "Linux", "machine": "x86_64", "glibc": "2.36", "data": DATA,
        "pythons": [["3.11", "/usr/bin/python3"]],
    "environments": [], "current": "", "used": [], "files": {}, "folders": [], "units": True, "linger": True, "gpus": 0, "devices": 0,
}  # fmt: skip


def test_an_answer_is_read() -> None:
    assert read_parts("lab0", ANSWER) == PARTS


@pytest.mark.parametrize("changes", [{"glibc": "x.y"}, {"pythons": 3}, {"files": []}, {"gpus": "many"}, {"pythons": [["3.11"]]}])
def test_an_answer_that_is_none_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(BadAnswer, match="host lab0"):
        read_parts("lab0", {**ANSWER, **changes})


def test_an_environment_of_another_lock_is_named_and_fails_where_other_hosts_have_the_lock_s() -> None:
    old = replace(READY, environments=("env-old",), current="env-old")
    bare = replace(PARTS, name="lab2")
    ready, behind, none = (
        setup_of(Host(name=name), parts, None, LOCK, TRAINER) for name, parts in (("lab0", READY), ("lab1", old), ("lab2", bare))
    )
    assert environment_findings([ready, none], "a.lock", "lab") == []
    (one,) = environment_findings([ready, behind, none], "a.lock", "lab")
    assert (one.subject, one.outcome, one.fix) == (
        "lab1",
        Outcome.FAILED,
        "lockstep hosts setup lab",
    ) and "env-old is not of a.lock" in one.message
    (all_of_them,) = environment_findings([behind, none], "a.lock", "lab")
    assert (all_of_them.subject, all_of_them.outcome) == ("lab1", Outcome.WARNING) and "a.lock" in all_of_them.message
    older = setup_of(Host(name="lab3"), replace(old, name="lab3", environments=("env-older",), current="env-older"), None, LOCK, TRAINER)
    unlike = environment_findings([behind, none, older], "a.lock", "lab")
    assert [(one.subject, one.outcome) for one in unlike] == [("lab1", Outcome.FAILED), ("lab3", Outcome.FAILED)], "ranks would differ"
    arm = setup_of(Host(name="lab3"), replace(older.parts, machine="aarch64"), None, LOCK, TRAINER)
    (both,) = environment_findings([behind, arm], "a.lock", "lab")
    assert (both.subject, both.outcome) == ("lab1, lab3", Outcome.WARNING), "names of other machines' environments differ anyway"
