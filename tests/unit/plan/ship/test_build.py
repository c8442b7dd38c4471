"""`lockstep build`: the commands, what of this machine they may see, and how it fails. The build tools are played by a program that notes
its call.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lockstep import assets
from lockstep.api.errors import ConfigError, Failed
from lockstep.cli.clusters import build
from lockstep.cli.main import main
from lockstep.plan.ship.imagebuild import CONTEXTS, Build, Image, Tool, choose_tool, commands, tool_failure
from lockstep.platforms.clusters.imagebuild import KEPT_SECONDS, context, folder_of, lay_out, packed
from support.checkout import ROOT

RECORDER = """#!{python}
import json, os, sys
secrets = [part.partition("src=")[2] for part in sys.argv if part.startswith("id=")]
call = {{"argv": [os.path.basename(sys.argv[0]), *sys.argv[1:]], "cwd": os.getcwd(), "secrets": [open(path).read() for path in secrets]}}
with open({log!r}, "a") as log:
    log.write(json.dumps(call) + "\\n")
for option, digest in (("--iidfile", "sha256:12ab"), ("--digestfile", "sha256:34cd")):
    if option in sys.argv:
        with open(sys.argv[sys.argv.index(option) + 1], "w") as file:
            file.write(digest)
print({says!r}, file=sys.stderr, end="")
sys.exit({code})
"""


class Bench:
    """A PATH with the tools that a test puts there."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.log, self._monkeypatch, self._capsys = folder, folder / "calls", monkeypatch, capsys
        monkeypatch.setenv("PATH", str(folder))

    def has(self, tool: str, code: int = 0, says: str = "") -> None:
        program = self.folder / tool
        program.write_text(RECORDER.format(python=sys.executable, log=str(self.log), code=code, says=says))
        program.chmod(0o755)

    def run(self, *arguments: str) -> tuple[object, str, str]:
        self._monkeypatch.setattr("sys.argv", ["lockstep", "build", *arguments])
        try:
            code: object = main()
        except SystemExit as ended:
            code = ended.code or 0
        said = self._capsys.readouterr()
        return code, said.out, said.err

    @property
    def calls(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Bench:
    for name in [n for n in os.environ if n.startswith("PIP_") or n in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr("lockstep.cli.clusters.build.PIP_FILES", ())
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    return Bench(tmp_path, monkeypatch, capsys)


OPERATOR = Build(Image.OPERATOR, "0.1.0")


def _bytes(files: Mapping[str, Path]) -> dict[str, bytes]:
    return {name: path.read_bytes() for name, path in files.items()}


@pytest.mark.parametrize("image", [Image.OPERATOR, Image.TRAINER])
def test_an_installed_lockstep_builds_an_image_of_the_same_files_as_a_checkout(
    image: Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = context(image)
    assert {f"images/{image}/Containerfile", "images/install.py", "pyproject.toml", "workspace/lockstep_gang/__init__.py"} <= set(here)
    site = tmp_path / "site-packages"
    for name in assets.PACKAGES:
        shutil.copytree(assets.package(name), site / name)
    for name in CONTEXTS[image]:
        if Path(name).name not in assets.PACKAGES:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copyfile
            (site / "lockstep/assets" / name).parent.mkdir(parents=True, exist_ok=True)
            copy(ROOT / name, site / "lockstep/assets" / name)
    monkeypatch.setattr(assets, "PACKAGE", site / "lockstep")
    monkeypatch.setattr(assets, "_PACKED", site / "lockstep/assets")
    there = context(image)
    assert all(path.is_relative_to(site) for path in there.values())
    assert _bytes(there) == _bytes(here)
    with tarfile.open(fileobj=io.BytesIO(packed(there))) as archive:
        assert archive.getnames() == list(here)


def test_files_of_other_builds_and_drafts_are_kept_for_a_day(tmp_path: Path) -> None:
    source, contexts = tmp_path / "source", tmp_path / "contexts"
    for name in (".killed", ".draft", "old", *"12345"):
        (contexts / name).mkdir(parents=True)
    before = time.time() - KEPT_SECONDS
    for name in (".killed", "old"):
        os.utime(contexts / name, (before - 60, before - 60))
    os.utime(contexts / "1", (before + 60, before + 60))
    source.write_text("text")
    target = folder_of({"a/b": source}, contexts)
    lay_out({"a/b": source}, target)
    os.utime(target, (0, 0))
    lay_out({"a/b": source}, target)
    assert (target / "a/b").read_text() == "text"
    assert {path.name for path in contexts.iterdir()} == {".draft", *"12345", target.name}


def test_a_folder_that_takes_no_files_is_named(tmp_path: Path) -> None:
    (tmp_path / "full").touch()
    with pytest.raises(Failed, match=r"^the image's files can't be written into .*full/\w+: "):
        lay_out({"a": tmp_path / "full"}, tmp_path / "full/0")


@pytest.mark.parametrize("tool", Tool)
def test_each_tool_builds_from_the_containerfile_in_the_checkout(tool: Tool) -> None:
    [command] = commands(Build(Image.TRAINER, "0.1.0", base="a/b:1", arguments=("EDITORS=0",)), tool)
    assert command[:6] == [tool, "build", "-f", "images/trainer/Containerfile", "-t", "lockstep-trainer:0.1.0"]
    assert command[-7:] == ["--build-arg", "VERSION=0.1.0", "--build-arg", "BASE=a/b:1", "--build-arg", "EDITORS=0", "."]
    assert ("--layers" in command) is (tool is Tool.BUILDAH)


def test_only_docker_has_to_be_told_of_proxies_and_by_name_only() -> None:
    asked = Build(Image.OPERATOR, "0.1.0", proxies=("https_proxy",))
    assert {tool: "https_proxy" in commands(asked, tool)[0] for tool in Tool} == {
        Tool.PODMAN: False, Tool.BUILDAH: False, Tool.DOCKER: True,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("tool", "written"),
    [
        (Tool.BUILDAH, ["buildah", "push", "lockstep-operator:0.1.0", "docker-archive:/x.tar:lockstep-operator:0.1.0"]),
        (Tool.PODMAN, ["podman", "save", "-o", "/x.tar", "lockstep-operator:0.1.0"]),
        (Tool.DOCKER, ["docker", "save", "-o", "/x.tar", "lockstep-operator:0.1.0"]),
    ],
)
def test_an_archive_is_written_in_the_tool_s_own_way(tool: Tool, written: list[str]) -> None:
    assert commands(OPERATOR, tool, archive="/x.tar")[1:] == [written]


def test_a_push_goes_to_the_registry_of_the_tag_and_to_no_other() -> None:
    pushed = commands(Build(Image.OPERATOR, "0.1.0", tag="r.example.com/t/op:2"), Tool.PODMAN, push=True)
    assert pushed[1:] == [["podman", "push", "r.example.com/t/op:2"]]
    with pytest.raises(ConfigError, match=r"^--push needs a registry: --tag registry\.example\.com/team/lockstep-operator:0\.1\.0$"):
        commands(OPERATOR, Tool.PODMAN, push=True)


def test_what_is_pushed_is_told_by_the_registry_s_digest(bench: Bench) -> None:
    bench.has("podman")
    code, out, _ = bench.run("operator", "--tag", "r.example.com:5000/t/op:2", "--push")
    assert code == 0 and out.endswith("Ready: r.example.com:5000/t/op:2 (sha256:12ab)\nPushed: r.example.com:5000/t/op@sha256:34cd\n")


@pytest.mark.parametrize(
    ("asked", "there", "found"),
    [
        (None, ("docker", "buildah"), Tool.BUILDAH),
        (None, ("docker", "podman"), Tool.PODMAN),
        (Tool.DOCKER, ("docker", "podman"), Tool.DOCKER),
    ],
)
def test_the_first_tool_that_is_there_is_taken_unless_one_is_asked_for(asked: Tool | None, there: tuple[str, ...], found: Tool) -> None:
    assert choose_tool(asked, there) is found


def test_the_build_runs_in_a_copy_of_its_files_with_the_tool_that_is_there(bench: Bench) -> None:
    bench.has("docker")
    code, out, _ = bench.run("operator", "--archive", "x.tar")
    assert (code, out) == (0, "building lockstep-operator:0.1.0 with docker\nReady: lockstep-operator:0.1.0 (sha256:12ab)\n")
    assert [call["argv"][:2] for call in bench.calls] == [["docker", "build"], ["docker", "save"]]
    [folder] = {Path(call["cwd"]) for call in bench.calls}
    assert folder.parent == bench.folder / "cache/contexts"
    assert _bytes({str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}) == _bytes(context(Image.OPERATOR))
    assert {path.stat().st_mode & 0o777 for path in folder.rglob("*")} == {0o755, 0o644}
    assert bench.calls[1]["argv"][3] == str(Path("x.tar").resolve())


def test_pip_s_settings_and_certificates_of_this_machine_travel_as_secrets(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificates = tmp_path / "ca.crt"
    certificates.write_text("CERTIFICATES")
    settings = tmp_path / "pip.conf"
    settings.write_text(f"[global]\ntimeout = 9\ncert = {certificates}\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(settings))
    monkeypatch.setenv("PIP_INDEX_URL", "https://user:word@index.example.com/simple")
    bench.has("podman")
    bench.run("operator")
    [call] = bench.calls
    assert "CERTIFICATES" in call["secrets"]
    [pip] = [text for text in call["secrets"] if "[global]" in text]
    assert "timeout = 9" in pip and "index-url = https://user:word@index.example.com/simple" in pip and "cert" not in pip
    assert "word" not in " ".join(call["argv"])
    source = next(part.partition("src=")[2] for part in call["argv"] if part.startswith("id=pip"))
    assert not Path(source).exists()


def test_a_machine_without_settings_of_its_own_hands_on_none(bench: Bench) -> None:
    bench.has("podman")
    bench.run("operator")
    assert bench.calls[0]["secrets"] == []


def test_a_dry_run_prints_and_runs_nothing(bench: Bench) -> None:
    bench.has("buildah")
    code, out, _ = bench.run("operator", "--dry-run")
    assert bench.calls == []
    cd, command = out.splitlines()
    assert code == 0 and command.startswith("buildah build -f images/operator/Containerfile -t lockstep-operator:0.1.0 --layers")
    subprocess.run(["/bin/sh", "-c", f"{cd} && {command}"], check=True)
    assert (Path(bench.calls[0]["cwd"]) / "images/operator/Containerfile").is_file(), "typed, it runs where its files are"


def test_a_dry_run_where_nothing_can_be_written_prints_the_commands_and_names_the_folder_that_they_want(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.has("buildah")
    (tmp_path / "full").touch()
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "full"))
    code, out, err = bench.run("operator", "--dry-run")
    cd, command = out.splitlines()
    assert (code, command.split()[:2]) == (0, ["buildah", "build"])
    assert err.startswith(f"warning: the image's files can't be written into {cd.partition(' ')[2]}: "), err
    assert bench.run("operator")[0] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["operator"], "none of podman, buildah, docker is installed: apt-get install buildah"),
        (["operator", "--tool", "podman"], "podman is not installed"),
    ],
)
def test_a_tool_that_is_not_there_is_named(bench: Bench, arguments: list[str], message: str) -> None:
    code, _, err = bench.run(*arguments)
    assert code == 2 and err.startswith(f"lockstep: {message}")


@pytest.mark.parametrize("arguments", [["nothing"], ["operator", "--arg", "EDITORS"], ["operator", "--push"]])
def test_what_cannot_be_meant_is_refused_before_anything_runs(bench: Bench, arguments: list[str]) -> None:
    bench.has("podman")
    code, _, err = bench.run(*arguments)
    assert code == 2 and err and bench.calls == []


def test_a_build_that_fails_is_not_followed_by_a_push_and_ends_with_1_and_the_reason(bench: Bench) -> None:
    bench.has("podman", code=125, says="STEP 3\nError: the reason\n")
    code, out, err = bench.run("operator", "--tag", "r.example.com/t/op:2", "--push")
    assert (code, "Ready" in out) == (1, False)
    assert err == "STEP 3\nError: the reason\nlockstep: podman build failed with exit code 125: Error: the reason; more is above\n"
    assert len(bench.calls) == 1


@pytest.mark.parametrize(
    ("tool", "said", "advice"),
    [
        (Tool.BUILDAH, "error committing container: writing blob: write /var/tmp/x: no space left on device",
            "is full: buildah rmi --prune"),
        (Tool.DOCKER, "ERROR: Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?",
            "--tool podman"),
        (Tool.DOCKER, "unknown flag: --secret", "docker-buildx"),
        (Tool.BUILDAH, "error creating build container: initializing source docker://a/b:1: pinging container registry a: no such host",
            "--base IMAGE"),
        (Tool.PODMAN,
            "Error: creating build container: initializing source docker://a/b:1: reading manifest 1 in a/b: unauthorized: access",
            "podman login REGISTRY"),
        (Tool.DOCKER, "ERROR: failed to resolve source metadata for docker.io/a/b:1: not found", "--base IMAGE"),
        (Tool.PODMAN, "ERROR: No matching distribution found for rich==1.0", "pip.conf, PIP_INDEX_URL"),
        (Tool.PODMAN, "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE.",
            "nothing was installed: use another index"),
        (Tool.PODMAN, "E: Unable to locate package perftest", "--arg APT_TOOLS"),
        (Tool.BUILDAH, "cannot clone: Operation not permitted", "Without the rights that builders want"),
    ],
)  # fmt: skip
def test_what_a_tool_says_of_a_usual_cause_comes_with_what_to_do(tool: Tool, said: str, advice: str) -> None:
    told = tool_failure([tool, "build"], 1, ["STEP 1\n", f"{said}\n", "exit status 1\n"])
    assert told.startswith(f"{tool} build failed with exit code 1: {said}: ") and advice in told


def test_a_full_disk_is_told_although_the_base_could_not_be_unpacked_for_it() -> None:
    lines = ['error creating build container: writing blob: storing blob to file "/var/tmp/s": no space left on device\n']
    assert "is full" in tool_failure([Tool.BUILDAH, "build"], 125, lines)


def test_a_tool_that_fails_without_a_word_is_told_by_its_code() -> None:
    assert tool_failure([Tool.PODMAN, "push"], 9, []) == "podman push failed with exit code 9; its output is above"


def test_ctrl_c_ends_it_without_a_traceback(tmp_path: Path) -> None:
    tool = tmp_path / "podman"
    tool.write_text("#!/bin/sh\necho begun >&2\nexec sleep 60\n")
    tool.chmod(0o755)
    path = f"{tmp_path}:{Path(shutil.which('sleep') or '/bin/sleep').parent}"
    command = [sys.executable, "-m", "lockstep.cli.main", "build", "operator"]
    process = subprocess.Popen(
        command, env={**os.environ, "PATH": path}, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, process_group=0
    )
    assert process.stderr is not None and process.stderr.readline() == "begun\n"
    os.killpg(process.pid, 2)  # as a terminal does
    said = process.communicate(timeout=180)[1]
    assert process.returncode == 130 and "Traceback" not in said


def test_the_documentation_s_image_needs_its_site_first(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "LICENSE").touch()
    (tmp_path / "images").symlink_to(ROOT / "images")
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "0.1.0"\n')
    monkeypatch.setattr(assets, "_PACKED", tmp_path)
    bench.has("podman")
    code, _, said = bench.run("docs")
    assert (
        code == 2
        and said
        == "lockstep: there is no site in dist/site: make docs builds it in a clone of the repository (make build IMAGE=docs does both)\n"
    )
    assert bench.calls == []
    (tmp_path / "dist/site").mkdir(parents=True)
    (tmp_path / "dist/site/index.html").touch()
    code, said, _ = bench.run("docs")
    assert code == 0 and "Ready: lockstep-docs:0.1.0" in said


def test_of_a_tool_that_fails_the_last_sixty_lines_are_looked_at_for_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr("lockstep.cli.clusters.build.tool_failure", lambda command, code, last: seen.extend(last) or "it failed")
    with pytest.raises(Failed, match="it failed"):
        build.run_tool([sys.executable, "-c", "import sys; [print(n, file=sys.stderr) for n in range(100)]; sys.exit(1)"], Path("/"))
    assert seen == [f"{number}\n" for number in range(40, 100)]


def test_of_the_line_that_says_why_a_tool_failed_300_characters_are_repeated() -> None:
    said = tool_failure(("podman", "build"), 1, ["x" * 400])
    assert said == f"podman build failed with exit code 1: {'x' * 300} …; more is above"
