"""A notebook of JupyterLab's, a debugger's session and VS Code in a pod of a real job, as a browser and an editor have them."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import aiohttp
import pytest

from lockstep.cli.shared.clusterfiles import load_cluster
from lockstep.environments import cache_root
from support.checkout import script
from support.clusters.cluster_jobs import Jobs, until
from support.dap import Debugger
from support.served import ADDRESS, LOCKSTEP, OnLoopback, all_processes, started

Kubectl = Callable[..., subprocess.CompletedProcess[str]]
DEBUGGED = """import os, sys
steps = int(sys.argv[1])
for step in range(steps):
    loss = 8.0 / (step + 1)
print("trained", steps, "steps in", os.getcwd(), "loss", loss, flush=True)
sys.exit(3)
"""
LOSS_LINE = 4


def python_path() -> str:
    """PYTHONPATH of the pods of cluster `local`, in which they find JupyterLab and debugpy then, as `make editors` installs them.

    The trainer's image installs the same lock file.
    """
    script("scripts/setup.py").publish_editors(cache_root())
    return next(variable.value for variable in load_cluster("local").profile.spec.pod.env if variable.name == "PYTHONPATH")


@pytest.fixture(scope="module")
def job(jobs: Jobs) -> Iterator[str]:
    """A job whose pods have what the trainer's image has for editors."""
    jobs.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "debugged"}, "data": {"debugged.py": DEBUGGED}})
    mounts = [{"name": name, "mountPath": f"/{name}", "configMap": {"name": name}} for name in ("scripts", "debugged")]
    jobs.start("studio", podTemplate={"volumes": mounts}, env=[{"name": "PYTHONPATH", "value": python_path()}])
    jobs.until_running("studio")
    yield "studio"
    jobs.end("studio")


def test_a_notebook_runs_cells_in_the_pod_for_whoever_has_the_token(jobs: Jobs, job: str, kubectl: Kubectl) -> None:
    with started(jobs, "jupyter", job, "--node", "1") as process:
        address = process.stdout.readline().strip()
        assert ADDRESS.match(address), process.communicate()
        base, _, token = address.partition("?token=")
        cell = (
            "import os, subprocess, sys\nfrom ipykernel.connect import get_connection_info\nsubprocess.Popen(['sleep', '4242'])\n"
            "print('node', os.environ['NODE_RANK'], 'of',"
            " os.environ['NNODES'], 'in', os.getcwd(), get_connection_info(unpack=True)['transport'])"
        )
        assert asyncio.run(shown_by(base, token, cell)) == "node 1 of 2 in /workspace ipc\n"
        running = all_processes(jobs, kubectl, f"{job}-1")
        assert "ipykernel" in running and "4242" in running and token not in running
    until("server, kernel and what a cell started are gone", lambda: not any(
        name in all_processes(jobs, kubectl, f"{job}-1") for name in ("jupyter", "ipykernel", "4242")
    ))  # fmt: skip


def browser(base: str) -> aiohttp.ClientSession:
    connector, jar = aiohttp.TCPConnector(resolver=OnLoopback()), aiohttp.CookieJar(unsafe=True)
    return aiohttp.ClientSession(base, cookie_jar=jar, timeout=aiohttp.ClientTimeout(120), connector=connector)


async def shown_by(base: str, token: str, cell: str) -> str:
    """What a cell prints in a new kernel, for a browser that has opened the address once."""
    async with browser(base) as session:
        async with session.get("api/contents") as answer:
            assert answer.status == 401
        async with session.get("", params={"token": token}) as page:
            assert page.url.path == "/lab" and "jupyter-config-data" in await page.text()
        session.headers["X-XSRFToken"] = next(cookie.value for cookie in session.cookie_jar if cookie.key == "_xsrf")
        async with session.post("api/kernels", json={}) as answer:
            assert answer.status == 201, await answer.text()
            kernel = (await answer.json())["id"]
        async with session.ws_connect(f"api/kernels/{kernel}/channels") as channels:
            header = {"msg_id": "cell", "msg_type": "execute_request", "username": "", "session": "test", "version": "5.3"}
            content = {"code": cell, "silent": False, "store_history": False, "user_expressions": {}, "allow_stdin": False}
            await channels.send_json({"channel": "shell", "header": header, "parent_header": {}, "metadata": {}, "content": content})
            text = ""
            waits_for = {"execute_reply", "idle"}  # by two sockets of the kernel: either may come first, and the output is whole at idle
            async for message in channels:
                said: dict[str, Any] = json.loads(message.data)
                if said["parent_header"].get("msg_id") != "cell":
                    continue
                if said["msg_type"] == "stream":
                    text += said["content"]["text"]
                elif said["msg_type"] == "execute_reply":
                    assert said["content"]["status"] == "ok", said["content"]
                waits_for -= {said["msg_type"], said["content"].get("execution_state")}
                if not waits_for:
                    return text
    raise AssertionError(f"the kernel's connection ended after {text!r}")


@pytest.mark.long
def test_code_server_from_npm_shows_the_workspace_to_whoever_has_the_token(jobs: Jobs, job: str, kubectl: Kubectl) -> None:
    script("scripts/codeserver.py").publish(cache_root(), script("scripts/setup.py").publish_editors(cache_root()))
    with started(jobs, "vscode", job, "--node", "1") as process:
        address = [process.stdout.readline().strip() for _ in range(3)][-1]
        assert ADDRESS.match(address), process.communicate()
        base, _, query = address.partition("?")
        assert "code/didStartRenderer" in asyncio.run(opened(base, query))
        assert "package/out/node/entry.js" in all_processes(jobs, kubectl, f"{job}-1")
    until("the server is gone from the pod", lambda: "entry.js" not in all_processes(jobs, kubectl, f"{job}-1"))


async def opened(base: str, query: str) -> str:
    """The page that the address leads to, once one of its scripts and the editor's own connection have been answered, too."""
    async with browser(base) as session:
        async with session.get("") as refused:
            assert refused.status == 401
        async with session.get(f"?{query}") as answer:
            assert (answer.status, answer.url.query) == (200, {"folder": "/workspace"})
            page = await answer.text()
        workbench = re.search(r'src="(\S+/workbench\.js)"', page)
        assert workbench is not None, page
        async with session.get(workbench[1]) as answer:
            assert answer.status == 200 and len(await answer.read()) > 1_000_000
        connection = re.search(r"(stable-\w+)", page)
        assert connection is not None, page
        asks = f"{connection[1]}?reconnectionToken=x&reconnection=false&skipWebSocketFrames=false"
        async with session.ws_connect(asks, timeout=aiohttp.ClientWSTimeout(ws_close=1)):  # it doesn't say goodbye
            return page


def test_a_script_stops_at_a_line_shows_its_variables_and_goes_on_to_its_end(jobs: Jobs, job: str) -> None:
    command = [*LOCKSTEP, "debug", job, "/debugged/debugged.py", "-n", jobs.namespace, "--", "2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        text = ""
        while not text.endswith("Ctrl-C ends it.\n"):
            text += (line := process.stdout.readline())
            assert line, process.communicate()
        entry = json.loads(text.partition("configurations:")[2].rpartition("}")[0] + "}")
        editor = Debugger(entry["connect"]["port"])
        try:
            editor.result("initialize", clientID="test", adapterID=entry["type"], pathFormat="path")
            attached = editor.ask("attach", **{key: entry[key] for key in ("name", "type", "request", "connect")})
            editor.event("initialized")
            editor.result("setBreakpoints", source={"path": "/debugged/debugged.py"}, breakpoints=[{"line": LOSS_LINE}])
            editor.result("configurationDone")
            editor.result_of(attached)
            stops = [stopped_with(editor) for _ in range(2)]
        finally:
            editor.close()
        assert stops == [{"step": "0", "steps": "2"}, {"step": "1", "steps": "2"}]
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert "trained 2 steps in /workspace loss 4.0" in err, (out, err)
    assert process.returncode == 1 and f"debug in pod {job}-0: it ended with exit code 3" in err


def stopped_with(editor: Debugger) -> dict[str, str]:
    """step and steps where it stops next; then it goes on."""
    thread = editor.event("stopped")["threadId"]
    frame = editor.result("stackTrace", threadId=thread)["stackFrames"][0]
    assert frame["line"] == LOSS_LINE
    found = {name: editor.result("evaluate", expression=name, frameId=frame["id"], context="hover")["result"] for name in ("step", "steps")}
    editor.result("continue", threadId=thread)
    return found
