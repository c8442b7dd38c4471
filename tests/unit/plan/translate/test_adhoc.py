"""A script on hosts, typed as for torchrun, is a job file that says the same."""

from __future__ import annotations

from posixpath import normpath

import pytest

from lockstep.api.errors import ConfigError
from lockstep.api.files.clusterfile import parse_cluster_file
from lockstep.api.files.jobfile import parse_job_file
from lockstep.api.hosts import HostsCluster
from lockstep.api.job import TrainingJob
from lockstep.plan.render.resolve import resolve
from lockstep.plan.render.resolved import PlatformDefaults
from lockstep.plan.translate.adhoc import TypedProgram, script_job


def cluster(hosts: str) -> HostsCluster:
    found = parse_cluster_file(f"cluster: {{name: lab, platform: hosts}}\nhosts: {hosts}\n", "lab.yaml").hosts
    assert found is not None
    return found


def job(words: list[str], hosts: str = "[{name: a}, {name: b}]", processes: int | None = 2, name: str | None = None) -> TrainingJob:
    return parse_job_file(script_job(TypedProgram(words), cluster(hosts).gpu_counts, processes, name), "job.yaml")


def test_arguments_reach_the_script_as_they_are() -> None:
    words = ["--text", "a b", 'it\'s "quoted" $HOME `id`', "ünïcode\n2 lines\n", "", "-x", "3", "true", "# no comment", "😀", "a: b"]
    found = job(["sub/train.py", *words], name="lab").spec
    assert (found.script.path, found.script.args, found.cluster, found.nodes) == ("sub/train.py", words, "lab", 2)


@pytest.mark.parametrize(
    ("hosts", "processes", "gpus", "ranks"),
    [
        ("[{name: a}, {name: b}]", 2, 2, None),
        ("[{name: a, gpus: 4}, {name: b, gpus: [0, 1]}]", None, 2, None),
        ("[{name: a, gpus: 4}, {name: b, gpus: [0, 1]}]", 1, 1, None),
        ("[{name: a, gpus: 0}, {name: b, gpus: 0}]", 3, 0, 3),
        ("[{name: a, gpus: 0}, {name: b, gpus: 2}]", 3, 0, 3),
    ],
)
def test_a_host_has_a_rank_for_each_gpu_or_the_number_that_is_asked_for(
    hosts: str, processes: int | None, gpus: int, ranks: int | None
) -> None:
    found = job(["a.py"], hosts, processes)
    assert (found.spec.gpus_per_node, found.spec.ranks_per_node) == (gpus, ranks)
    profile = parse_cluster_file(f"cluster: {{name: lab, platform: hosts}}\nhosts: {hosts}\n", "lab.yaml").profile
    resolved = resolve(found, profile, PlatformDefaults(image="hosts"))
    assert (resolved.nodes, resolved.ranks_per_node, resolved.warnings) == (2, ranks or gpus, ())


@pytest.mark.parametrize(
    ("hosts", "processes", "message"),
    [
        (
            "[{name: a}]",
            None,
            (
                "the hosts state no GPUs: say how many ranks each has: --nproc-per-node 2 .one for each GPU., or on CPUs: --nproc-per-node"
                " 2 --set gpusPerNode=0$"
            ),
        ),
        ("[{name: a, gpus: 0}]", None, "the hosts have no GPU: say how many ranks each has: --nproc-per-node 2$"),
        ("[{name: a, gpus: 2}]", 4, "--nproc-per-node is 4, and a node offers 2 GPUs: every GPU has one rank"),
    ],
)
def test_a_number_of_ranks_that_can_not_be_is_refused(hosts: str, processes: int | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        job(["a.py"], hosts, processes)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name what to run, behind --"),
        (["-u", "a.py"], "name what to run, behind --"),
        (["-m"], "-m needs the name of a module"),
        ([""], "name what to run, behind --"),
        (["../a.py"], "../a.py: is outside of the folder that is run: change to its folder first"),
    ],
)
def test_what_is_no_program_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        job(words)
    with pytest.raises(ConfigError, match=r"\.\./run\.sh: is outside of the folder that is run"):
        TypedProgram(["bash", "../run.sh"], lambda path: path == "../run.sh")


@pytest.mark.parametrize(
    ("path", "name", "written"),
    [
        ("./Train_Me.v2.py", "train-me-v2", "Train_Me.v2.py"),
        ("/srv/x/7b.py", "run-7b", "/srv/x/7b.py"),
        ("ü.py", "run", "ü.py"),
        (f"{'a' * 80}.py", "a", f"{'a' * 80}.py"),
    ],
)
def test_the_job_is_called_as_its_script(path: str, name: str, written: str) -> None:
    found = job([path])
    assert found.metadata.name.startswith(name) and found.spec.script is not None and found.spec.script.path == written


@pytest.mark.parametrize(
    ("words", "here", "fields", "name"),
    [
        (["train.py", "--lr", "1"], ["train.py"], {"path": "train.py", "args": ["--lr", "1"]}, "train"),
        (["./sub/train.py"], ["sub/train.py"], {"path": "sub/train.py"}, "train"),
        (["-m", "scripts.base_train", "-x"], ["scripts/base_train.py"], {"module": "scripts.base_train", "args": ["-x"]}, "base-train"),
        (["-m", "package"], ["package/__main__.py"], {"module": "package"}, "package"),
        (["-m", "package"], [], {"module": "package"}, "package"),
        (["./run.sh", "a"], ["run.sh"], {"command": ["./run.sh"], "args": ["a"]}, "run"),
        (["run.sh"], ["run.sh"], {"command": ["./run.sh"]}, "run"),
        (["bash", "-x", "go.sh", "a"], ["go.sh"], {"command": ["bash", "-x", "go.sh"], "args": ["a"]}, "go"),
        (["bash", "gone.sh"], [], {"command": ["bash"], "args": ["gone.sh"]}, "bash"),
        (["nvidia-smi", "-L"], [], {"command": ["nvidia-smi"], "args": ["-L"]}, "nvidia-smi"),
        (["/srv/train.py"], [], {"path": "/srv/train.py"}, "train"),
        (["composer", "launch", "train.py"], ["train.py"], {"command": ["composer"], "args": ["launch", "train.py"]}, "composer"),
        (["python3", "-m", "pkg.fit"], ["pkg/fit.py"], {"command": ["python3"], "args": ["-m", "pkg.fit"]}, "python3"),
    ],
)
def test_a_file_a_module_and_another_program_are_fields_of_the_job(
    words: list[str], here: list[str], fields: dict[str, object], name: str
) -> None:
    typed = TypedProgram(words, lambda path: normpath(path) in here)
    assert (typed.fields, typed.job, typed.is_here) == (fields, name, bool(here))
    job = parse_job_file(script_job(typed, {"a": 1}, None, None, "/workspace/mine"), "job.yaml")
    assert job.spec.script is not None and job.spec.script.folder == "/workspace/mine"


def test_ranks_that_are_stated_otherwise_are_not_asked_for() -> None:
    changes = ["gpusPerNode=0", "ranksPerNode=1"]
    job = parse_job_file(script_job(TypedProgram(["a.py"]), {"a": None}, None, None, ranks_stated=True), "job.yaml", changes)
    assert (job.spec.gpus_per_node, job.spec.ranks_per_node) == (0, 1)
    with pytest.raises(ConfigError, match="or on CPUs: --nproc-per-node 2 --set gpusPerNode=0"):
        script_job(TypedProgram(["a.py"]), {"a": None}, None, None)
