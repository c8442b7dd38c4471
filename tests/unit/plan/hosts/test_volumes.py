"""Hosts that share a folder, by what each sees, and the ports that a copy may listen on."""

from __future__ import annotations

import pytest

from lockstep.api.errors import ConfigError
from lockstep.api.hosts import Host, HostsCluster
from lockstep.plan.cluster.finding import Outcome
from lockstep.plan.hosts.facts import Folder, HostFacts
from lockstep.plan.hosts.volumes import groups_of, listening_ports, refuse_apart, sharing_finding
from lockstep_spec.choices import StorageMode

MARKS = {"a": "m-a", "b": "m-b", "c": "m-c", "d": ""}


@pytest.mark.parametrize(
    ("seen", "groups"),
    [
        ({"a": ["m-a"], "b": ["m-b"], "c": ["m-c"]}, [["a"], ["b"], ["c"], ["d"]]),
        ({"a": ["m-a", "m-c"], "b": ["m-b"], "c": ["m-a", "m-c"]}, [["a", "c"], ["b"], ["d"]]),
        ({"a": ["m-a"], "b": ["m-b"], "c": ["m-c", "m-a"]}, [["a", "c"], ["b"], ["d"]]),  # one of them has cached that it isn't there
        ({"b": ["m-a", "m-b"], "c": ["m-b"]}, [["a", "b", "c"], ["d"]]),
        ({"a": ["m-a", "what nobody wrote"]}, [["a"], ["b"], ["c"], ["d"]]),
    ],
)
def test_hosts_share_a_folder_if_either_sees_the_others_mark(seen: dict[str, list[str]], groups: list[list[str]]) -> None:
    assert groups_of(MARKS, seen) == groups


def test_one_file_system_that_is_stated_must_be_seen_by_all() -> None:
    assert refuse_apart([["a", "b"]], StorageMode.SHARED, "/w") == ""
    with pytest.raises(ConfigError, match=r"storage\.mode is rwx, but what a host writes to /w is seen by a/b and not by c"):
        refuse_apart([["a", "b"], ["c"]], StorageMode.SHARED, "/w")


def test_hosts_that_share_one_though_each_should_have_its_own_are_named() -> None:
    assert refuse_apart([["a"], ["b"]], StorageMode.PER_POD, "/w") == ""
    assert refuse_apart([["a", "c"], ["b"]], StorageMode.PER_POD, "/w").startswith("a, c see one and the same /w, though")


@pytest.mark.parametrize(
    ("groups", "mode", "outcome"),
    [
        ([["a", "b"]], StorageMode.SHARED, None),
        ([["a"], ["b"]], StorageMode.PER_POD, None),
        ([["a"], ["b"]], StorageMode.SHARED, Outcome.FAILED),
        ([["a", "b"]], StorageMode.PER_POD, Outcome.WARNING),
    ],
)
def test_a_check_fails_only_where_one_file_system_was_stated_and_is_not_there(
    groups: list[list[str]], mode: StorageMode, outcome: Outcome | None
) -> None:
    finding = sharing_finding(groups, mode, "/w")
    assert (None if finding is None else finding.outcome) is outcome


def facts(*, taken: tuple[int, ...] = (), promised: tuple[int, ...] = ()) -> HostFacts:
    folder = Folder("/w", 1)
    return HostFacts(
        "a", "ada", "/home/ada", 0.0, "", (3, 11), folder, folder, taken_ports=frozenset(taken), promised_ports=frozenset(promised)
    )


def test_a_copy_listens_on_the_last_ports_that_no_job_has() -> None:
    cluster = HostsCluster(hosts=[Host(name="a")], ports="29400-29449")
    every = [facts(taken=(29449,)), facts(promised=(29432, 29433), taken=(29400,))]
    ports = listening_ports(cluster, every)
    assert ports[0] == 29431 and ports[-1] == 29401
    full = [facts(promised=tuple(range(29400, 29450)), taken=tuple(range(29400, 29440)))]
    assert listening_ports(cluster, full) == list(range(29449, 29439, -1))  # promised to jobs, but nobody listens now
