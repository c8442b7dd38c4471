"""`lockstep top` of hosts without a job: what is read of their answers, and the page."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.plan.pages.hosts import hosts_page, hosts_view, read_host

GIB = 1 << 30
GPU = {
    "index": 0,
    "uuid": "GPU-a",
    "name": "RTX 4090",
    "bytes": 20 * GIB,
    "limitBytes": 24 * GIB,
    "percentage": 97,
    "celsius": 71,
    "watts": 400,
}
ANSWER: dict[str, Any] = {
    "cpu": {"cores": 3.25, "limitCores": 16.0}, "load": [4.2, 3.0, 2.0], "memory": {"bytes": 12 * GIB, "limitBytes": 64 * GIB},
    "disks": [{"path": "~/lockstep/workspace", "freeBytes": 200 * GIB, "limitBytes": 1024 * GIB}],
    "jobs": [{"name": "demo", "ranks": [0, 1]}, {"name": "other", "ranks": [3]}],
    "gpus": [
        {**GPU, "claim": {"pid": 7, "user": "ada", "words": "job demo of ada since 14:02"},
            "processes": [{"pid": 9, "user": "ada", "name": "python3", "bytes": GIB}, {"pid": 10, "user": "bob", "name": "blender"}]},
        {**GPU, "index": 1, "uuid": "GPU-b"},
    ],
}  # fmt: skip


def shown(width: int | None = None, **hosts: dict[str, Any]) -> list[str]:
    return list(
        hosts_page(
            hosts_view("lab", {name: read_host(answer) if "problem" not in answer else answer for name, answer in hosts.items()}), width
        )
    )


def test_what_a_host_truly_says_stays_as_it_is() -> None:
    assert read_host({**ANSWER, "forged": 1, "problem": "x"}) == ANSWER


def test_each_host_has_a_row_and_each_gpu_one_with_who_uses_it() -> None:
    lines = [" ".join(line.split()) for line in shown(lab0=ANSWER, lab1={"problem": "ssh: connect to host lab1: No route to host"})]
    assert lines[1] == "lab0 4.2 3.2 of 16 12 GiB of 64 GiB 200 GiB of 1 TiB demo (2 ranks), other (rank 3)"
    assert lines[2].split()[0] == "lab1"
    assert lines[5].endswith("97% 20 GiB of 24 GiB 71 °C 400 W job demo of ada since 14:02 (claimed by ada), bob: blender (pid 10)")
    assert lines[6].endswith("free")
    assert lines[7] == "not seen: lab1: ssh: connect to host lab1: No route to host"


def test_a_gpu_without_a_claim_names_the_processes_on_it() -> None:
    used = {**ANSWER, "gpus": [{**GPU, "processes": [{"pid": 10, "user": "", "name": ""}]}]}
    assert shown(lab0=used)[-1].endswith("somebody: a process (pid 10)")


def test_a_claim_that_does_not_answer_is_one() -> None:
    assert shown(lab0={**ANSWER, "gpus": [{**GPU, "claim": {"pid": 7, "user": "ada", "words": ""}}]})[-1].endswith("claimed by ada (pid 7)")


def test_a_narrow_terminal_has_fewer_columns() -> None:
    lines = shown(60, lab0={**ANSWER, "jobs": []})
    assert "HOST" in lines[0] and max(map(len, lines[:2])) <= 60 and "LOAD" not in lines[0]


def test_a_host_s_words_do_not_act_on_a_terminal() -> None:
    evil = "evil\x1b[2J\nINJECTED"
    answer = {
        **ANSWER,
        "gpuProblem": evil,
        "jobs": [{"name": evil, "ranks": []}],
        "gpus": [{**GPU, "name": evil, "claim": {"pid": 1, "user": evil, "words": evil}}],
    }
    lines = shown(lab0=answer)
    assert not any("\x1b" in line or line.startswith("INJECTED") for line in lines)


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from([*ANSWER, "index", "claim", "words", "processes", "pid", "user", "ranks", "path", "bytes", "cores"]),
            inner,
            max_size=5,
        ),
    ),
    max_leaves=12,
)


@settings(max_examples=100)
@given(st.dictionaries(st.sampled_from(list(ANSWER)), JSON, max_size=7))
def test_whatever_a_host_says_there_is_a_page(answer: dict[str, Any]) -> None:
    view = hosts_view("lab", {"lab0": read_host(answer)})
    assert list(hosts_page(view, 80)) and json.dumps(view, allow_nan=False)
