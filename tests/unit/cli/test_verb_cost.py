"""What verbs import and what they ask the API server: each module is a part of every start, each request a round trip."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lockstep.cli.main import app
from lockstep.cli.shared.terminal import waiting
from support.api_stub import ApiStub, served
from support.checkout import ROOT

Object = dict[str, Any]
JOBS = "/apis/lockstep.dev/v1alpha1/namespaces/team/trainingjobs"
LEASES = ("leases/lockstep-operator",) * 2
"""Of the namespace's own operator, and of that of the whole cluster."""
HEAVY = (
    "aiohttp", "cryptography", "jinja2", "kopf", "kubernetes", "pydantic", "rich.table", "torch", "yaml", "lockstep.api.model",
    "lockstep_gang.contract.report",
)  # fmt: skip
NEEDED = {"aiohttp", "pydantic", "yaml"}
"""By `get`: to ask the API server, by typer for its options, and to read the kubeconfig."""
SHOWING = "; ".join(
    (
        "import sys",
        "from lockstep.cli.main import main",
        "sys.argv[1:] = {words!r}",
        "\ntry:\n main()\nexcept SystemExit:\n pass\nprint('LOADED', *(name for name in {heavy!r} if name in sys.modules))",
    )
)


def a_job(name: str, kind: str, reason: str) -> Object:
    conditions = [{"type": kind, "status": "True", "reason": reason, "message": "it is so"}]
    metadata = {"name": name, "namespace": "team", "uid": name, "creationTimestamp": "2026-11-22T20:00:00Z"}
    return {"kind": "TrainingJob", "metadata": metadata, "spec": {"nodes": 2}, "status": {"conditions": conditions}}


@pytest.fixture
def stub() -> ApiStub:
    jobs = [a_job("runs", "Progressing", "Running"), a_job("ended", "Complete", "Complete")]
    found = {f"{JOBS}/{job['metadata']['name']}": job for job in jobs}
    log = {"/api/v1/namespaces/team/pods/runs-0/log": "2026-11-22T20:00:01.000000000Z one line\n"}
    pod = {"/api/v1/namespaces/team/pods/runs-0": {"metadata": {"name": "runs-0"}, "status": {"phase": "Running"}}}
    kept = {"/api/v1/namespaces/team/configmaps/ended-log": {"data": {"0": "one line\n"}}}
    return ApiStub(objects={**found, **log, **pod, **kept, JOBS: {"metadata": {}, "items": jobs}})


def loaded(folder: Path, stub: ApiStub, *words: str, heavy: tuple[str, ...] = HEAVY) -> set[str]:
    """Which of these modules a process has imported that was typed so."""
    with served(stub, folder) as kubeconfig:
        code = SHOWING.format(words=[*words], heavy=heavy)
        environment = {**os.environ, "KUBECONFIG": str(kubeconfig)}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.count("\n") > 1, done.stderr
    return set(done.stdout.splitlines()[-1].split()[1:])


def test_a_verb_that_reads_models_hardly_looks_for_garbage() -> None:
    count = "sum(one['collections'] for one in gc.get_stats())"
    code = SHOWING.format(words=["validate", "-f", "manifests/samples/trainingjob.yaml"], heavy=["lockstep.api.job"])
    code = code.replace("sys.argv[1:]", f"import gc; before = {count}; sys.argv[1:]") + f"; print({count} - before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    *_, imported, collections = done.stdout.splitlines()
    assert imported == "LOADED lockstep.api.job" and int(collections) < 20, "with Python's own threshold it is some 80 times"


def test_a_help_page_and_a_version_import_nothing_of_what_verbs_need(tmp_path: Path, stub: ApiStub) -> None:
    assert loaded(tmp_path, stub, "--help") <= {"rich.table"}
    assert loaded(tmp_path, stub, "get", "--help") <= {"rich.table", "pydantic"}
    hosts = ("lockstep.cli.clusters.doctorhosts", "lockstep.platforms.hosts.fleet")
    assert loaded(tmp_path, stub, "doctor", "--help", heavy=hosts) == set()


@pytest.mark.parametrize("words", [["get"], ["get", "runs"], ["describe", "runs"], ["logs", "runs"]])
def test_verbs_that_show_objects_import_no_models_and_no_templates(words: list[str], tmp_path: Path, stub: ApiStub) -> None:
    stub.objects["/api/v1/namespaces/team/events"] = {"metadata": {}, "items": [{"reason": "Seen", "message": "it was"}]}
    assert loaded(tmp_path, stub, *words, "-n", "team", "--context", "c") == NEEDED


def test_a_machine_that_joins_imports_no_models_and_no_templates() -> None:
    code = f"import sys, lockstep.platforms.local.joined.join; print(*(name for name in {HEAVY} if name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        ("get", ["trainingjobs", "configmaps", *LEASES]),
        ("get ended", ["trainingjobs/ended"]),
        ("describe runs", ["trainingjobs/runs", *LEASES, "events"]),
        ("logs runs", ["trainingjobs/runs", "pods/runs-0", "pods/runs-0/log"]),
        ("logs ended --tail 1", ["trainingjobs/ended", "pods/ended-0", "configmaps/ended-log"]),
        ("top", ["trainingjobs", "configmaps", *LEASES]),
        ("top ended --once", ["trainingjobs/ended", "trainingjobs/ended", "pods", "pods", *LEASES]),
        (
            "why ended",
            [
                *("trainingjobs/ended", "pods", "persistentvolumeclaims", "events"),
                *("statefulsets", "services", "networkpolicies", "configmaps"),
                *("deployments/lockstep-operator", "deployments/lockstep-operator"),
                *("rolebindings/lockstep-system-operator", "serviceaccounts/lockstep-operator", *LEASES),
            ],
        ),
    ],
)
def test_a_verb_asks_for_this_and_no_more(
    words: str, asked: list[str], tmp_path: Path, stub: ApiStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(stub, tmp_path) as kubeconfig:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
        result = CliRunner().invoke(app, [*words.split(), "-n", "team", "--context", "c"])
    assert not isinstance(result.exception, Exception), result.output
    paths = [path.rpartition("/namespaces/")[2].split("/", 1)[1] for _, path, _ in stub.asked]
    assert Counter(paths) == Counter(asked)


def test_one_verb_logs_in_once(tmp_path: Path, stub: ApiStub, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program of the kubeconfig may take a second, and `why` opens two connections."""
    counted = tmp_path / "runs"
    program = tmp_path / "login"
    program.write_text(
        f"#!/bin/sh\necho once >> {counted}\n"
        'echo \'{"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": {"token": "t"}}\'\n'
    )
    program.chmod(0o755)
    with served(stub, tmp_path) as kubeconfig:
        how = '"exec": {"apiVersion": "client.authentication.k8s.io/v1", "interactiveMode": "Never", "command": "' + str(program) + '"}'
        kubeconfig.write_text(kubeconfig.read_text().replace('"token": "t"', how))
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
        for times in (1, 2):
            assert CliRunner().invoke(app, ["why", "ended", "-n", "team", "--context", "c"]).exit_code == 0
            assert counted.read_text().split() == ["once"] * times, "each verb asks anew"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_at_a_terminal_what_takes_long_says_so_at_once_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.delenv("NO_COLOR", raising=False)
    with waiting("looking at cluster x"):
        begun = time.monotonic()
        while not screen.getvalue() and time.monotonic() < begun + 60:
            time.sleep(0.01)
    assert screen.getvalue().startswith("\r… looking at cluster x, 0s"), "before the first second is over"
    assert screen.getvalue().endswith(" \r")


def test_models_do_not_read_their_own_source_when_they_are_imported() -> None:
    """pydantic can, for descriptions, which only the CRDs and the reference have: it took a fifth of their import."""
    code = "import linecache; linecache.getlines = lambda *_: exit('source is read'); import lockstep.api.cluster, lockstep.api.job"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_cluster_file_is_read_without_the_models_of_a_job_s_status() -> None:
    code = "import lockstep.api.files.clusterfile, sys; sys.exit('lockstep.api.status' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_facts_of_a_cluster_are_read_without_the_models_of_a_cluster_file() -> None:
    """`why` asks whether an operator works: its start would cost 0.05 s more."""
    code = "import lockstep.platforms.clusters.facts, sys; sys.exit('lockstep.api.cluster' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
