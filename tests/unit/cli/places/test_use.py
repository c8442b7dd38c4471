"""Where cluster files and state lie, and which cluster counts where no option names one."""

from __future__ import annotations

import os
import resource
import stat
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from lockstep.plan.cluster.choice import By, choices
from support.in_process import Told, lockstep

Typed = Callable[..., Told]
LOCKSTEP = (sys.executable, "-m", "lockstep.cli.main")
CLUSTER = "cluster: {{name: {name}, namespace: team, platform: kubernetes}}\n"


@pytest.fixture
def surroundings(tmp_path: Path) -> dict[str, str]:
    """Variables of a person with a home folder of their own, who has a project with a cluster file, and none of Lockstep's variables."""
    (tmp_path / "home").mkdir()
    (tmp_path / "project/clusters").mkdir(parents=True)
    (tmp_path / "project/clusters/lab.yaml").write_text(CLUSTER.format(name="lab"))
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("LOCKSTEP_", "XDG_", "KUBE"))}
    return {**kept, "HOME": str(tmp_path / "home")}


@pytest.fixture
def person(tmp_path: Path, surroundings: dict[str, str]) -> Typed:
    """Types a command in a folder of that person's."""

    def typed(*words: str, here: str = "project", **environment: str) -> Told:
        with pytest.MonkeyPatch.context() as patch:
            for name in os.environ.keys() - surroundings.keys():
                patch.delenv(name)
            for name, value in (surroundings | environment).items():
                patch.setenv(name, value)
            patch.chdir(tmp_path / here)
            return lockstep(*words)

    return typed


def make_checkout(folder: Path) -> None:
    """Make what tells a checkout from any other folder."""
    for mark in ("clusters", "manifests/crds", "operator/lockstep"):
        (folder / mark).mkdir(parents=True)
    (folder / "clusters/theirs.yaml").write_text(CLUSTER.format(name="theirs"))


@pytest.mark.parametrize("stated", [*product((None, "a"), (None, "b"), (None, "c"), (None, "d"))])
def test_the_first_that_names_a_cluster_counts(stated: tuple[str | None, ...]) -> None:
    found = choices(*stated)
    assert [(one.cluster, one.by) for one in found] == [(name, by) for name, by in zip(stated, By, strict=True) if name]
    assert all(one.is_typed == (one.cluster in "ab") for one in found)


def test_nothing_is_chosen_at_first(person: Typed) -> None:
    assert person("use").stdout.startswith("nothing names a cluster: ")


def test_a_cluster_that_was_chosen_counts_in_every_folder(person: Typed, tmp_path: Path) -> None:
    chosen = person("use", "lab")
    path = tmp_path / "project/clusters/lab.yaml"
    assert (chosen.returncode, chosen.stdout) == (0, f"{path} (lockstep use)\n")
    assert person("use", here="home").stdout == chosen.stdout
    state = tmp_path / "home/.local/state/lockstep"
    assert stat.S_IMODE(state.stat().st_mode) == 0o700 and [item.name for item in state.iterdir()] == ["cluster"]
    assert person("use", "lab", XDG_STATE_HOME=str(tmp_path / "elsewhere")).returncode == 0
    assert (tmp_path / "elsewhere/lockstep/cluster").is_file()


def test_no_other_folder_s_file_is_taken_for_the_one_that_was_chosen(person: Typed, tmp_path: Path) -> None:
    configured = tmp_path / "home/.config/lockstep/clusters"
    configured.mkdir(parents=True)
    (configured / "work.yaml").write_text(CLUSTER.format(name="work"))
    (tmp_path / "project/clusters/work.yaml").write_text(CLUSTER.format(name="work"))
    assert person("use", "work", here="home").stdout == f"{configured}/work.yaml (lockstep use)\n"
    assert person("use").stdout == f"{configured}/work.yaml (lockstep use)\n"
    assert person("use", "local").stdout == "local (lockstep use)\n"
    (tmp_path / "project/clusters/local.yaml").write_text(
        "cluster: {name: local, platform: hosts}\nnodes: {gpu_nodes: [{name: a, ssh: evil}]}\n"
    )
    assert (
        person("get").stderr
        == "lockstep: local is a cluster of hosts (platform: hosts in its file), and this needs a Kubernetes cluster: name one\n"
    )


def test_another_user_s_choice_does_not_count_in_their_folder(person: Typed, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file to another user")
    chosen = tmp_path / "project/.lockstep/cluster"
    chosen.parent.mkdir()
    chosen.write_text("lab\n")
    os.chown(chosen, 54321, 54321)
    said = person("use")
    assert (
        said.stdout.startswith("nothing names a cluster: ")
        and said.stderr == "note: .lockstep/cluster belongs to another user, so it doesn't count\n"
    )
    assert person("use", SUDO_UID="54321").stdout == "lab (.lockstep/cluster of this folder)\n"
    assert person("use", SUDO_UID="").stdout == said.stdout
    os.chown(tmp_path / "project/clusters", 54321, 54321)
    assert "lab" not in person("cluster", "list").stdout
    make_checkout(tmp_path / "theirs")
    for path in (tmp_path / "theirs").rglob("*"):
        os.chown(path, 54321, 54321)
    person("use", "local", here="theirs/operator")
    assert not (tmp_path / "theirs/.lockstep").exists() and (tmp_path / "home/.local/state/lockstep/cluster").is_file()


def test_the_environment_and_the_folder_count_before_it(person: Typed, tmp_path: Path) -> None:
    person("use", "local")
    (tmp_path / "project/.lockstep").mkdir()
    (tmp_path / "project/.lockstep/cluster").write_text("lab\n")
    assert person("use").stdout == "lab (.lockstep/cluster of this folder)\nnot local (lockstep use)\n"
    said = person("use", LOCKSTEP_CLUSTER="clusters/lab.yaml").stdout.splitlines()
    assert said[0] == "clusters/lab.yaml ($LOCKSTEP_CLUSTER)" and len(said) == 3
    assert person("use", here="home").stdout == "local (lockstep use)\n"


def test_in_a_checkout_files_and_state_are_the_checkout_s(person: Typed, tmp_path: Path) -> None:
    make_checkout(tmp_path / "checkout")
    (tmp_path / "checkout/docs").mkdir()
    assert person("use", "theirs", here="checkout/docs").stdout == "theirs (.lockstep/cluster of this folder)\n"
    assert (tmp_path / "checkout/.lockstep/cluster").read_text() == "theirs\n", "the Makefile reads it"
    assert person("init", "cluster", "mine", here="checkout/docs").returncode == 0
    assert (tmp_path / "checkout/clusters/mine.yaml").is_file() and not (tmp_path / "checkout/docs/clusters").exists()
    assert person("use").stdout.startswith("nothing names a cluster: "), "elsewhere"


def test_the_state_of_a_checkout_of_before_counts_and_one_of_before_reads_what_is_written_now(person: Typed, tmp_path: Path) -> None:
    make_checkout(tmp_path / "checkout")
    state = tmp_path / "checkout/.lockstep"
    (state / "servers").mkdir(parents=True)
    (state / "cluster").write_text("theirs\n")
    (state / "servers/theirs").write_text("https://api.example.com:6443\n")
    (tmp_path / "kubeconfig").write_text(
        "clusters: [{name: c, cluster: {server: 'https://127.0.0.1:1'}}]\ncontexts: [{name: c, context: {cluster:"
        " c}}]\ncurrent-context: c\n"
    )
    refused = person("get", here="checkout", KUBECONFIG=str(tmp_path / "kubeconfig"))
    assert refused.returncode == 2 and "cluster theirs was deployed to https://api.example.com:6443" in refused.stderr
    person("use", "local", here="checkout")
    assert (state / "cluster").read_text() == "local\n", "a name and a line's end, as before"


def test_one_that_is_gone_is_named_and_never_replaced(person: Typed, tmp_path: Path) -> None:
    person("use", "lab")
    (tmp_path / "project/clusters/lab.yaml").unlink()
    for words in (["get"], ["use"], ["delete", "x", "--yes"]):
        gone = person(*words)
        assert (
            gone.returncode == 2
            and "lab.yaml, which lockstep use names: name another by --cluster, or choose another by lockstep use CLUSTER" in gone.stderr
        ), words
    assert person("use", "local").returncode == 0


def test_a_workspace_of_this_machine_can_be_in_use(person: Typed, tmp_path: Path) -> None:
    (tmp_path / "project/space/workspace/runs").mkdir(parents=True)
    assert person("use", "./space").returncode == 0
    here = tmp_path / "project/space"
    assert person("get").stdout == f"there is no job in workspace {here}\n"
    stopped = person("stop", "x")
    assert stopped.returncode == 2 and stopped.stderr.startswith(f"lockstep: stop in workspace {here} (lockstep use)\n")
    (tmp_path / "project/job.yaml").write_text(
        "kind: TrainingJob\napiVersion: lockstep.dev/v1alpha1\nmetadata: {name: demo}\nspec: {script: {path: /a.py}}\n"
    )
    assert person("validate", "-f", "job.yaml").returncode == 0
    for words in (
        ["preflight", "-f", "job.yaml"],
        ["run", "-f", "job.yaml", "--in-namespace"],
        ["doctor"],
        ["cluster", "lint"],
    ):
        refused = person(*words)
        assert (
            refused.returncode == 2
            and f"{here} is a workspace of this machine, and this is about a cluster: name one by --cluster" in refused.stderr
        )
    assert f"there is no job demo in workspace {here}" in person("delete", "-f", "job.yaml", "--yes").stderr
    wrong = person("scale", "x", "2")
    assert (wrong.returncode, wrong.stderr) == (
        2, f"lockstep: {here} is a workspace of this machine, and this is about a cluster: name one by --cluster\n",
    )  # fmt: skip


@pytest.mark.parametrize("words", [["delete", "x", "--cluster", "local"], ["scale", "x", "2"]])
def test_what_changes_something_says_where(words: list[str], person: Typed, tmp_path: Path) -> None:
    person("use", "lab")
    (tmp_path / "kubeconfig").write_text(
        "clusters: [{name: c, cluster: {server: 'https://127.0.0.1:1'}}]\ncontexts: [{name: c, context: {cluster:"
        " c}}]\ncurrent-context: c\n"
    )
    said = person(*words, KUBECONFIG=str(tmp_path / "kubeconfig")).stderr.splitlines()
    where = "cluster local, namespace lockstep" if "--cluster" in words else "cluster lab, namespace team (lockstep use)"
    assert said[0] == f"lockstep: {words[0]} on {where}"
    assert not person("get", KUBECONFIG=str(tmp_path / "kubeconfig")).stderr.startswith("lockstep: get on")


def unwritable(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
    """Run a command that can't write a byte to any file, as on a full disk."""
    return subprocess.run(
        command,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)),
        capture_output=True,
        text=True,
        check=False,
        **options,
    )  # type: ignore[call-overload,no-any-return]


def test_on_a_full_disk_it_says_so_and_what_was_chosen_stays(person: Typed, surroundings: dict[str, str], tmp_path: Path) -> None:
    person("use", "local")
    env = {**surroundings, "PYTHONDONTWRITEBYTECODE": "1"}
    done = unwritable([*LOCKSTEP, "use", "lab"], cwd=tmp_path / "project", env=env)
    assert (
        done.returncode == 2
        and "/.local/state/lockstep/cluster can't be written (File too large): $LOCKSTEP_STATE names another folder" in done.stderr
    )
    assert person("use").stdout == "local (lockstep use)\n"
    assert [path.name for path in (tmp_path / "home/.local/state/lockstep").iterdir()] == ["cluster"]


def test_a_home_folder_that_is_no_folder_is_told(person: Typed, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = person("use", "lab", HOME=str(tmp_path / "file"))
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "can't be written (Not a directory)" in done.stderr
    assert person("get", HOME=str(tmp_path / "file")).returncode == 2


def test_a_user_without_a_home_is_told_which_variable_helps() -> None:
    program = (  # (as of a pod's random user id)
        "import pwd, sys; pwd.getpwuid = {}.__getitem__; from lockstep.cli.main import main; sys.exit(main())"
    )
    nameless, env = [sys.executable, "-c", program], {"PATH": os.environ["PATH"]}
    done = subprocess.run([*nameless, "use", "local"], cwd="/", env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (
        2, "lockstep: this user has no home folder: $XDG_STATE_HOME or $LOCKSTEP_STATE names the folder for what Lockstep remembers\n",
    )  # fmt: skip
    for words in (["use"], ["init", "job", "x", "-o", "-"]):
        assert subprocess.run([*nameless, *words], cwd="/", env=env, capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize(
    ("named", "why"),
    [
        ("./odd.yaml", "odd.yaml"),
        ("./clusters/", "is no workspace of this machine"),
        ("", "there is no cluster "),
        ("./nothing.yaml", "nothing.yaml"),
    ],
)
def test_what_is_no_cluster_is_not_remembered(named: str, why: str, person: Typed, tmp_path: Path) -> None:
    (tmp_path / "project/odd.yaml").write_text("[]\n")
    done = person("use", named)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1) and why in done.stderr
    assert not (tmp_path / "home/.local").exists()


def test_two_at_once_leave_one_of_both(surroundings: dict[str, str], tmp_path: Path) -> None:
    running = [subprocess.Popen([*LOCKSTEP, "use", name], cwd=tmp_path / "project", env=surroundings) for name in ["lab", "local"] * 2]
    assert [process.wait() for process in running] == [0] * 4
    assert (tmp_path / "home/.local/state/lockstep/cluster").read_text() in ("local\n", f"{tmp_path}/project/clusters/lab.yaml\n")
    assert [path.name for path in (tmp_path / "home/.local/state/lockstep").iterdir()] == ["cluster"]
