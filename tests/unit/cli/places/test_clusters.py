"""How a cluster file is found by its name, and listed."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from lockstep.api.errors import ConfigError
from lockstep.cli.clusters.clusters import list_clusters
from lockstep.cli.main import app
from lockstep.cli.shared.clusterfiles import cluster_names, load_cluster
from lockstep.cli.shared.jobargs import TargetOptions


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """clusters/ of the folder where one stands; there are no others but `local`."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "clusters"
    folder.mkdir()
    for name in ("one", "two"):
        (folder / f"{name}.yaml").write_text(f"cluster: {{name: {name}, namespace: n-{name}}}\n")
    (folder / "template.yaml").write_text("cluster: {name: my-cluster, namespace: n}\n")
    return folder


def test_a_cluster_is_found_by_name_and_by_path(folder: Path) -> None:
    assert load_cluster("one").profile == load_cluster(str(folder / "one.yaml")).profile


def test_one_of_the_configuration_has_its_name_in_every_folder_and_one_of_this_folder_goes_first(folder: Path) -> None:
    configured = folder.parent / "config/lockstep/clusters"
    configured.mkdir(parents=True)
    for name in ("one", "three"):
        (configured / f"{name}.yaml").write_text(f"cluster: {{name: {name}, namespace: configured}}\n")
    assert [load_cluster(name).cluster.namespace for name in ("one", "three")] == ["n-one", "configured"]
    assert cluster_names() == ["local", "one", "three", "two"]


def test_an_unknown_name_is_answered_with_the_known_ones(folder: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"^there is no cluster onne in clusters/ or config/lockstep/clusters/: there is local, one, two; did you mean one\?",
    ):
        load_cluster("onne")


def test_the_name_of_a_job_where_a_cluster_is_asked_for_is_answered_with_the_job_s_verb(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", "/nowhere")
    done = CliRunner().invoke(app, ["cluster", "status", "demo"])
    assert "there is no cluster demo in" in str(done.exception) and str(done.exception).endswith("; for a job: lockstep get demo")


def test_an_unknown_name_like_no_other_says_how_to_begin(folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_cluster("mine")
    assert str(caught.value).endswith("there is local, one, two; lockstep init cluster mine begins one")
    Path("mine").mkdir()
    with pytest.raises(ConfigError, match=r"\./mine names the folder of this machine$"):
        load_cluster("mine")


def test_a_name_inside_that_is_not_the_files_is_refused(folder: Path) -> None:
    (folder / "copy.yaml").write_text((folder / "one.yaml").read_text())
    with pytest.raises(ConfigError, match=r"^clusters/copy.yaml: cluster.name is one; it must be the file's name, copy"):
        load_cluster("copy")


def test_mistakes_are_told_with_the_path_as_one_would_type_it(folder: Path) -> None:
    (folder / "bad.yaml").write_text("cluster: {name: bad}\n")
    with pytest.raises(ConfigError, match=r"^clusters/bad\.yaml:1: "):
        load_cluster("bad")


@pytest.mark.parametrize(
    ("content", "message"), [(None, "can't be read: No such file or directory"), (b"\xff", "is not UTF-8 text (byte 0)")]
)
def test_a_path_that_cannot_be_read_is_told(folder: Path, content: bytes | None, message: str) -> None:
    path = folder / "odd.yml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_cluster(str(path))
    assert str(caught.value) == f"{path}: {message}"


def test_the_list_has_a_line_for_every_cluster_but_the_template(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    list_clusters(TargetOptions())
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines.pop(1)[:2] == ["local", "Kubernetes"], "it ships, and needs no file"
    assert lines == [
        ["NAME", "PLATFORM", "NODES", "GPUS", "FABRIC", "STORAGE", "NAMESPACE", "DESCRIPTION"],
        ["one", "OpenShift", "any", "none", "TCP", "rwx", "n-one"],
        ["two", "OpenShift", "any", "none", "TCP", "rwx", "n-two"],
    ]


def test_a_file_with_mistakes_does_not_hide_the_others(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "bad.yaml").write_text("cluster: {name: bad}\n")
    with pytest.raises(ConfigError, match=r"bad.yaml:1: cluster.namespace: is required"):
        list_clusters(TargetOptions())
    out = capsys.readouterr().out
    assert "bad" in out and "n-one" in out and "n-two" in out


def test_the_list_names_the_gpus(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "big.yaml").write_text("cluster: {name: big, namespace: n}\ngpus: {per_node: 4, type: NVIDIA H100}\n")
    list_clusters(TargetOptions())
    assert "4 x NVIDIA H100" in capsys.readouterr().out
