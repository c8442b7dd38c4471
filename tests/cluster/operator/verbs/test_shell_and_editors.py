"""Shells, TensorBoard and forwards into the pods of a real job, and what is said where they can't be had."""

from __future__ import annotations

import http.client
import json
import os
import pty
import re
import select
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.clusters.cluster_jobs import Jobs, cluster_like_local, kubeconfig_of, until
from support.dap import Debugger
from support.in_process import lockstep
from support.served import ADDRESS, CODE_SERVER, LOCKSTEP, all_processes, started

Kubectl = Callable[..., subprocess.CompletedProcess[str]]
LISTEN = """
import json, socketserver
class Script(socketserver.StreamRequestHandler):
    def handle(self):
        while length := int(self.rfile.readline().partition(b":")[2] or 0):
            self.rfile.read(2)
            asked = json.loads(self.rfile.read(length))["seq"]
            body = json.dumps({"type": "response", "request_seq": asked, "success": True, "body": {"x": "x" * 300000}}).encode()
            self.wfile.write(b"Content-Length: %d\\r\\n\\r\\n%b" % (len(body), body))
server = socketserver.TCPServer(("127.0.0.1", 5678), Script)
print("listening", flush=True)
server.serve_forever()
"""


@pytest.fixture(scope="module")
def job(jobs: Jobs) -> Iterator[str]:
    jobs.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "tools"}, "data": {"code-server": CODE_SERVER}})
    mounts = [{"name": name, "mountPath": f"/{name}", "configMap": {"name": name}} for name in ("scripts", "tools")]
    jobs.start("edit", podTemplate={"volumes": mounts}, env=[{"name": "PATH", "value": "/workspace/tools:/usr/local/bin:/usr/bin:/bin"}])
    jobs.until_running("edit")
    yield "edit"
    jobs.end("edit")


def shell(jobs: Jobs, job: str, typed: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [*LOCKSTEP, "shell", job, *options, "-n", jobs.namespace]
    return subprocess.run(command, input=typed, capture_output=True, text=True, check=False, timeout=120)


def test_a_shell_reads_what_it_is_given_in_the_node_that_was_named_and_its_exit_code_is_the_verb_s(jobs: Jobs, job: str) -> None:
    done = shell(jobs, job, 'echo "node $NODE_RANK of $NNODES in $PWD"; echo aside >&2; exit 7', "--node", "1")
    assert (done.returncode, done.stdout, done.stderr) == (7, "node 1 of 2 in /workspace\n", "aside\n")


def test_a_terminal_gets_a_terminal_in_which_ctrl_c_ends_what_runs_and_not_the_shell(jobs: Jobs, job: str) -> None:
    here, there = pty.openpty()
    command = [*LOCKSTEP, "shell", job, "-n", jobs.namespace]
    process = subprocess.Popen(command, stdin=there, stdout=there, stderr=there, start_new_session=True)
    os.close(there)
    try:
        seen = typed_until(here, "test -t 0 && echo it-is-a-$((40+2))-terminal\n", "it-is-a-42-terminal")
        seen += typed_until(here, "sh -c 'echo sleeping-$((40+2)); exec sleep 600'\n", "sleeping-42")  # said by what Ctrl-C shall reach
        seen += typed_until(here, "\x03", "^C")
        seen += typed_until(here, "echo still-$((40+2)); exit 5\n", "still-42")
        assert process.wait(timeout=60) == 5, seen
    finally:
        process.kill()
        process.wait()
        os.close(here)


def typed_until(terminal: int, keys: str, expected: str) -> str:
    os.write(terminal, keys.encode())
    seen, end = "", time.monotonic() + 60
    while expected not in seen:
        assert select.select([terminal], [], [], max(0.0, end - time.monotonic()))[0], seen
        seen += os.read(terminal, 4096).decode(errors="replace")
    return seen


def get(port: int, path: str, cookie: str = "", host: str = "") -> tuple[int, bytes, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", path, headers={"Cookie": cookie, "Host": host})
        response = connection.getresponse()
        return response.status, response.read(), response.headers["Set-Cookie"] or ""
    finally:
        connection.close()


def test_tensorboard_is_reached_by_its_token_alone_and_ends_with_ctrl_c(jobs: Jobs, job: str, kubectl: Kubectl) -> None:
    with started(jobs, "tensorboard", job, "--folder", "/workspace") as process:
        address = process.stdout.readline().strip()
        found = ADDRESS.match(address)
        assert found is not None, process.communicate()
        host, port, path, token = found[1], int(found[2]), found[3], found[4]
        assert get(port, "/data/environment", host=host)[0] == 401
        status, _, cookie = get(port, path, host=host)
        assert status == 302
        status, body, _ = get(port, "/data/environment", cookie.partition(";")[0], host)
        assert status == 200 and b'"/workspace"' in body
        assert token not in all_processes(jobs, kubectl, f"{job}-0")
    until("the server is gone from the pod", lambda: "tensorboard" not in all_processes(jobs, kubectl, f"{job}-0"))
    with pytest.raises(ConnectionRefusedError):
        get(port, "/")


def test_a_debugger_reaches_what_waits_on_the_pod_s_loopback(jobs: Jobs, job: str) -> None:
    command = [*LOCKSTEP, "shell", job, "--node", "1", "-n", jobs.namespace]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        server.stdin.write(f"timeout 300 python3 - <<'X'\n{LISTEN}X\nexit\n")
        server.stdin.flush()
        assert server.stdout.readline() == "listening\n"
        with started(jobs, "debug", job, "--attach", "--node", "1") as process:
            text = ""
            while not text.endswith("Press Ctrl-C to end.\n"):
                text += (line := process.stdout.readline())
                assert line, process.communicate()
            entry = yaml.safe_load(text.partition("configurations:")[2].rpartition("}")[0] + "}")
            assert (entry["type"], entry["request"], entry["pathMappings"][0]["remoteRoot"]) == ("debugpy", "attach", "/workspace")
            for _ in range(2):
                editor = Debugger(entry["connect"]["port"])
                assert editor.result("initialize") == {"x": "x" * 300000}
                editor.close()
    finally:
        server.kill()
        server.communicate()


def test_vscode_is_opened_on_the_workspace_by_its_token_alone_and_ends_with_ctrl_c(jobs: Jobs, job: str, kubectl: Kubectl) -> None:
    """With a stand-in for code-server, which no image of these tests has."""
    placed = shell(jobs, job, "mkdir -p tools && cp /tools/code-server tools/ && chmod +x tools/code-server", "--node", "1")
    assert placed.returncode == 0, placed.stderr
    with started(jobs, "vscode", job, "--node", "1") as process:
        desktop, command, address = (process.stdout.readline() for _ in range(3))
        assert desktop == "With the VS Code of this machine and its extension Dev Containers:\n", process.communicate()
        uri = command.split()[-1]
        assert re.search(
            rf"^vscode-remote://k8s-container\+context=[^+]+\+podname={job}-1\+namespace={jobs.namespace}\+name=trainer\+image=[^+]+/workspace$",
            uri,
        )
        found = ADDRESS.match(address)
        assert found is not None, process.communicate()
        host, port, path, token = found[1], int(found[2]), found[3], found[4]
        assert get(port, "/?folder=/workspace", host=host)[0] == 401
        status, _, cookie = get(port, path, host=host)
        assert status == 302
        status, body, _ = get(port, "/?folder=/workspace", cookie.partition(";")[0], host)
        told = json.loads(body)
        assert (status, told["cwd"], told["path"]) == (200, "/workspace", "/?folder=/workspace")
        running = all_processes(jobs, kubectl, f"{job}-1")
        assert "/workspace/tools/code-server" in running and token not in running
        assert token not in kubectl("logs", "-n", jobs.namespace, f"{job}-1", "-c", "trainer").stdout
    until("the server is gone from the pod", lambda: "code-server" not in all_processes(jobs, kubectl, f"{job}-1"))


@pytest.fixture(scope="module")
def lean(jobs: Jobs) -> Iterator[str]:
    """A job whose pods have no editors, whether or not `make editors` has put them beside the others on this machine."""

    def without_editors(spec: dict[str, Any]) -> None:
        for variable in spec["pod"]["env"]:
            if variable["name"] == "PYTHONPATH":
                variable["value"] = ":".join(path for path in variable["value"].split(":") if "editors" not in path)

    with cluster_like_local(jobs, "lean", without_editors) as cluster:
        jobs.start("lean", cluster=cluster)
        jobs.until_running("lean")
        yield "lean"
        jobs.end("lean")


@pytest.mark.parametrize(("verb", "lacks"), [(["jupyter", "lean"], "jupyterlab"), (["debug", "lean", "train.py"], "debugpy")])
def test_what_the_image_lacks_is_said(jobs: Jobs, lean: str, verb: list[str], lacks: str) -> None:
    done = lockstep(*verb, "-n", jobs.namespace)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert f"has no {lacks}" in done.stderr and "pip install" in done.stderr


def test_without_a_program_for_it_vscode_says_how_to_get_one_and_how_else_to_open_the_folder(jobs: Jobs, lean: str) -> None:
    done = lockstep("vscode", lean, "-n", jobs.namespace)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    assert "has no code-server or openvscode-server or code on its PATH: install one in the job's image" in done.stderr
    assert " code --folder-uri vscode-remote://k8s-container+" in done.stdout


def test_who_may_only_look_is_told_what_is_missing(
    jobs: Jobs, job: str, cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig_of("view", jobs, cluster, tmp_path)))
    for verb in (["shell", job], ["tensorboard", job]):
        done = lockstep(*verb, "-n", jobs.namespace)
        assert done.returncode in (1, 2) and len(done.stderr.splitlines()) == 1
        assert f"you may not run programs in pods of namespace {jobs.namespace} (pods/exec)" in done.stderr
