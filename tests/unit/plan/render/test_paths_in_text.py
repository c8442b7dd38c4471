"""Paths on the volumes in arguments and variables: mapped where /workspace is another folder, as they are in pods, and told where they
can't be.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from golden.plan_cases import job, profile
from lockstep.api.files.clusterfile import parse_cluster_file
from lockstep.api.names import DATASETS, WORKSPACE
from lockstep.cli import main as entry
from lockstep.plan.layers import Layer
from lockstep.plan.render.pod import pod_variables
from lockstep.plan.render.resolve import names_path_inside, path_lines, real_text, resolve
from lockstep.plan.render.resolved import PlatformDefaults
from lockstep.platforms.local.placement import local_defaults, local_run
from support.hosts_told import FILE, JOB, facts, placed
from unit.platforms.local.joined.test_seats import runs

HERE = PlatformDefaults(workspace="/h/ws", datasets="/h/ds")
MAPPED = {
    "/workspace": "/h/ws",
    "/workspace/": "/h/ws/",
    "/workspace/a b/c": "/h/ws/a b/c",
    "/datasets/x.jsonl": "/h/ds/x.jsonl",
    "/workspace/a:/usr/lib:/datasets/b": "/h/ws/a:/usr/lib:/h/ds/b",
    "$PATH:/workspace/bin": "$PATH:/h/ws/bin",
    "host:/workspace/x": "host:/h/ws/x",
    "--out=/workspace/o": "--out=/h/ws/o",
    "-o=/datasets": "-o=/h/ds",
    "--path=/workspace/a:/workspace/b": "--path=/h/ws/a:/h/ws/b",
    "data.path=/datasets/x": "data.path=/h/ds/x",
    "++hydra.run.dir=/workspace/o": "++hydra.run.dir=/h/ws/o",
    "+db/x@y=/workspace/o": "+db/x@y=/h/ws/o",
    "/workspace/a,b": "/h/ws/a,b",
}
SAME = [
    "", "x", "/", "/workspace2", "/workspace2/x", "/workspace-2", "/workspace.bak/x", "/workspaces/x", "/datasets2", "workspace/x",
        "./workspace/x",
    "~/workspace/x", "../workspace", "$HOME/workspace/x", "${HOME}/workspace/x", "/data/workspace/x", "s3://bucket/workspace/x",
        "https://x.org/workspace",
    "--name=workspace", "--level=3", "*/workspace/x",
]  # fmt: skip
INSIDE = [
    "a /workspace/x b", "cd /workspace && python3 a.py", '{"path": "/workspace/x"}', "[/workspace/x]", "/workspace/a,/workspace/b",
        "/workspace/a /workspace/b",
    "--a=/workspace/x --b=/datasets/y", "-I/workspace/include", "file:///workspace/x", "a=b=/workspace/x", "'/workspace/x'",
        "see /workspace.",
    "/workspace/x=/datasets/y", "--data=[/workspace/x]",
]  # fmt: skip


def test_a_path_that_is_the_text_or_a_part_of_it_moves_and_all_else_stays() -> None:
    assert {text: real_text(text, HERE) for text in (*MAPPED, *SAME, *INSIDE)} == MAPPED | {text: text for text in (*SAME, *INSIDE)}
    assert [text for text in (*MAPPED, *SAME, *INSIDE) if names_path_inside(text)] == INSIDE


SPEC = {
    "script": {"command": ["bash", "/workspace/run.sh"], "args": ["--out=/workspace/o", "cd /workspace"]},
    "env": [
        {"name": "PYTHONPATH", "value": "/workspace/a:/datasets/b"},
        {"name": "OPTIONS", "value": "-x /datasets/c"},
        {"name": "NONE"},
        {"name": "NCCL_TOPO_FILE", "value": "/workspace/topo.xml"},
    ],
}


def test_a_job_s_command_arguments_and_variables_move_and_its_own_words_stay() -> None:
    moved = resolve(job(**SPEC), profile(gpus={"perNode": 1}), HERE)
    assert moved.command == ("bash", "/h/ws/run.sh", "--out=/h/ws/o", "cd /workspace")
    assert {one.name: one.value for one in moved.spec.env} == {
        "PYTHONPATH": "/h/ws/a:/h/ds/b",
        "OPTIONS": "-x /datasets/c",
        "NONE": None,
        "NCCL_TOPO_FILE": "/h/ws/topo.xml",
    }
    assert moved.nccl["NCCL_TOPO_FILE"].value == "/h/ws/topo.xml"
    assert moved.job == job(**SPEC), "what a later start begins with"
    assert [line.split(" names")[0] for line in path_lines(moved)] == [
        "warning: PathInText: spec.env[OPTIONS]",
        "warning: PathInText: spec.script.args[1]",
    ]
    assert all("/workspace is /h/ws and /datasets is /h/ds" in line for line in path_lines(moved))
    layers = {row.field: row.layer for row in moved.settings}
    assert (layers["script.args"], layers["restart.maxRestarts"]) == (Layer.JOB, Layer.DEFAULT)


def test_in_pods_nothing_changes() -> None:
    there = resolve(job(**SPEC), profile())
    assert there.command == ("bash", "/workspace/run.sh", "--out=/workspace/o", "cd /workspace") and not path_lines(there)
    assert {"name": "PYTHONPATH", "value": "/workspace/a:/datasets/b"} in pod_variables(there)
    assert (HERE.workspace, HERE.datasets) != (WORKSPACE, DATASETS)


def test_every_machine_gets_its_own_folders(tmp_path: Path) -> None:
    env = '[{name: A, value: "/workspace/a:/datasets/b"}]'
    file = FILE.replace("value: /data/hf", "value: /workspace/hf")
    seats = placed(
        facts("lab0", "10.0.0.1"),
        facts("lab1", "10.0.0.2"),
        job=JOB.replace('[{name: A, value: "1"}]', env),
        file=parse_cluster_file(file, "f"),
    )
    assert [seat.record.environment["A"] for seat in seats] == [
        "/home/lab0/lockstep/workspace/a:/home/lab0/lockstep/datasets/b", "/data/ws/a:/home/lab1/lockstep/datasets/b",
    ]  # fmt: skip
    assert seats[1].record.environment["HF_HOME"] == "/data/ws/hf"
    assert all("/workspace/a:/datasets/b" in json.dumps(seat.record.job) for seat in seats), "a resume may choose other hosts"
    spec = {"script": {"path": "a.py", "args": ["/datasets/x"]}, "env": [{"name": "A", "value": "/workspace/a"}]}
    here = local_run(resolve(job(**spec), profile(), local_defaults(tmp_path, "u")), tmp_path / "key", (4000, 5000), {})
    assert (here.environment["A"], here.command[2:]) == (f"{tmp_path}/workspace/a", (f"{tmp_path}/datasets/x",))
    for run, folder in zip(runs(**spec), ("/data/me", "/scratch/me"), strict=True):
        assert (run.environment["A"], run.command[2:]) == (f"{folder}/workspace/a", (f"{folder}/datasets/x",))


@pytest.mark.parametrize("verb", [("validate",), ("render", "--explain")])
def test_what_hosts_get_and_what_stays_is_shown_before_a_start(verb: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "lab.yaml").write_text(FILE)
    (tmp_path / "job.yaml").write_text(JOB.replace("path: rank.py", "path: rank.py, args: [--out=/workspace/o, 'cd /workspace']"))
    shown = CliRunner().invoke(entry.app, [*verb, "-f", str(tmp_path / "job.yaml"), "--cluster", str(tmp_path / "lab.yaml")])
    words = " ".join(shown.output.split())
    assert shown.exit_code == 0, words
    assert "spec.script.args[1] names a path inside other text" in words and "/workspace is ~/lockstep/workspace" in words
    assert ("--out=~/lockstep/workspace/o" in words) == (verb[0] == "render")
