"""Verbs on a cluster of hosts: each works there, or says in one sentence what to use instead; none asks the kubeconfig's cluster."""

from __future__ import annotations

import asyncio
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from lockstep.api.errors import ConfigError
from lockstep.api.files.clusterfile import parse_cluster_file
from lockstep.api.objects import Typed
from lockstep.cli import main as entry
from lockstep.cli.clusters.clusters import list_clusters
from lockstep.cli.shared.clusterfiles import Peeked, load_cluster, peek
from lockstep.cli.shared.inputs import read_inputs
from lockstep.cli.shared.jobargs import TargetOptions, known_names
from lockstep.cli.shared.places import Verb
from lockstep.plan.hosts.status import seen_jobs
from lockstep.plan.translate.hosts import RDMA_OFF
from lockstep.platforms.hosts.backend import HostsBackend, HostsJob
from lockstep.platforms.hosts.sync import send_project
from lockstep.platforms.places.backends import HOSTS
from lockstep.platforms.places.orders import LACKS, HostOptions, Order
from support.api_stub import ApiStub, served
from unit.cli.test_every_verb import VERBS
from unit.plan.hosts.test_status import ACTIVE, LEADING, host

WORKING = frozenset({
    "validate", "render", "plan", "preflight", "run", "launch", "bench scaling", "logs", "top", "get", "describe", "why",
    "stacks", "wait", "resume", "stop", "retry", "sync", "cp", "generate", "chat",
    "shell", "jupyter", "tensorboard", "vscode", "debug", "delete",
    "checkpoint", "drill", "adapter get", "model get", "cluster lint", "cluster calibrate", "doctor",
    "hosts setup", "adapter merge", "adapter push",
})  # fmt: skip
"""Verbs about a job, its files or its network, which work on hosts, too."""
WITHOUT_CLUSTER = frozenset({
    "quickstart", "init cluster", "init hosts", "init job", "init script", "join", "adapter export", "cluster list",
    "use", "help", "devcluster up", "devcluster down", "devcluster status",
})  # fmt: skip
"""Verbs that take no cluster, or make one of their own."""

LAB = "cluster: {name: lab, platform: hosts, description: Two machines}\nhosts: [{name: lab0, address: 10.0.0.1, gpus: 2}, {name: lab1}]\n"
JOB = "apiVersion: lockstep.dev/v1alpha1\nkind: TrainingJob\nmetadata: {name: x}\nspec: {cluster: lab, script: {path: a.py}}\n"


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    path = tmp_path / "lab.yaml"
    path.write_text(LAB)
    (tmp_path / "job.yaml").write_text(JOB)
    return path


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An API server that the kubeconfig leads to, and that no verb may ask about hosts."""
    server = ApiStub()
    with served(server, tmp_path) as config:
        monkeypatch.setenv("KUBECONFIG", str(config))
        yield server


def run(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(entry.app, list(words))
    explained = None if done.exception is None else entry.explanation(done.exception)
    return (done.exit_code, done.output) if explained is None else (explained[0], explained[1])


REFUSED = {verb: LACKS[verb][HOSTS] for verb in VERBS if HOSTS in LACKS.get(verb, {})}


def test_every_verb_works_on_hosts_or_says_what_to_use_instead_or_takes_no_cluster() -> None:
    groups = [set(REFUSED), set(WORKING), set(WITHOUT_CLUSTER)]
    assert set.union(*groups) == set(VERBS)
    assert sum(map(len, groups)) == len(VERBS), "a verb is in two of them"


@pytest.mark.parametrize("verb", sorted(REFUSED))
def test_a_verb_about_kubernetes_is_refused_in_one_sentence(verb: str, lab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if verb == "cluster discover":  # (which is told a name alone)
        monkeypatch.chdir(lab.parent)
        (lab.parent / "clusters").symlink_to(lab.parent)
    message = REFUSED[verb].format(name="lab" if verb == "cluster discover" else lab)
    given = [*verb.split(), *_needed(verb, lab)]
    assert run(*given) == (2, f"lockstep {verb} is about Kubernetes, and lab is a cluster of hosts: {message}")


def test_a_path_with_a_space_is_one_word_of_each_command_to_type(lab: Path) -> None:
    spaced = lab.rename(lab.with_name("my lab.yaml"))
    code, words = run("cluster", "status", str(spaced))
    assert code == 2 and words.endswith(f"lockstep get --cluster '{spaced}' lists its jobs")
    backend = HostsBackend(load_cluster(str(spaced)), str(spaced))
    assert backend.words.again == backend.fleet().again == f"--cluster '{spaced}'"
    assert f"lockstep hosts setup '{spaced}' " in run("cluster", "lint", str(spaced))[1]


def _needed(verb: str, lab: Path) -> list[str]:
    """The least that the verb can be typed with, its cluster the one of hosts."""
    if verb == "cluster discover":
        return ["lab"]
    values = {
        "cluster": str(lab),
        "file": str(lab.parent / "job.yaml"),
        "job": "x",
        "jobs": "x",
        "goal": "2",
        "fault": "kill-rank",
        "image": "operator",
    }
    is_argument = any(parameter.name == "cluster" for parameter in VERBS[verb].params)
    given = ["--cluster", str(lab)] if "cluster" in VERBS[verb].takes and not is_argument else []
    for parameter in VERBS[verb].params:
        is_option = parameter.opts[0].startswith("-")
        if parameter.name == "cluster" or parameter.required:
            given += [*([parameter.opts[-1]] if is_option else []), values[str(parameter.name)]]
    more = {"build": ["--openshift"]}
    return [*given, *more.get(verb, []), *(["--yes"] if "yes" in {p.name for p in VERBS[verb].params} else [])]


ABOUT_A_JOB = {
    **dict.fromkeys(("shell", "jupyter", "tensorboard", "vscode", "adapter get", "checkpoint"), ("x",)),
    **dict.fromkeys(("describe", "why", "logs", "stacks", "wait", "resume", "stop", "retry"), ("x",)),
    "top": ("x", "--once"), "delete": ("x", "--yes"), "debug": ("x", "train.py"), "generate": ("x", "Once"), "chat": ("x",),
    "adapter merge": ("x", "-o", "model"), "adapter push": ("x", "org/name", "--yes"), "model get": ("org/x", "--job", "x"),
    "cp": ("x:/workspace/a", "a"), "sync": ("x", "."), "get": ("x",), "drill": ("kill-rank", "--job", "x"),
}  # fmt: skip
OF_A_FILE = ("preflight", "run", "bench scaling", "plan", "cluster calibrate")
"""Those that measure or start something, or look at the hosts for it."""


def test_the_tables_have_every_verb_that_works_on_hosts() -> None:
    assert WORKING - {*ABOUT_A_JOB, *OF_A_FILE} == {
        "validate",
        "render",
        "launch",
        "cluster lint",
        "doctor",
        "hosts setup",
    }


@pytest.mark.parametrize("verb", [*ABOUT_A_JOB, *OF_A_FILE])
def test_a_verb_about_a_job_asks_its_hosts_and_no_api_server(verb: str, lab: Path, stub: ApiStub) -> None:
    lab.write_text(
        "cluster: {name: lab, platform: hosts}\ndefaults: {port: 1}\nhosts: [{name: lab0, address: 127.0.0.1}, {name: lab1, address:"
        " 127.0.0.2}]\n"
    )
    (lab.parent / "job.yaml").write_text(
        JOB.replace("script: {path: a.py}", "training: {model: {name: org/m}, data: {path: /datasets/a.jsonl}}")
    )
    code, output = run(
        *verb.split(),
        *ABOUT_A_JOB.get(verb, ()),
        *_file_of(verb, lab),
        *((str(lab),) if verb.startswith("cluster") else ("--cluster", str(lab))),
    )
    assert stub.asked == [] and "is a cluster of hosts" not in output, output
    assert verb == "plan" or (code != 0 and "host lab0 can't be reached" in output), output


def _file_of(verb: str, lab: Path) -> tuple[str, ...]:
    return ("-f", str(lab.parent / "job.yaml")) if verb in OF_A_FILE and not verb.startswith("cluster") else ()


@pytest.mark.parametrize(
    ("verb", "stopped", "says"),
    [
        ("delete", False, "job x saves and stops first; lockstep stop x --cluster {lab} --now ends it without a save"),
        ("resume", True, "job x still saves and stops; then it goes on"),
    ],
)
def test_a_verb_that_waits_for_a_save_says_so(
    verb: str, stopped: bool, says: str, lab: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def done(*_: Any, **__: Any) -> None:
        """Do nothing."""

    monkeypatch.setattr("lockstep.platforms.hosts.start.remove", done)
    monkeypatch.setattr("lockstep.platforms.hosts.start.start_again", done)
    monkeypatch.setattr("lockstep.platforms.hosts.backend.HostsJob._until_ended", done)
    job = replace(ACTIVE, stopped=stopped)
    seen = seen_jobs({name: host(name, job) for name in ("lab0", "lab1")}, {})["x"]
    getattr(HostsJob(HostsBackend(load_cluster(str(lab)), str(lab)), seen), verb)()
    assert says.format(lab=lab) in capsys.readouterr().err


def order_of(lab: Path) -> Order:
    """Return an order of the job beside this cluster file, which doesn't wait for its end."""
    inputs = read_inputs(lab.parent / "job.yaml", TargetOptions(str(lab)))
    return Order(inputs.job, inputs.cluster, Typed("job.yaml"), detach=True)


def test_a_start_that_is_interrupted_says_how_to_see_whether_the_job_runs(
    lab: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lockstep.platforms.hosts.start.start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        HostsBackend(load_cluster(str(lab)), str(lab)).run(order_of(lab))
    assert f"interrupted while job x was being started: lockstep get --cluster {lab} shows whether it runs" in capsys.readouterr().err


def test_node_zero_s_host_waits_a_second_for_the_ranks_of_a_start_each_time_it_is_asked(lab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async def start(*_: Any, patience: float) -> Any:
        waits.append(patience)
        return seen_jobs({name: host(name, ACTIVE) for name in ("lab0", "lab1")}, {})["x"]

    async def look_for(fleet: Any, job: str, hosts: Any, patience: float, **_: Any) -> Any:
        waits.append(patience)
        return {"lab0": host("lab0", LEADING), "lab1": host("lab1", ACTIVE)}, {}

    monkeypatch.setattr("lockstep.platforms.hosts.start.start", start)
    monkeypatch.setattr("lockstep.platforms.hosts.fleet.Fleet.look_for", look_for)
    assert HostsBackend(load_cluster(str(lab)), str(lab)).run(order_of(lab)) == 0
    assert waits == [1.0, 1.0]


@pytest.mark.parametrize(
    ("words", "late_seconds"),
    [(("get", "x"), 12.0), (("describe", "x"), 12.0), (("why", "x"), 12.0), (("top", "x"), 12.0), (("stop", "x"), 12.0),
        (("resume", "x"), None)],
    ids=lambda one: one[0] if isinstance(one, tuple) else "",
)  # fmt: skip
def test_a_verb_that_shows_or_stops_a_job_soon_does_without_a_host_that_is_off(
    words: tuple[str, ...], late_seconds: float | None, lab: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float | None] = []

    async def look(*_: Any, late_seconds: float | None = None, **__: Any) -> Any:
        waits.append(late_seconds)
        return {}, {}

    monkeypatch.setattr("lockstep.platforms.hosts.fleet.Fleet.look", look)
    assert run(*words, "--cluster", str(lab))[0] == 2, "it has no such job"
    assert set(waits) == {late_seconds}


def test_a_job_that_is_looked_at_again_has_the_limit_of_its_verb(lab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float | None] = []
    answers = {name: host(name, ACTIVE) for name in ("lab0", "lab1")}

    async def look_for(*_: Any, late_seconds: float | None) -> Any:
        waits.append(late_seconds)
        return answers, {}

    monkeypatch.setattr("lockstep.platforms.hosts.fleet.Fleet.look_for", look_for)
    backend = HostsBackend(load_cluster(str(lab)), str(lab))
    job = HostsJob(backend, seen_jobs(answers, {})["x"])
    job.look_again()
    backend.hurried = True
    job.look_again()
    assert waits == [None, 12.0]


def test_a_verb_about_hosts_reaches_no_kubernetes_and_another_one_does(lab: Path) -> None:
    verb = Verb()
    assert TargetOptions(str(lab), verb=verb).chosen_namespace() == "hosts"
    with pytest.raises(ConfigError, match="lab is a cluster of hosts"):
        verb.connections.kubeconfig()
    with pytest.raises(ConfigError, match="lab is a cluster of hosts"):
        verb.connections.aim.check("https://127.0.0.1:1", None)
    Verb().connections.kubeconfig()


def test_a_shell_completes_no_job_of_the_kubeconfig_s_cluster(lab: Path, stub: ApiStub) -> None:
    context = typer.Context(typer.main.get_command(entry.app))
    Verb.of(context).places["cluster"] = str(lab)
    assert (known_names(context, ""), stub.asked) == ([], [])


def test_a_short_look_finds_hosts(lab: Path) -> None:
    assert peek(str(lab)) == Peeked("lab", "hosts", None, True)


def test_the_list_shows_hosts(lab: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (lab.parent / "clusters").mkdir()
    for name in (lab.name, "template-hosts.yaml"):
        (lab.parent / "clusters" / name).write_text(LAB)
    monkeypatch.chdir(lab.parent)
    list_clusters(TargetOptions())
    row = next(line for line in capsys.readouterr().out.splitlines() if " lab " in line)
    assert row.split() == ["lab", "hosts", "2", "2,", "all", "TCP", "per", "host", "Two", "machines"]


def test_a_job_is_checked_against_hosts(lab: Path) -> None:
    job = lab.parent / "job.yaml"
    assert run("validate", str(job), "--cluster", str(lab)) == (0, "ok\n")
    job.write_text(JOB.replace("script:", "image: x, script:"))
    code, output = run("validate", str(job), "--cluster", str(lab))
    assert (code, output) == (0, "warning: NoImageOnHosts: spec.image has no effect on lab: hosts run no image\nok\n")


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ("nodes: 3", "the job has 3 nodes with 2 GPUs, and 2 hosts of lab may take one (GPUs: lab0 2, lab1 4): use fewer nodes or GPUs"),
        (
            "nodes: 2, gpusPerNode: 4",
            "the job has 2 nodes with 4 GPUs, and 1 of 2 hosts of lab may take one (GPUs: lab0 2, lab1 4): use fewer nodes or GPUs",
        ),
        ("nodes: 3, gpusPerNode: 0", "the job has 3 nodes, and 2 hosts of lab may take one: use fewer nodes or GPUs"),
        ("nodes: 1, gpusPerNode: 4", None),
        ("nodes: 2, gpusPerNode: 2", None),
    ],
)
def test_a_job_that_needs_more_than_the_hosts_offer_is_refused(size: str, message: str | None, lab: Path) -> None:
    lab.write_text("cluster: {name: lab, platform: hosts}\nhosts: [{name: lab0, gpus: 2}, {name: lab1, gpus: 4}]\n")
    job = lab.parent / "job.yaml"
    job.write_text(JOB.replace("script:", f"{size}, script:"))
    assert run("validate", str(job), "--cluster", str(lab)) == ((0, "ok\n") if message is None else (2, message))


def test_a_job_on_hosts_has_settings_and_no_objects(lab: Path) -> None:
    job = str(lab.parent / "job.yaml")
    code, output = run("render", job, "--cluster", str(lab))
    assert (code, output.startswith("lab is a cluster of hosts, where a job becomes no objects: --explain")) == (2, True)
    assert "storage.mode" in run("render", job, "--cluster", str(lab), "--explain")[1]


LINTED = {
    "hosts: [{name: a}, {name: b}]": "failed   {path}:2: hosts: no host states its address",
    "hosts: [{name: a, address: 8.8.8.8}, {name: b}]": "warning  {path}:2: hosts[0].address: 8.8.8.8 is a public address",
    "hosts: [{name: a, gpus: 2}, {name: b, gpus: [0], address: 10.0.0.1}]": (
        "warning  {path}:2: hosts: the hosts offer 2, 1 GPUs: a job takes as many on each, 1 if it doesn't say"
    ),
    "hosts: [{name: a}]\nnetwork: {tcp: {interface_exclude: ^docker0}}": "warning  {path}:3: network.tcp.interface_exclude",
    "hosts: [{name: a}]\nnetwork: {rdma: {enabled: true, gid_index: 2}}": "warning  {path}:3: network.rdma.gid_index",
}


@pytest.mark.parametrize("text", LINTED)
def test_a_file_of_hosts_is_checked_alone(text: str, lab: Path, stub: ApiStub) -> None:
    lab.write_text(f"cluster: {{name: lab, platform: hosts}}\n{text}\n")
    code, output = run("cluster", "lint", str(lab))
    expected = LINTED[text].format(path=lab)
    assert any(line.startswith(expected) for line in output.splitlines()), output
    assert code == expected.startswith("failed")
    assert "rails" not in output and "image" not in output and stub.asked == []
    assert f"lockstep doctor {lab} looks at the hosts" in output


def test_the_template_of_hosts_has_every_key_and_nothing_to_mend() -> None:
    from lockstep.api.files.clusterkeys import ON_HOSTS
    from support.checkout import ROOT

    path = ROOT / "clusters/template-hosts.yaml"
    names = {part.removesuffix("[]") for key in ON_HOSTS.keys for part in key.split(".")}
    assert [name for name in sorted(names) if f"{name}:" not in path.read_text()] == []
    assert run("cluster", "lint", str(path), "--offline")[0] == 0


def test_init_writes_hosts_as_they_are_typed(tmp_path: Path) -> None:
    path = tmp_path / "lab.yaml"
    words = ("lab0", "bob@10.0.0.2:8", "-o", str(path))
    assert run("init", "hosts", "lab", *words) == (
        0,
        f"Wrote {path}\nNext: read it, then lockstep hosts setup {path}\n",
    )
    hosts = load_cluster(str(path)).hosts
    assert [(one.name, one.user, one.gpus) for one in hosts.hosts] == [("lab0", None, None), ("10.0.0.2", "bob", 8)]
    assert run("init", "hosts", "lab", "lab0", "-o", str(path)) == (2, f"{path} already exists: name another file with -o")


def test_init_comments_out_all_but_names_and_an_address_where_no_host_is_named(tmp_path: Path) -> None:
    import yaml

    from lockstep.api.files.clusterkeys import ON_HOSTS
    from support.checkout import ROOT

    path = tmp_path / "home.yaml"
    code, output = run("init", "hosts", "home", "-o", str(path))
    assert (code, output.splitlines()[1:]) == (0, [f"Next: edit it, then lockstep hosts setup {path}"])
    text = path.read_text()
    assert yaml.safe_load(text) == {
        "cluster": {"name": "home", "platform": "hosts"},
        "hosts": [{"name": "lab0", "address": "192.168.1.100"}, {"name": "lab1"}, {"name": "lab2"}],
    }
    assert load_cluster(str(path)).cluster.name == "home"
    names = {part.removesuffix("[]") for key in ON_HOSTS.keys for part in key.split(".")}
    assert [name for name in sorted(names) if f"{name}:" not in text] == []
    without_marks = "\n".join(line.replace("# ", "", 1) if re.match(r" {4}# [a-z_ -]", line) else line for line in text.splitlines())
    template = yaml.safe_load((ROOT / "clusters/template-hosts.yaml").read_text())["hosts"][0]
    assert yaml.safe_load(without_marks)["hosts"][0] == {**template, "host_key": "ssh-ed25519 AAAA…"}


def test_a_hostfile_becomes_the_file_and_lists_what_it_does_not_have(tmp_path: Path) -> None:
    (tmp_path / "hostfile").write_text("lab0 slots=2\nlab1 slots=4 max_slots=8\nlab2\n")
    path = tmp_path / "out.yaml"
    code, output = run("init", "hosts", "lab", "--from", str(tmp_path / "hostfile"), "lab1", "lab0", "-o", str(path))
    assert (code, output.splitlines()[2:]) == (
        0,
        [
            f"network.rdma.enabled: {RDMA_OFF}",
            "It doesn't have:",
            f"  {tmp_path}/hostfile:2: max_slots=8: a job never starts more ranks than it has GPUs or states in ranksPerNode",
        ],
    )
    file = parse_cluster_file(path.read_text(), "lab.yaml")
    assert file.hosts is not None and file.hosts.names == ["lab1", "lab0"]


def test_what_a_file_can_not_become_is_said_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "hostfile").write_text("10.0.0.7\nlab1 slots=2\n127.0.0.1\n")
    code, output = run("init", "hosts", "lab", "--from", str(tmp_path / "hostfile"), "-o", str(tmp_path / "x.yaml"))
    assert (code, output.partition(":")[0]) == (2, f"{tmp_path / 'hostfile'} as a cluster file"), "and no line of a file that is not there"
    assert ": hosts: the address of 127.0.0.1 is the loopback" in output and not (tmp_path / "x.yaml").exists()


@pytest.mark.parametrize("name", ["Not_A_Name", "a/b"])
def test_a_name_that_can_not_be_leaves_no_file(name: str, tmp_path: Path) -> None:
    (tmp_path / "hostfile").write_text("lab0\n")
    assert run("init", "hosts", name, "--from", str(tmp_path / "hostfile"), "-o", str(tmp_path / "x.yaml"))[0] == 2
    assert run("init", "hosts", name, "lab0", "-o", str(tmp_path / "x.yaml"))[0] == 2
    assert not (tmp_path / "x.yaml").exists()


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, str]]:
    """Collect what `run` starts on hosts: its inputs, and the cluster in the commands that it prints."""
    starts: list[tuple[Any, str]] = []

    def start(backend: HostsBackend, order: Order) -> int:
        starts.append((order, backend.given))
        return 0

    monkeypatch.setattr("lockstep.platforms.hosts.backend.run_on_hosts", start)
    monkeypatch.setenv("LOCKSTEP_STATE", str(tmp_path / "state"))
    return starts


def test_a_script_on_hosts_is_a_job_of_its_own(started: list[tuple[Any, str]], lab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (lab.parent / "hostfile").write_text("lab0 slots=4\nlab1 slots=2\nlab2 slots=2\n")
    monkeypatch.chdir(lab.parent)
    (lab.parent / "clusters").symlink_to(lab.parent)
    for words in (
        ("lab0,ada@lab1:8", "--nproc-per-node", "2", "--", "train.py", "--epochs", "3"), (str(lab.parent / "hostfile"), "train.py"),
        ("lab", "--nproc-per-node", "1", "--set", "metadata.name=y", "train.py"), (str(lab), "--nproc-per-node", "1", "train.py"),
    ):  # fmt: skip
        assert run("run", "--hosts", *words)[0] == 0
    jobs = [inputs.job for inputs, _ in started]
    assert [(job.spec.nodes, job.spec.gpus_per_node, job.spec.cluster) for job in jobs] == [
        (2, 2, None), (3, 2, None), (2, 1, "lab"), (2, 1, None),
    ]  # fmt: skip
    assert (jobs[0].spec.script.args, jobs[2].metadata.name) == (["--epochs", "3"], "y")


def test_hosts_as_they_are_typed_have_a_cluster_file_by_which_later_verbs_find_the_job(
    started: list[tuple[Any, str]], tmp_path: Path
) -> None:
    assert run("run", "--hosts", "lab0,ada@lab1:8", "--nproc-per-node", "2", "--", "train.py")[0] == 0
    (tmp_path / "hostfile").write_text("10.0.0.7 slots=2\nbob@10.0.0.8 slots=2\n")
    (tmp_path / "job.yaml").write_text(JOB.replace("cluster: lab, ", ""))
    assert run("run", "-f", str(tmp_path / "job.yaml"), "--hosts", str(tmp_path / "hostfile"))[0] == 0
    hosts = [[(host.name, host.address, host.user, host.gpus) for host in load_cluster(named).hosts.hosts] for _, named in started]  # type: ignore[union-attr]
    assert hosts == [
        [("lab0", None, None, None), ("lab1", None, "ada", 8)],
        [("10.0.0.7", "10.0.0.7", None, 2), ("10.0.0.8", "10.0.0.8", "bob", 2)],
    ]
    assert started[1][0].cluster.hosts.names == ["10.0.0.7", "10.0.0.8"]
    assert f"`lockstep hosts setup {started[0][1]}`" in Path(started[0][1]).read_text().replace("\n# ", " ")
    assert load_cluster(started[0][1]).cluster.name != load_cluster(started[1][1]).cluster.name, "what is remembered of them is kept apart"


def test_a_cluster_file_of_hosts_is_named_as_it_was(started: list[tuple[Any, str]], lab: Path) -> None:
    assert run("run", "-f", str(lab.parent / "job.yaml"), "--hosts", str(lab), "--nodes", "1")[0] == 0
    [(inputs, named)] = started
    assert (named, inputs.job.spec.nodes) == (str(lab), 1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("-f", "JOB", "--cluster", "LAB", "--hosts", "LAB"), "--cluster says where the job runs, and so does --hosts: use one of them"),
        (("-f", "JOB", "--cluster", "LAB", "-n", "x"), "they have no namespace and no kubeconfig, so leave out -n and --context"),
        (("--hosts", "LAB", "--context", "x", "--nproc-per-node", "1", "a.py"), "they have no namespace and no kubeconfig"),
    ],
)
def test_an_option_that_would_change_nothing_on_hosts_is_refused(
    words: tuple[str, ...], message: str, started: list[tuple[Any, str]], lab: Path
) -> None:
    places = {"JOB": str(lab.parent / "job.yaml"), "LAB": str(lab)}
    code, output = run("run", *(places.get(word, word) for word in words))
    assert (code, message in output, started) == (2, True, [])


def test_what_hosts_can_not_be_is_refused(lab: Path) -> None:
    kubernetes = lab.parent / "kubernetes.yaml"
    kubernetes.write_text("cluster: {name: kubernetes, namespace: n}\n")
    for words, message in {
        (
            "--hosts",
            str(kubernetes),
            "a.py",
        ): f"{kubernetes} describes a Kubernetes cluster, and no hosts: name it by --cluster",
        ("--hosts", "a,b c", "--nproc-per-node", "1", "a.py"): "'b c' is no host: write NAME, USER@NAME, or NAME:8",
        ("--hosts", "a,,b", "--nproc-per-node", "1", "a.py"): "'' is no host: write NAME, USER@NAME, or NAME:8",
        (
            "--hosts",
            str(lab.parent / "nothing.yaml"),
            "a.py",
        ): f"{lab.parent / 'nothing.yaml'}: can't be read: No such file or directory",
        ("--hosts", "a", "--job", "x", "a.py"): "--job can't be combined with --hosts",
        ("--nproc-per-node", "1", "a.py"): "--nproc-per-node is for a program behind --",
    }.items():
        code, output = run("run", *words)
        assert (code, output.startswith(message)) == (2, True), output


def test_all_that_one_command_asks_the_hosts_goes_over_the_same_connections(lab: Path) -> None:
    backend = HostsBackend(parse_cluster_file(LAB, str(lab)), str(lab))
    assert backend.fleet() is backend.fleet()


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a program, in which commands are typed."""
    folder = tmp_path / "nano GPT"
    (folder / "scripts").mkdir(parents=True)
    for name in ("train.py", "run.sh", "scripts/base.py"):
        (folder / name).touch()
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize(
    ("words", "script"),
    [
        (("train.py", "-x"), {"folder": "/workspace/sent", "path": "train.py", "args": ["-x"]}),
        (("-m", "scripts.base"), {"folder": "/workspace/sent", "module": "scripts.base"}),
        (("bash", "run.sh"), {"folder": "/workspace/sent", "command": ["bash", "run.sh"]}),
        (("other.py",), {"path": "other.py"}),
        (("/srv/train.py",), {"path": "/srv/train.py"}),
    ],
)
def test_the_folder_of_a_program_that_is_typed_on_hosts_is_sent_and_ranks_work_there(
    words: tuple[str, ...],
    script: dict[str, Any],
    started: list[tuple[Any, str]],
    lab: Path,
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[tuple[Any, ...]] = []

    async def send(fleet: object, *words: Any) -> str:
        sent.append(words)
        return "/workspace/sent"

    monkeypatch.setattr("lockstep.cli.jobs.typed.send_project", send)
    assert run("run", "--hosts", str(lab), "--nproc-per-node", "1", "--first", "lab1", "--", *words)[0] == 0
    [(inputs, _)] = started
    assert inputs.job.spec.script.model_dump(exclude_defaults=True, by_alias=True) == script
    assert [each[0] for each in sent] == ([project] if "folder" in script else [])


@pytest.mark.parametrize("folder", [Path.home(), Path("/")])
def test_a_home_folder_is_not_sent_to_hosts(folder: Path, lab: Path) -> None:
    with pytest.raises(ConfigError, match=f"{folder} would be sent to all hosts"):
        asyncio.run(send_project(HostsBackend(parse_cluster_file(LAB, str(lab)), str(lab)).fleet(), folder, "x", 2, HostOptions()))


def test_a_program_that_is_typed_for_this_machine_runs_where_it_is(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[Any] = []
    monkeypatch.setattr("lockstep.platforms.local.run.run_local", lambda order, root, earlier: jobs.append(order.job) or 0)
    monkeypatch.setattr("lockstep.cli.jobs.typed.gpu_devices", lambda: 0)
    assert run("run", "--local", "--", "train.py", "-x")[0] == 0
    assert run("run", "--local", "--nodes", "2", "--nproc-per-node", "3", "--set", "metadata.name=y", "--", "-m", "scripts.base")[0] == 0
    monkeypatch.setattr("lockstep.cli.jobs.typed.gpu_devices", lambda: 4)
    assert run("run", "--local", "--nodes", "2", "--", "bash", "run.sh")[0] == 0
    specs = [(job.metadata.name, job.spec.nodes, job.spec.gpus_per_node, job.spec.ranks_per_node) for job in jobs]
    assert specs == [("train", 1, 0, 1), ("y", 2, 0, 3), ("run", 2, 2, None)]
    assert {job.spec.script.folder for job in jobs} == {str(project)}
    code, text = run("run", "--local", "--detach", "--", "train.py")
    assert code == 2 and text.startswith("--detach can't be combined with --local -- PROGRAM")


def test_a_script_that_lies_beside_its_job_is_named_with_the_line_that_runs_it(project: Path) -> None:
    (project / "job.yaml").write_text(JOB.replace("cluster: lab, ", "").replace("a.py", "train.py"))
    code, text = run("run", "-f", "job.yaml", "--local")
    assert code == 2 and f"there is no file {project}/.lockstep/workspace/workspace/train.py (train.py of the job)" in text
    assert "name by --cluster the folder that contains workspace/ and datasets/" in text
    assert f"to run it there, add --set {shlex.quote(f'script.folder={project}')}, or script.folder to the job" in text
