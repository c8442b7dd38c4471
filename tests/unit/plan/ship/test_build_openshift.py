"""`lockstep build --openshift`: what an API server is asked, and what a person is told. OpenShift is played by a stub that keeps what it
gets.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from lockstep.cli.main import main
from lockstep.plan.ship.imagebuild import CONTEXTS, Build, Image, tool_failure
from lockstep.plan.ship.openshift import objects, openshift_failure
from support.api_stub import ApiStub, Object, served
from support.checkout import ROOT

BUILDS = "/apis/build.openshift.io/v1/namespaces/team"
STREAMS = "/apis/image.openshift.io/v1/namespaces/team/imagestreams"
FAILED = {"phase": "Failed", "reason": "DockerBuildFailed", "message": "Dockerfile build strategy has failed."}
COMPLETE = {"phase": "Complete", "output": {"to": {"imageDigest": "sha256:12ab"}}}
Typed = Callable[..., tuple[int, str, str]]


@dataclass
class OpenShift(ApiStub):
    """It builds whatever it is sent: `statuses` are what one look at the build after the other finds."""

    log: str = "STEP 1\n"
    statuses: list[Object] = field(default_factory=lambda: [{"phase": "Running"}, COMPLETE])
    there: set[str] = field(default_factory=set)
    """Paths of collections that have the object already."""
    bodies: list[tuple[str, str, Object]] = field(default_factory=list)
    uploaded: bytes = b""

    def answer(self, method: str, path: str, body: Object | bytes | None) -> tuple[int, Object | str]:
        status, reply = super().answer(method, path, body)
        if status in (403, 404) and path not in (f"{BUILDS}/builds/lockstep-operator-1", f"{BUILDS}/builds/lockstep-operator-1/log"):
            return status, reply
        if isinstance(body, bytes):
            self.uploaded = body
            return 201, {"kind": "Build", "metadata": {"name": "lockstep-operator-1"}, "status": {"phase": "New"}}
        if isinstance(body, dict):
            if method == "POST" and path in self.there:
                return 409, {"kind": "Status", "reason": "AlreadyExists", "message": "already exists", "code": 409}
            self.bodies.append((method, path, body))
        if path.endswith("/log"):
            return (200, self.log) if self.log else (500, {"kind": "Status", "reason": "InternalError", "message": "no pod"})
        if path.endswith("/builds/lockstep-operator-1"):
            return 200, {
                "metadata": {"name": "lockstep-operator-1"},
                "status": self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0],
            }
        return status, reply


@pytest.fixture
def openshift(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenShift]:
    groups: dict[str, Object] = {f"/apis/{name}.openshift.io/v1": {"kind": "APIResourceList"} for name in ("build", "image")}
    monkeypatch.setattr("lockstep.platforms.clusters.imagebuild.POLL_SECONDS", 0)
    with served(stub := OpenShift(objects=groups), tmp_path) as path:
        monkeypatch.setenv("KUBECONFIG", str(path))
        yield stub


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Typed:
    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["lockstep", "build", "operator", "--openshift", "-n", "team", *arguments])
        try:
            code = main()
        except SystemExit as ended:
            code = int(ended.code or 0)
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def test_what_openshift_builds_can_be_named_by_pods_of_the_namespace_and_comes_from_no_registry_of_ours() -> None:
    stream, config = objects(Build(Image.OPERATOR, "0.1.0", tag="r.example.com:5000/t/op:2", base="ubi:9"))
    assert (stream["apiVersion"], stream["kind"], stream["spec"]) == (
        "image.openshift.io/v1", "ImageStream", {"lookupPolicy": {"local": True}},
    )  # fmt: skip
    assert (config["apiVersion"], config["kind"]) == ("build.openshift.io/v1", "BuildConfig")
    spec = config["spec"]
    assert spec["source"] == {"type": "Binary", "binary": {}}
    assert spec["output"]["to"] == {"kind": "ImageStreamTag", "name": "lockstep-operator:2"}
    strategy = spec["strategy"]["dockerStrategy"]
    assert (ROOT / strategy["dockerfilePath"]).is_file()
    assert strategy["buildArgs"] == [{"name": "VERSION", "value": "0.1.0"}, {"name": "BASE", "value": "ubi:9"}]


def test_the_objects_and_then_only_what_an_image_is_made_from_are_sent_and_the_log_is_shown(openshift: OpenShift, typed: Typed) -> None:
    code, out, err = typed()
    assert (code, err) == (0, "")
    assert [(method, path, body["kind"]) for method, path, body in openshift.bodies] == [
        ("POST", STREAMS, "ImageStream"), ("POST", f"{BUILDS}/buildconfigs", "BuildConfig"),
    ]  # fmt: skip
    uploads = [(method, path) for method, path, _ in openshift.asked if path.endswith("/instantiatebinary")]
    assert uploads == [("POST", f"{BUILDS}/buildconfigs/lockstep-operator/instantiatebinary")]
    assert ("GET", f"{BUILDS}/builds/lockstep-operator-1/log", {"follow": "true"}) in openshift.asked
    assert "\nSTEP 1\n" in out
    assert "\nReady: pods of namespace team may use the image lockstep-operator:0.1.0 (sha256:12ab)\nNext: lockstep deploy " in out


def test_the_archive_has_the_containerfile_and_the_code_of_nobody_and_nothing_compiled(openshift: OpenShift, typed: Typed) -> None:
    typed()
    with tarfile.open(fileobj=io.BytesIO(openshift.uploaded)) as archive:
        members = archive.getmembers()
    names = {member.name for member in members}
    assert {"images/operator/Containerfile", "operator/lockstep/cli/clusters/build.py", "requirements/operator.lock", "LICENSE"} <= names
    assert all(any(Path(name).is_relative_to(part) for part in CONTEXTS[Image.OPERATOR]) for name in names)
    assert not [name for name in names if "__pycache__" in name]
    assert {(member.uid, member.uname) for member in members} == {(0, "")}


def test_objects_that_are_there_are_brought_up_to_date(openshift: OpenShift, typed: Typed) -> None:
    openshift.there = {STREAMS, f"{BUILDS}/buildconfigs"}
    assert typed("--tag", "op:2")[0] == 0
    [stream, config] = openshift.bodies
    assert stream[:2] == ("PATCH", f"{STREAMS}/lockstep-operator")
    assert config[2]["spec"]["output"]["to"]["name"] == "lockstep-operator:2"


def test_a_cluster_without_openshift_s_apis_is_named_before_anything_is_sent(openshift: OpenShift, typed: Typed) -> None:
    del openshift.objects["/apis/build.openshift.io/v1"]
    code, _, err = typed()
    assert code == 2
    assert err.startswith(f"lockstep: {openshift.url} can't build images: it has no build.openshift.io/v1") and "--push" in err
    assert openshift.bodies == []


@pytest.mark.parametrize("plural", ["imagestreams", "buildconfigs"])
def test_without_rights_it_is_said_which_are_missing(openshift: OpenShift, typed: Typed, plural: str) -> None:
    openshift.forbidden = {plural}
    code, _, err = typed()
    assert code == 1
    assert f'cannot create resource "{plural}"' in err and "the built-in roles view and edit" in err
    assert openshift.uploaded == b""


def test_a_namespace_that_is_not_there_comes_with_how_to_make_it(
    openshift: OpenShift, typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing: tuple[int, Object] = (404, {"kind": "Status", "reason": "NotFound", "message": 'namespaces "team" not found', "code": 404})
    answer = openshift.answer
    monkeypatch.setattr(openshift, "answer", lambda method, path, body: missing if path == STREAMS else answer(method, path, body))
    code, _, err = typed()
    assert code == 1 and "oc new-project team" in err


def test_a_build_that_fails_is_told_with_its_reason_and_the_end_of_its_log(openshift: OpenShift, typed: Typed) -> None:
    openshift.statuses = [FAILED]
    openshift.log = "".join(f"line {number}\n" for number in range(40)) + "error: building at STEP 9: exit status 1\n"
    code, out, err = typed()
    assert code == 1 and "Ready" not in out
    first, *lines = err.splitlines()
    assert (
        first == "lockstep: build lockstep-operator-1 in namespace team ended as Failed (DockerBuildFailed: Dockerfile build strategy has"
        " failed); "
        "the end of its log (oc logs -n team build/lockstep-operator-1):"
    )
    assert [line.strip() for line in lines] == [*(f"line {number}" for number in range(33, 40)), "error: building at STEP 9: exit status 1"]


def test_a_build_without_a_log_is_told_by_what_openshift_kept_of_it(openshift: OpenShift, typed: Typed) -> None:
    openshift.log, openshift.statuses = "", [{**FAILED, "logSnippet": "Pulling image a/b:1\nerror: manifest unknown"}]
    code, out, err = typed()
    assert code == 1 and "can't be followed any more (no pod (500 InternalError)); waiting for its end" in out
    assert err.endswith("\n    error: manifest unknown\n")


def test_a_dry_run_asks_no_cluster(openshift: OpenShift, typed: Typed) -> None:
    code, out, _ = typed("--dry-run")
    assert code == 0 and openshift.asked == []
    assert [item["kind"] for item in yaml.safe_load_all(out)] == ["ImageStream", "BuildConfig"]
    assert out.rstrip().endswith("go to buildconfigs/lockstep-operator/instantiatebinary in namespace team")


def test_without_a_cluster_it_is_said_how_to_name_one(typed: Typed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    code, _, err = typed()
    assert code == 2 and f"KUBECONFIG names {tmp_path / 'none'}, which is not there" in err


@pytest.mark.parametrize("option", [["--push"], ["--archive", "x.tar"], ["--tool", "podman"]])
def test_what_only_a_tool_of_this_machine_does_is_refused(openshift: OpenShift, typed: Typed, option: list[str]) -> None:
    code, _, err = typed(*option)
    assert code == 2 and "leave out --push, --archive and --tool" in err
    assert openshift.asked == []


def test_of_a_build_that_failed_eight_lines_are_told_and_of_a_tool_s_line_300_characters() -> None:
    lines = openshift_failure({"metadata": {"name": "b"}, "status": {"phase": "Failed"}}, "ns", [f"line {number}" for number in range(50)])
    assert lines[1:] == tuple(f"    line {number}" for number in range(42, 50))
    short = tool_failure(["podman", "build"], 1, ["x" * 5000])
    assert "x" * 300 in short and "x" * 301 not in short
