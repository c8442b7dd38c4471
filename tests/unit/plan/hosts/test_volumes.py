"""Hosts that share a folder, by what each sees, and the ports that a copy may listen on."""

from __future__ import annotations

import pytest

from lockstep.api.errors import ConfigError
from lockstep.api.hosts import Host, HostsCluster
from lockstep.plan.hosts.facts import Folder, HostFacts
from lockstep.plan.hosts.volumes import Sharing, groups_of, listening_ports, refuse_apart, sharing_findings
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
    assert refuse_apart(Sharing([["a", "b"]]), StorageMode.SHARED, "/w") == ""
    with pytest.raises(ConfigError, match=r"storage\.mode is rwx, but what a host writes to /w is seen by a/b and not by c"):
        refuse_apart(Sharing([["a", "b"], ["c"]]), StorageMode.SHARED, "/w")


def test_hosts_that_share_one_though_each_should_have_its_own_are_named() -> None:
    assert refuse_apart(Sharing([["a"], ["b"]]), StorageMode.PER_POD, "/w") == ""
    assert refuse_apart(Sharing([["a", "c"], ["b"]]), StorageMode.PER_POD, "/w").startswith("a, c see one and the same /w, though")


FULL = {"c": "/w: No space left on device"}


@pytest.mark.parametrize(
    ("sharing", "mode", "expected"),
    [
        (Sharing([["a", "b"], ["c"]], unwritable=FULL), StorageMode.SHARED,
            [("failed", "c", "nothing can be written to its workspace: /w: No space left on device")]),
        (Sharing([["a", "b", "c"]], unwritable=FULL), StorageMode.SHARED,
            [("failed", "c", "nothing can be written to its workspace: /w: No space")]),
        (Sharing([["a"], ["b"], ["c"]], unwritable=FULL), StorageMode.SHARED,
            [("failed", "c", "nothing"), ("failed", "storage", "is seen by a and not by b")]),
        (Sharing([["a"], ["b"], ["c"]], unwritable=FULL), StorageMode.PER_POD, [("failed", "c", "nothing can be written")]),
        (Sharing([["a", "b"], ["c"]], unasked={"c": "it fell silent"}), StorageMode.SHARED,
            [("unknown", "storage", "whether host c sees what the others write to /w: it fell silent")]),
        (Sharing([["a"], ["b"], ["c"]], unasked={"c": "it fell silent"}), StorageMode.PER_POD, []),
        (Sharing([["a", "b"]]), StorageMode.SHARED, []),
        (Sharing([["a", "b"]]), StorageMode.PER_POD, [("warning", "storage", "a, b see one and the same /w")]),
    ],
)  # fmt: skip
def test_a_host_that_can_t_write_or_be_asked_is_not_called_apart(
    sharing: Sharing, mode: StorageMode, expected: list[tuple[str, str, str]]
) -> None:
    found = list(sharing_findings(sharing, mode, "/w"))
    assert [(one.outcome.value, one.subject) for one in found] == [one[:2] for one in expected]
    assert all(words in one.message for one, (_, _, words) in zip(found, expected, strict=True)), found


def test_a_start_is_refused_with_the_reason_why_a_host_can_t_write_or_be_asked() -> None:
    with pytest.raises(ConfigError, match=r"^host c: nothing can be written to its workspace: /w: No space left on device: mend that, or "):
        refuse_apart(Sharing([["a"], ["c"]], unwritable=FULL), StorageMode.PER_POD, "/w")
    with pytest.raises(
        ConfigError, match=r"^it is not known whether host c sees what the others write to /w: it fell silent: type the command"
    ):
        refuse_apart(Sharing([["a"], ["c"]], unasked={"c": "it fell silent"}), StorageMode.SHARED, "/w")


def facts(*, taken: tuple[int, ...] = (), promised: tuple[int, ...] = ()) -> HostFacts:
    folder = Folder("/w", 1)
    return HostFacts("a", "ada", "/home/ada", 0.0, (3, 11), folder, folder, taken_ports=taken, promised_ports=promised)


def test_a_copy_listens_on_the_last_ports_that_no_job_has() -> None:
    cluster = HostsCluster(hosts=[Host(name="a")], ports="29400-29449")
    every = [facts(taken=(29449,)), facts(promised=(29432, 29433), taken=(29400,))]
    ports = listening_ports(cluster, every)
    assert ports[0] == 29431 and ports[-1] == 29401
    full = [facts(promised=tuple(range(29400, 29450)), taken=tuple(range(29400, 29440)))]
    assert listening_ports(cluster, full) == list(range(29449, 29439, -1))  # promised to jobs, but nobody listens now
