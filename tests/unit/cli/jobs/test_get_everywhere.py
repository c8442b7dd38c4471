"""`lockstep get --everywhere`: the jobs of clusters, hosts and this machine together, and a line for each place that isn't seen."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from lockstep.api.names import ANNOTATION_PLACE
from lockstep.cli import main as entry
from lockstep.cli.jobs import everywhere
from lockstep.cli.shared import folders
from support.api_stub import ApiStub, served
from unit.cli.test_every_verb import write_cluster_file
from unit.plan.hosts.test_status import LEADING, host

JOBS = "/apis/lockstep.dev/v1alpha1/namespaces/team/trainingjobs"
LAB = "cluster: {name: lab, platform: hosts}\nhosts: [{name: lab0, address: 10.0.0.1}, {name: lab1, address: 10.0.0.2}]\n"


class Hanging(ApiStub):
    """An API server that takes requests, and answers none until its test is over."""

    over: threading.Event

    def answer(self, method: str, path: str, body: Any) -> Any:
        self.over.wait(60)
        return super().answer(method, path, body)


class Refusing(ApiStub):
    """An API server that accepts no login."""

    def answer(self, method: str, path: str, body: Any) -> Any:
        return 401, {"kind": "Status", "status": "Failure", "reason": "Unauthorized", "message": "Unauthorized", "code": 401}


def api_server(*names: str) -> ApiStub:
    """An API server with these jobs in namespace team."""
    jobs = [{"metadata": {"name": name, "namespace": "team", "uid": f"uid-{name}"}, "spec": {"nodes": 2}, "status": {}} for name in names]
    return ApiStub({JOBS: {"metadata": {}, "items": jobs}})


def local_run(workspace: Path, name: str) -> None:
    gang = workspace / "workspace/runs" / name / "gang"
    gang.mkdir(parents=True)
    (gang / "attempts.jsonl").write_text(json.dumps({"attempt": 1, "jobUid": "u", "restarts": 0, "started": "2026-01-01T00:00:00Z"}))


@pytest.fixture
def clusters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of cluster files where one stands; nothing is remembered, and there is no embedded cluster."""
    for variable in ("LOCKSTEP_CLUSTER", "KUBERNETES_SERVICE_HOST", "KUBECONFIG"):
        monkeypatch.delenv(variable, raising=False)
    for variable, folder in (("HOME", "home"), ("XDG_CONFIG_HOME", "config"), ("LOCKSTEP_CACHE", "cache"), ("LOCKSTEP_STATE", "state")):
        monkeypatch.setenv(variable, str(tmp_path / folder))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "clusters").mkdir()
    return tmp_path / "clusters"


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[ApiStub, str], str]]:
    """Serve an API server, as a context of the kubeconfig, and return its URL. The first context is the current one."""
    config: dict[str, Any] = {"apiVersion": "v1", "kind": "Config", "users": [{"name": "u", "user": {"token": "t"}}]}
    path = tmp_path / "all-contexts"
    monkeypatch.setenv("KUBECONFIG", str(path))
    with ExitStack() as stack:

        def begin(stub: ApiStub, context: str) -> str:
            stack.enter_context(served(stub, tmp_path))
            if isinstance(stub, Hanging):
                stub.over = threading.Event()
                stack.callback(stub.over.set)
            config.setdefault("clusters", []).append({"name": context, "cluster": {"server": stub.url}})
            config.setdefault("contexts", []).append({"name": context, "context": {"cluster": context, "user": "u"}})
            config.setdefault("current-context", context)
            path.write_text(json.dumps(config))
            return stub.url

        yield begin


def get(*words: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(entry.app, ["get", "--everywhere", *words])
    explained = None if done.exception is None else entry.explanation(done.exception)
    return (done.exit_code, done.stdout, done.stderr) if explained is None else (explained[0], done.stdout, explained[1])


def rows(table: str) -> list[list[str]]:
    """The first three cells of each line."""
    return [line.split()[:3] for line in table.splitlines()]


def test_jobs_of_clusters_hosts_and_this_machine_are_one_table(
    clusters: Path, serve: Callable[[ApiStub, str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def look(*_: Any, **__: Any) -> Any:
        return {name: host(name, LEADING) for name in ("lab0", "lab1")}, {}

    monkeypatch.setattr("lockstep.platforms.hosts.fleet.Fleet.look", look)
    write_cluster_file(clusters, "east", f"api: {serve(api_server('e'), 'one')}")
    write_cluster_file(clusters, "west", f"api: {serve(api_server('w', 'v'), 'two')}")
    (clusters / "lab.yaml").write_text(LAB)
    local_run(Path(".lockstep/workspace"), "mine")
    local_run(Path("state/quickstart"), "mine")
    code, output, errors = get()
    assert (code, errors) == (0, "")
    assert rows(output.replace("this machine", "this-machine")) == [
        ["PLACE", "NAMESPACE", "NAME"], ["east", "team", "e"], ["lab", "-", "x"], ["west", "team", "w"], ["west", "team", "v"],
        ["this-machine", "-", "mine"], ["this-machine", "-", "mine"],
    ]  # fmt: skip
    assert get("-o", "wide")[1].splitlines()[0].endswith("MESSAGE")
    assert get("-o", "name")[1].splitlines()[:2] == ["trainingjob.lockstep.dev/e", "trainingjob.lockstep.dev/x"]
    items = json.loads(get("-o", "json")[1])["items"]
    assert [item["metadata"] for item in yaml.safe_load_all(get("-o", "yaml")[1])] == [item["metadata"] for item in items]
    assert [item["metadata"]["annotations"][ANNOTATION_PLACE] for item in items] == [
        "east",
        "lab",
        "west",
        "west",
        "this machine",
        "this machine",
    ]


def test_a_place_that_is_not_seen_has_one_line_and_the_others_are_shown(
    clusters: Path, serve: Callable[[ApiStub, str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(everywhere, "LIMIT_SECONDS", 8.0)
    forbidden = ApiStub(forbidden={"trainingjobs", "configmaps"})
    write_cluster_file(clusters, "east", f"api: {serve(api_server('e'), 'one')}")
    write_cluster_file(clusters, "forbidden", f"api: {serve(forbidden, 'two')}")
    write_cluster_file(clusters, "hangs", f"api: {serve(Hanging(), 'three')}")
    write_cluster_file(clusters, "refuses", f"api: {serve(Refusing(), 'four')}")
    write_cluster_file(clusters, "silent")
    write_cluster_file(clusters, "unknown", "api: api.elsewhere.example.com")
    (clusters / "broken.yaml").write_text("cluster: {name: broken}\n")
    (clusters / "asleep.yaml").write_text(
        "cluster: {name: asleep, platform: hosts}\ndefaults: {port: 1}\nhosts: [{name: lab0, address: 127.0.0.1}]\n"
    )
    code, output, errors = get()
    lines = dict(line.removeprefix("lockstep: ").split(": ", 1) for line in errors.splitlines())
    assert (code, rows(output)[1:]) == (1, [["east", "team", "e"]])
    assert list(lines) == ["asleep", "broken", "forbidden", "hangs", "refuses", "silent", "unknown"]
    assert lines["broken"].startswith("clusters/broken.yaml:1: ")
    assert "trainingjobs is forbidden" in lines["forbidden"]
    assert lines["hangs"] == "it doesn't answer within 8 s"
    assert lines["asleep"].startswith("host lab0 can't be reached")
    assert lines["refuses"].startswith("Unauthorized (401 Unauthorized): your login is not accepted: log in again")
    assert lines["silent"] == "its file doesn't say where it is: write `api: HOST` below `cluster:` there"
    assert lines["unknown"].startswith("no context of ") and "leads to its API server api.elsewhere.example.com" in lines["unknown"]


def test_no_cluster_is_asked_that_no_file_is_about(clusters: Path, serve: Callable[[ApiStub, str], str]) -> None:
    other = api_server("o")
    serve(other, "current")
    write_cluster_file(clusters, "silent")
    assert get()[0] == 1 and other.asked == []


def test_a_cluster_without_cluster_api_is_found_where_it_was_deployed(clusters: Path, serve: Callable[[ApiStub, str], str]) -> None:
    other = api_server("o")
    serve(other, "current")
    write_cluster_file(clusters, "deployed")
    folders.remember_server("deployed", serve(api_server("d"), "another"))
    code, output, errors = get()
    assert (code, rows(output)[1:], other.asked) == (0, [["deployed", "team", "d"]], [])
    assert re.fullmatch(
        r"note: your kubeconfig's cluster at http://\S+ has no file, and isn't asked: lockstep cluster discover NAME writes one\n?", errors
    )


def test_a_job_that_two_places_have_is_shown_once_and_the_file_and_workspace_in_use_are_places(
    clusters: Path, serve: Callable[[ApiStub, str], str], tmp_path: Path
) -> None:
    url = serve(api_server("e"), "one")
    write_cluster_file(clusters, "east", f"api: {url}")
    write_cluster_file(clusters, "same", f"api: {url}")
    apart = write_cluster_file(tmp_path, "apart", f"api: {serve(api_server('a'), 'two')}")
    folders.remember(str(apart))
    assert rows(get()[1])[1:] == [["east", "team", "e"], [str(apart), "team", "a"]]
    folders.remember(str(clusters / "east.yaml"))
    assert rows(get()[1])[1:] == [["east", "team", "e"]]
    local_run(tmp_path / "own", "mine")
    for workspace in (tmp_path / "own", tmp_path / ".lockstep/workspace"):
        workspace.mkdir(parents=True, exist_ok=True)
        folders.remember(str(workspace))
        mine = [["this", "machine", "-"]] if workspace.name == "own" else []
        assert rows(get()[1])[1:] == [["east", "team", "e"], *mine]


def test_a_machine_without_jobs_says_so(clusters: Path) -> None:
    assert get() == (0, "there is no job in any place that answers\n", "")


@pytest.mark.parametrize(
    "words", [("x",), ("-A",), ("-l", "a=b"), ("-w",), ("--cluster", "local"), ("-n", "a"), ("--context", "c"), ("--local",),
        ("--cluster", "w")]
)  # fmt: skip
def test_what_chooses_among_places_or_jobs_is_refused(words: tuple[str, ...], clusters: Path) -> None:
    assert get(*words) == (2, "", "--everywhere lists all jobs of all places: leave out all other words but -o")
