"""What the Containerfiles are made of: the packages that an image still needs, the code that is put into it, and how they are written."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from lockstep.plan.ship.imagebuild import CONTEXTS, SITE, Image
from support.checkout import ROOT, script

CONTAINERFILES = [ROOT / "images" / image / "Containerfile" for image in Image]
OF_PACKAGES = [path for path in CONTAINERFILES if path.parent.name != Image.DOCS]
LOCK = (
    "numpy==2.4.6 \\\n    --hash=sha256:aa\ndeepspeed==0.19.8 \\\n    --hash=sha256:bb\ntorch==2.15.0 \\\n    --hash=sha256:cc \\\n   "
    " --hash=sha256:dd\n"
)
MORE = (
    "# of editors\ndebugpy==1.8.22 \\\n    --hash=sha256:ee\nnumpy==2.4.6 \\\n    --hash=sha256:aa\nnvidia-nccl-cu13==2.30.7 \\\n   "
    " --hash=sha256:ff\n"
)


wheels = script("images/trainer/wheels.py")
install = script("images/install.py")
tree = script("images/operator/tree.py")


def _names(text: str) -> list[str]:
    return re.findall(r"^([\w-]+)==", text, re.MULTILINE)


def test_a_base_with_torch_keeps_it_and_what_belongs_to_it() -> None:
    assert _names(wheels.to_install([LOCK, MORE])) == ["debugpy", "deepspeed", "numpy", "nvidia-nccl-cu13", "torch"]
    assert _names(wheels.to_install([LOCK, MORE], keep="torch")) == ["debugpy", "deepspeed"]


def test_one_package_can_be_installed_apart_from_the_others() -> None:
    assert _names(wheels.to_install([LOCK], without="deepspeed")) == ["numpy", "torch"]
    assert wheels.to_install([LOCK], only="deepspeed") == "deepspeed==0.19.8 \\\n    --hash=sha256:bb\n"


def test_every_hash_of_a_package_comes_with_it() -> None:
    assert wheels.to_install([LOCK], only="torch").count("--hash") == 2


def test_two_locks_that_disagree_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"^numpy is pinned twice: 2\.4\.6 and 1\.0; make lock$"):
        wheels.to_install([LOCK, "numpy==1.0 \\\n    --hash=sha256:aa\n"])


def test_the_locks_of_the_trainer_and_of_the_editors_agree() -> None:
    texts = [(ROOT / "requirements" / f"{name}.lock").read_text() for name in ("train", "editors")]
    assert {"torch", "deepspeed", "tensorboard", "jupyterlab", "debugpy"} <= set(_names(wheels.to_install(texts)))


def test_installed_code_knows_its_version_and_is_compiled(tmp_path: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    install.install(project, tmp_path, [ROOT / "workspace" / "lockstep_gang"])
    site = install.site_packages(tmp_path)
    code = "import importlib.metadata, lockstep_gang; print(importlib.metadata.version('lockstep-trainer'), lockstep_gang.__cached__)"
    done = subprocess.run(
        [sys.executable, "-B", "-S", "-c", code], env={"PYTHONPATH": str(site)}, capture_output=True, text=True, check=True
    )
    version, compiled = done.stdout.split()
    assert version == project["version"]
    assert Path(compiled).is_file()
    assert str(tmp_path).encode() not in Path(compiled).read_bytes()


@pytest.mark.parametrize("path", CONTAINERFILES, ids=lambda path: path.parent.name)
def test_an_image_runs_as_a_number_in_group_0_and_is_told_its_base(path: Path) -> None:
    text = path.read_text()
    users = re.findall(r"^USER (.+)$", text, re.MULTILINE)
    assert re.fullmatch(r"[1-9]\d*:0", users[-1]) and set(users[:-1]) == {"0"}
    assert re.search(r"^ARG BASE=\S+:(?!latest)[\w.-]+@sha256:[0-9a-f]{64}$", text, re.MULTILINE)
    assert "latest" not in text
    assert set(re.findall(r"^FROM (\S+)", text, re.MULTILINE)) <= {"${BASE}", "scratch", "tools"}


@pytest.mark.parametrize("path", CONTAINERFILES, ids=lambda path: path.parent.name)
def test_what_an_image_copies_is_there_and_is_sent_to_whoever_builds_it(path: Path) -> None:
    ignore = (ROOT / ".containerignore").read_text().split("\n")
    context = CONTEXTS[Image(path.parent.name)]
    tops = {name if name == SITE else Path(name).parts[0] for parts in CONTEXTS.values() for name in parts}
    assert {f"!{name}" for name in tops} == {line for line in ignore if line.startswith("!")}
    for line in re.findall(r"^COPY (?!--from)(.+)$", path.read_text(), re.MULTILINE):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists() or source == SITE
            assert any(Path(source).is_relative_to(part) for part in context)


def test_docker_which_reads_only_a_file_of_its_own_ignores_the_same() -> None:
    assert (ROOT / ".dockerignore").read_text() == (ROOT / ".containerignore").read_text()


@pytest.mark.parametrize("path", OF_PACKAGES, ids=lambda path: path.parent.name)
def test_pip_installs_only_what_a_lock_pins_by_hash(path: Path) -> None:
    installs = [line for line in path.read_text().splitlines() if " install --no-cache-dir" in line]
    assert installs and all("--require-hashes" in line and "--no-deps" in line for line in installs)


def test_every_package_of_the_nodes_is_in_the_trainers_image_and_all_but_the_trainer_in_the_operators() -> None:
    there = {folder.parent.name for folder in (ROOT / "workspace").glob("lockstep_*/__init__.py")}
    copied = {path.parent.name: set(re.findall(r"^COPY workspace/(\w+)", path.read_text(), re.MULTILINE)) for path in OF_PACKAGES}
    assert copied == {"trainer": there, "operator": there - {"lockstep_train"}}


def test_the_operator_s_last_stage_begins_with_nothing() -> None:
    assert re.findall(r"^FROM (\S+)", (ROOT / "images/operator/Containerfile").read_text(), re.MULTILINE)[-1] == "scratch"


def test_a_file_is_copied_with_every_link_on_the_way_to_it(tmp_path: Path) -> None:
    """As /lib64 is a link on Debian, python3 one to a version, and certificates are links to another folder."""
    base, target = tmp_path / "base", tmp_path / "target"
    for name in ("usr/lib/ssl", "etc/certs", "usr/share/ca"):
        (base / name).mkdir(parents=True)
    (base / "lib").symlink_to("usr/lib")
    (base / "usr/lib/ssl/certs").symlink_to(base / "etc/certs")
    (base / "usr/share/ca/one.crt").write_text("one")
    (base / "etc/certs/one.pem").symlink_to("../../usr/share/ca/one.crt")
    (base / "etc/certs/gone.pem").symlink_to("nothing")
    (base / "etc/shadow").write_text("not asked for")
    target.mkdir()
    tree.Tree(target).add(base / "lib/ssl/certs")
    copy = target / base.relative_to("/")
    assert sorted(str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file() or path.is_symlink()) == [
        "etc/certs/gone.pem", "etc/certs/one.pem", "lib", "usr/lib/ssl/certs", "usr/share/ca/one.crt",
    ]  # fmt: skip
    assert (copy / "lib").readlink() == Path("usr/lib") and (copy / "etc/certs/one.pem").read_text() == "one"


def test_what_is_asked_for_and_is_not_there_or_not_imported_is_left_out(tmp_path: Path) -> None:
    for name in ("json/tool.py", "json/__pycache__/tool.pyc", "test/test_json.py"):
        (tmp_path / "lib" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "lib" / name).touch()
    assert [*tree.files(tmp_path / "lib")] == [tmp_path / "lib/json/tool.py"]
    assert [*tree.files(tmp_path / "etc/crypto-policies")] == []


def test_a_library_s_own_libraries_are_those_that_the_loader_finds_and_one_that_it_does_not_ends_the_build(tmp_path: Path) -> None:
    [loader] = tree.loaded("ld-")
    names = {path.name for path in tree.libraries(Path(sys.executable).resolve(), loader)}
    assert any(name.startswith("libc.so") for name in names) and loader.name in names
    stub = tmp_path / "loader"
    stub.write_text("#!/bin/sh\necho 'libodd.so.1 => not found'\n")
    stub.chmod(0o755)
    with pytest.raises(ValueError, match=r"^/x needs a library that the base doesn't have: libodd\.so\.1 => not found$"):
        tree.libraries(Path("/x"), stub)


def _step(path: Path, says: str) -> str:
    """The one RUN of a Containerfile that says this, as its shell gets it."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    steps = [step for step in re.sub(r"\\\n", "", "\n".join(lines)).splitlines() if step.startswith("RUN ") and says in step]
    [found] = steps
    return re.sub(r"--mount=\S+", "", found.removeprefix("RUN "))


def _with_only(folder: Path, tool: str, lacks: str = "") -> dict[str, str]:
    """A PATH with one package manager that notes what it is asked for, and doesn't have one package."""
    program = folder / tool
    program.write_text(f'#!/bin/sh\necho "$@" >> {folder}/asked\ncase " $* " in *" {lacks or "-"} "*) exit 1;; esac\n')
    program.chmod(0o755)
    return {"PATH": str(folder)}


@pytest.mark.parametrize("tool", ["dnf", "microdnf"])
def test_on_a_red_hat_base_the_tools_come_by_its_own_package_manager_and_what_it_lacks_is_told(tool: str, tmp_path: Path) -> None:
    trainer = ROOT / "images" / "trainer" / "Containerfile"
    defaults = dict(re.findall(r'^ARG (DNF_\w+)="(.*)"$', trainer.read_text(), re.MULTILINE))
    environment = {**_with_only(tmp_path, tool, lacks="perftest"), **defaults}
    done = subprocess.run(["/bin/sh", "-c", _step(trainer, "APT_TOOLS")], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "left out: perftest\n"
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked[0] == "install -y iputils iproute" and asked[-1] == "clean all"
    assert "install -y libibverbs" in asked and "install -y infiniband-diags" in asked


def test_on_a_red_hat_base_that_lacks_ping_the_build_fails(tmp_path: Path) -> None:
    environment = {**_with_only(tmp_path, "dnf", lacks="iputils"), "DNF_TOOLS": "iputils iproute", "DNF_OPTIONAL": ""}
    done = subprocess.run(["/bin/sh", "-c", _step(ROOT / "images/trainer/Containerfile", "APT_TOOLS")], env=environment, check=False)
    assert done.returncode != 0


@pytest.mark.parametrize("path", OF_PACKAGES, ids=lambda path: path.parent.name)
def test_a_base_that_has_pip_is_asked_for_no_package_manager_to_get_it(path: Path, tmp_path: Path) -> None:
    (tmp_path / "python3").symlink_to("/bin/true")
    step = _step(path, "install -y -qq --no-install-recommends python3-pip").replace("mkdir /pip", f"/bin/mkdir {tmp_path}/pip")
    assert subprocess.run(["/bin/sh", "-c", step], env={"PATH": str(tmp_path)}, check=False).returncode == 0
