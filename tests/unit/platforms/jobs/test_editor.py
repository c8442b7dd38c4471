"""What editors have in a pod, run here as a process: started as asked, behind its token, gone with whoever asked for it."""

from __future__ import annotations

import errno
import http.client
import json
import os
import re
import signal
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from email.message import Message
from pathlib import Path
from typing import Any

import pytest

from lockstep.platforms.inpod import editor, gate, source_of
from lockstep.platforms.jobs.editor import EditorRequest, attach_uri
from lockstep_spec.handshake import STRANGERS_MAX
from support.served import CODE_SERVER

SOURCE = source_of(editor).decode()
TOKEN, NAME = "a-token-of-this-test", "lockstep-test.localhost"
STAND_IN = f"""
import json, os, sys
config = next(a.split("=", 1)[1] for a in sys.argv if a.startswith("--config="))
settings = json.load(open(config))
program, sys.argv = {CODE_SERVER!r}, [sys.argv[0], "--socket", settings["ServerApp"]["sock"]]
more = "'config': config, 'mode': oct(os.stat(config).st_mode & 0o777), 'settings': settings, "
exec(program.replace("told = {{", "told = {{" + more))
"""
"""Stand-in for Jupyter: that for code-server, where its file says."""


@contextmanager
def asked(folder: Path, kind: str, *command: str, modules: str = "modules") -> Iterator[subprocess.Popen[str]]:
    """The program of the pod, with what it was asked for on its standard input."""
    environment = {**os.environ, "PYTHONPATH": str(folder / modules), "PATH": f"{folder / 'bin'}:/usr/bin:/bin"}
    process = subprocess.Popen(
        [sys.executable, "-c", SOURCE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        umask=0o022,
    )
    try:
        request = {
            "kind": kind,
            "folder": str(folder),
            "command": command,
            "cwd": str(folder),
            "token": TOKEN,
            "name": NAME,
            "source": SOURCE,
        }
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        yield process
    finally:
        if not process.stdin.closed:  # type: ignore[union-attr]
            process.stdin.close()  # type: ignore[union-attr]
        process.wait(timeout=60)
        for stream in (process.stdout, process.stderr):
            stream.close()


def heard(process: subprocess.Popen[str]) -> dict[str, Any]:
    return json.loads(process.stdout.readline())


def get(port: int, path: str, **headers: str) -> tuple[int, str, http.client.HTTPMessage]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", path, headers={"Host": f"{NAME}:{port}", **headers})
        response = connection.getresponse()
        return response.status, response.read().decode(errors="replace"), response.headers
    finally:
        connection.close()


def put_module(folder: Path, name: str, program: str) -> None:
    (folder / "modules" / name).mkdir(parents=True)
    (folder / "modules" / name / "__init__.py").touch()
    (folder / "modules" / name / "__main__.py").write_text(program)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def opened(port: int) -> str:
    """The cookie of a browser that has opened the address."""
    return get(port, f"/?token={TOKEN}")[2]["Set-Cookie"].partition(";")[0]


def test_a_notebook_server_listens_for_the_guard_alone_and_ends_with_the_connection(tmp_path: Path) -> None:
    put_module(tmp_path, "jupyterlab", STAND_IN)
    with asked(tmp_path, "jupyter") as process:
        port = heard(process)["port"]
        assert get(port, "/")[0] == 401
        code, body, _ = get(port, "/lab", Cookie=opened(port))
        told = json.loads(body)
        assert (code, told["mode"], told["cwd"], told["path"]) == (200, "0o600", str(tmp_path), "/lab")
        assert told["settings"]["ServerApp"]["sock"].startswith(f"{Path(told['config']).parent}/") and told["folder"] == "0o700"
        assert told["settings"]["KernelManager"]["transport"] == "ipc" and told["settings"]["IdentityProvider"]["token"] == ""
        seen = Path(f"/proc/{told['pid']}/cmdline").read_bytes() + Path(f"/proc/{told['pid']}/environ").read_bytes()
        assert b"jupyterlab" in seen and TOKEN.encode() not in seen
        process.stdin.close()  # the laptop is gone
        process.wait(timeout=60)
        assert not is_alive(told["pid"])
        assert not Path(told["config"]).parent.exists()


def test_a_server_that_would_not_end_is_gone_with_a_program_that_is_killed(tmp_path: Path) -> None:
    put_module(tmp_path, "jupyterlab", f"import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n{STAND_IN}")
    with asked(tmp_path, "jupyter") as process:
        port = heard(process)["port"]
        server = json.loads(get(port, "/", Cookie=opened(port))[1])["pid"]
        process.kill()  # as the end of a connection does that has waited long enough
        try:
            with pytest.raises(ConnectionError):
                while True:
                    get(port, "/")
        finally:
            with suppress(ProcessLookupError):
                os.kill(server, signal.SIGKILL)


def test_tensorboard_shows_nothing_without_the_token(tmp_path: Path) -> None:
    with asked(tmp_path, "tensorboard") as process:
        process_said = heard(process)
        assert "port" in process_said, process_said
        port = process_said["port"]
        code, body, _ = get(port, "/data/environment")
        assert code == 401 and "lockstep tensorboard" in body
        assert get(port, "/data/environment", Cookie="lockstep-0=x; other")[0] == 401
        code, _, headers = get(port, f"/?token={TOKEN}")
        assert (code, headers["Location"]) == (302, "/")
        assert "HttpOnly" in headers["Set-Cookie"] and "SameSite=Strict" in headers["Set-Cookie"]
        ours = headers["Set-Cookie"].partition(";")[0]
        for others in ("", 'prefs={"a":1}; ', "flag; ", "a b=c; "):
            code, body, _ = get(port, "/data/environment", Cookie=others + ours)
            assert code == 200 and json.loads(body)["data_location"] == str(tmp_path), others


def test_connections_are_taken_again_after_a_moment_without_files(monkeypatch: pytest.MonkeyPatch) -> None:
    lacks, accept = [OSError(errno.EMFILE, "Too many open files")], socketserver.TCPServer.get_request
    monkeypatch.setattr(socketserver.TCPServer, "get_request", lambda server: accept(server) if not lacks else raised(lacks.pop()))
    with gate.GuardServer(0, gate.Gate(TOKEN, "vscode", NAME), "") as guard:
        guard.server_activate()
        threading.Thread(target=guard.serve_forever, daemon=True).start()
        try:
            assert get(guard.server_address[1], "/")[0] == 401
        finally:
            guard.shutdown()


def raised(error: OSError) -> Any:
    raise error


QUICK_NEIGHBOR = """
import socket
close, ports = socket.socket.close, []
def closed(self):
    address = self.getsockname() if self.fileno() >= 0 and self.family == socket.AF_INET else None
    close(self)
    try:
        ports.append(address and socket.create_server(address))
    except OSError:
        pass
socket.socket.close = closed
"""
"""Takes each port of loopback as soon as it is free again, as another process of that host may."""


def test_a_neighbor_gets_neither_the_guard_s_port_nor_the_browser_with_the_token(tmp_path: Path) -> None:
    put_program(tmp_path, "code-server")
    put_module(tmp_path, "unused", "")
    (tmp_path / "modules" / "sitecustomize.py").write_text(QUICK_NEIGHBOR)
    with asked(tmp_path, "vscode") as process:
        assert get(heard(process)["port"], f"/?token={TOKEN}")[0] == 302


def test_slow_strangers_make_room_for_others_and_take_none_of_who_was_let_in(tmp_path: Path) -> None:
    put_program(tmp_path, "code-server")
    with asked(tmp_path, "vscode") as process, ExitStack() as stack:
        port = heard(process)["port"]
        browser, headers = http.client.HTTPConnection("127.0.0.1", port, timeout=60), {"Host": f"{NAME}:{port}", "Cookie": opened(port)}
        stack.callback(browser.close)
        browser.request("GET", "/", headers=headers)
        assert browser.getresponse().read()
        slow = [stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60)) for _ in range(STRANGERS_MAX)]
        for connection in slow:
            connection.sendall(b"GET / HTTP/1.1\r\n")
        assert get(port, "/")[0] == 401
        assert slow[0].recv(1) == b""
        own = browser.sock
        browser.request("GET", "/", headers=headers)
        assert browser.getresponse().status == 200 and browser.sock is own


def test_a_silent_connection_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate.Guard, "timeout", gate.Guard.timeout / 1000)
    with gate.GuardServer(0, gate.Gate(TOKEN, "vscode", NAME), "") as guard:
        guard.server_activate()
        threading.Thread(target=guard.serve_forever, daemon=True).start()
        with socket.create_connection(guard.server_address, timeout=60) as silent:
            assert silent.recv(1) == b""
        guard.shutdown()


def put_program(folder: Path, name: str) -> None:
    (folder / "bin").mkdir()
    (folder / "bin" / name).write_text(CODE_SERVER.replace("/usr/bin/env python3", sys.executable))
    (folder / "bin" / name).chmod(0o755)


def test_a_program_of_vscode_counts_beside_the_packages_that_python_finds(tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    (environment / "lib/python/site-packages").mkdir(parents=True)
    put_program(environment, "code-server")
    with asked(tmp_path, "vscode", modules="environment/lib/python/site-packages") as process:
        assert get(heard(process)["port"], "/")[0] == 401


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("code-server", ["--auth", "none", "--disable-telemetry"]),
        ("openvscode-server", ["--without-connection-token"]),
        ("code", ["serve-web", "--without-connection-token", "--accept-server-license-terms"]),
    ],
)
def test_vscode_is_shown_to_who_has_the_token_and_by_no_other_way(tmp_path: Path, name: str, words: list[str]) -> None:
    put_program(tmp_path, name)
    with asked(tmp_path, "vscode") as process:
        port = heard(process)["port"]
        code, body, _ = get(port, "/?folder=/workspace")
        assert code == 401 and "lockstep vscode" in body
        assert get(port, "/", Cookie="lockstep-0=x; other")[0] == 401 and get(port, "/?token=wrong")[0] == 401
        code, _, headers = get(port, f"/?folder=/workspace&token={TOKEN}")
        assert (code, headers["Location"]) == (302, "/?folder=%2Fworkspace")
        assert "HttpOnly" in headers["Set-Cookie"] and "SameSite=Strict" in headers["Set-Cookie"]
        cookie = headers["Set-Cookie"].partition(";")[0]
        assert TOKEN not in cookie and headers["Referrer-Policy"] == "no-referrer"
        told = json.loads(get(port, "/", Cookie=cookie)[1])
        assert set(words) <= set(told["argv"]) and told["cwd"] == str(tmp_path) and told["folder"] == "0o700"
        parent = Path(f"/proc/{told['pid']}/stat").read_text().rpartition(")")[2].split()[1]
        for pid in (told["pid"], parent):
            assert TOKEN.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/environ").read_bytes()
        private = Path(told["socket"]).parent
        assert {oct(path.stat().st_mode & 0o777) for path in private.glob("*.json")} == {"0o600"}
        assert echoed(port, cookie) == b"an editor's bytes"
        process.stdin.close()  # the laptop is gone
        process.wait(timeout=60)
        assert not is_alive(told["pid"]) and not is_alive(int(parent)) and not private.exists()


def echoed(port: int, cookie: str) -> bytes:
    """What comes back on a connection that was made one of messages, as an editor's is."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        head = f"GET /echo HTTP/1.1\r\nHost: {NAME}:{port}\r\nOrigin: http://{NAME}:{port}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        connection.sendall(f"{head}Cookie: {cookie}\r\n\r\n".encode())
        answer = connection.makefile("rb")
        assert answer.readline().split()[1] == b"101"
        while answer.readline().strip():
            pass
        connection.sendall(b"an editor's bytes")
        connection.shutdown(socket.SHUT_WR)
        return answer.read()


@pytest.mark.parametrize("kind", ["vscode", "tensorboard", "jupyter"])
def test_each_request_of_a_kept_connection_is_checked(tmp_path: Path, kind: str) -> None:
    put_program(tmp_path, "code-server")
    put_module(tmp_path, "jupyterlab", STAND_IN)
    with asked(tmp_path, kind) as process:
        port = heard(process)["port"]
        cookie = get(port, f"/?token={TOKEN}")[2]["Set-Cookie"].partition(";")[0]
        own, other = f"http://{NAME}:{port}", f"http://127.0.0.1:{port}"
        refused: list[tuple[int, dict[str, str]]] = [
            (401, {}),
            (401, {"Cookie": cookie.partition("=")[0] + "=" + TOKEN}),
            (421, {"Cookie": cookie, "Host": f"127.0.0.1:{port}"}),
            (421, {"Cookie": cookie, "Host": f"localhost:{port}"}),
            (421, {"Cookie": cookie, "Host": f"x.{NAME}:{port}"}),
            (403, {"Cookie": cookie, "Origin": other}),
            (403, {"Cookie": cookie, "Origin": "null"}),
            (403, {"Cookie": cookie, "Origin": f"http://{NAME}:{port + 1}"}),
            (403, {"Cookie": cookie, "Origin": own.replace("http", "https")}),
            (403, {"Cookie": cookie, "Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "no-cors"}),
            (
                403,
                {
                    "Cookie": cookie,
                    "Sec-Fetch-Site": "cross-site",
                    "Sec-Fetch-Mode": "websocket",
                    "Upgrade": "websocket",
                    "Connection": "Upgrade",
                },
            ),
        ]
        for expected, headers in refused:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            for status, sent in ((200, {"Cookie": cookie, "Origin": own}), (200, {"Cookie": cookie}), (expected, headers)):
                connection.request("GET", "/", headers={"Host": f"{NAME}:{port}", **sent})
                answer = connection.getresponse()
                answer.read()
                assert answer.status == status, headers
            connection.close()


def test_a_refusal_says_which_name_to_open_and_what_to_do_where_no_browser_finds_it(tmp_path: Path) -> None:
    with asked(tmp_path, "tensorboard") as process:
        port = heard(process)["port"]
        code, body, _ = get(port, f"/?token={TOKEN}", Host=f"127.0.0.1:{port}")
    assert code == 421 and f"by its name {NAME}" in body and f"`127.0.0.1 {NAME}` to your hosts file" in body


@pytest.mark.parametrize("path", ["//evil.example", "/\\\\evil.example", "/\\\\/evil.example"])
def test_no_address_leads_from_here_to_another_server(path: str) -> None:
    headers = Message()
    headers["Host"] = f"{NAME}:1"
    refusal = gate.Gate(TOKEN, "vscode", NAME).refused(f"{path}?token={TOKEN}", headers)
    assert refusal is not None and dict(refusal[1])["Location"] == "/evil.example"


def test_no_page_of_an_editor_tells_other_servers_its_name(tmp_path: Path) -> None:
    """Who knows it can serve by another port under that name, where the browser sends the cookie, too."""
    put_program(tmp_path, "code-server")
    with asked(tmp_path, "vscode") as process:
        port = heard(process)["port"]
        assert get(port, "/", Cookie=opened(port))[2]["Referrer-Policy"] == "same-origin"


HEADS = [
    ("GET / HTTP/1.1\r\nHost: {host}\r\nHost: evil.example", 421),
    ("GET / HTTP/1.1\r\nHost : {host}", 421),
    ("GET / HTTP/1.1\r\nhOST: {host}", 200),
    ("GET / HTTP/1.1\r\nHost: {name}.:{port}", 421),
    ("GET / HTTP/1.1\r\nHost: {name}", 421),
    ("GET / HTTP/1.1\r\nHost: evil.example:1#{host}", 421),
    ("GET http://evil.example/ HTTP/1.1\r\nHost: {host}", 421),
    ("GET http://{host}/ HTTP/1.1\r\nHost: {host}", 421),
    ("OPTIONS * HTTP/1.1\r\nHost: {host}", 421),
    ("CONNECT evil.example:1 HTTP/1.1\r\nHost: {host}", 501),
    ("GET / HTTP/1.1\r\nHost: {host}\r\nOrigin: http://{host}\r\norigin: http://evil.example", 403),
    ("GET / HTTP/1.1\r\nHost: {host}\r\nCookie: {cookie}x", 200),
    ("POST / HTTP/1.1\r\nHost: {host}\r\nContent-Length: 0\r\nContent-Length: 40", 411),
    ("POST / HTTP/1.1\r\nHost: {host}\r\nContent-Length: +40", 411),
    ("POST / HTTP/1.1\r\nHost: {host}\r\nTransfer-Encoding : chunked\r\nContent-Length: 0", 401),
    ("POST / HTTP/1.1\r\nHost: {host}\r\nTransfer-Encoding: chunked\r\nContent-Length: 0", 411),
]
"""Heads of requests that two readers would read in two ways, or that only look so, and the status of their answers."""


def test_a_request_that_two_readers_would_read_in_two_ways_is_refused_with_all_that_follows(tmp_path: Path) -> None:
    put_program(tmp_path, "code-server")
    with asked(tmp_path, "vscode") as process:
        port = heard(process)["port"]
        cookie = opened(port)
        smuggled = f"GET /smuggled HTTP/1.1\r\nHost: {NAME}:{port}\r\nCookie: {cookie}\r\n\r\n"
        for head, status in HEADS:
            lines = head.format(host=f"{NAME}:{port}", name=NAME, port=port, cookie=cookie)
            with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
                connection.sendall(f"{lines}\r\nCookie: {cookie}\r\n\r\n{smuggled}".encode())
                connection.shutdown(socket.SHUT_WR)
                answer = connection.makefile("rb").read()
            assert answer.split()[1] == str(status).encode() and (status == 200) == (b"/smuggled" in answer), (head, answer)


def test_a_body_and_a_stream_pass_the_guard_whole(tmp_path: Path) -> None:
    """A program that answers with what it got, once without a length."""
    server = """
import http.server, socketserver, sys
options = dict(zip(sys.argv, sys.argv[1:]))
class Page(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(201)
        self.send_header("X-Connection", self.headers["Connection"])
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_): pass
class Server(socketserver.ThreadingUnixStreamServer):
    def get_request(self): return self.socket.accept()[0], ("here", 0)
Server(options["--socket"], Page).serve_forever()
"""
    put_program(tmp_path, "code-server")
    (tmp_path / "bin" / "code-server").write_text(f"#!{sys.executable}\n{server}")
    with asked(tmp_path, "vscode") as process:
        port = heard(process)["port"]
        cookie = get(port, f"/?token={TOKEN}")[2]["Set-Cookie"].partition(";")[0]
        connection, body = http.client.HTTPConnection("127.0.0.1", port, timeout=60), os.urandom(300_000)
        for _ in range(2):
            connection.request("POST", "/", body, {"Host": f"{NAME}:{port}", "Cookie": cookie})
            answer = connection.getresponse()
            assert (answer.status, answer.headers["Transfer-Encoding"], answer.headers["X-Connection"]) == (201, "chunked", "close")
            assert answer.read() == body
        connection.close()


def test_a_request_that_is_none_is_answered_and_ends_nothing(tmp_path: Path) -> None:
    put_program(tmp_path, "code-server")
    with asked(tmp_path, "vscode") as process:
        port = heard(process)["port"]
        for data in (b"\r\n\r\n", b"GET\r\n\r\n", b"\xff\xff \xff\r\n\r\n"):
            with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
                connection.sendall(data)
                assert b" 200 " not in connection.makefile("rb").read()
        assert get(port, "/")[0] == 401


def test_a_program_of_vscode_that_ends_at_once_is_told_with_its_last_words(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "code").write_text("#!/bin/sh\necho no such option: $1\nexit 4\n")
    (tmp_path / "bin" / "code").chmod(0o755)
    with asked(tmp_path, "vscode") as process:
        assert heard(process) == {"ended": 4, "said": ["no such option: serve-web"]}


def test_an_address_opens_the_folder_and_holds_the_token() -> None:
    request = EditorRequest("vscode", "/workspace/my code", token="t", name="x.localhost")
    assert request.address(8443) == "http://x.localhost:8443/?folder=/workspace/my%20code&token=t"
    assert EditorRequest("jupyter", token="t", name="x.localhost").address(8888) == "http://x.localhost:8888/?token=t"


def test_every_server_has_a_name_of_its_own() -> None:
    names = {EditorRequest("vscode").name for _ in range(99)}
    assert len(names) == 99 and all(re.fullmatch(r"lockstep-[0-9a-f]{12}\.localhost", name) for name in names)


def test_the_desktop_s_address_of_a_folder_takes_a_context_with_slashes() -> None:
    """As those that `oc login` writes."""
    assert (
        attach_uri("team/api-x:6443/ada", "team", "x-0", "trainer", "r.example.com/t:1", "/workspace")
        == "vscode-remote://k8s-container+context=team%2Fapi-x%3A6443%2Fada+podname=x-0+namespace=team+name=trainer+image=r.example.com%2Ft%3A1/workspace"
    )


def put_debugpy(folder: Path, program: str) -> None:
    """A stand-in for debugpy and the part of it that makes the connection."""
    put_module(folder, "debugpy/server", "")
    (folder / "modules/debugpy/__init__.py").touch()
    (folder / "modules/debugpy/server/cli.py").write_text(f"def main():\n    {program}\n")
    (folder / "modules/pydevd.py").touch()


def test_a_debugger_reaches_a_script_by_a_private_socket_and_no_port_listens(tmp_path: Path) -> None:
    put_debugpy(tmp_path, "import pydevd; it = pydevd.start_client('127.0.0.1', 1); it.sendall(b'DAP ' + it.recv(9)); it.recv(1)")
    with asked(tmp_path, "debug", "train.py") as process:
        path = Path(heard(process)["socket"])
        assert [oct(one.stat().st_mode & 0o777) for one in (path.parent, path)] == ["0o700", "0o600"]
        assert listening_ports(process.pid) == []
        pipe = subprocess.Popen([sys.executable, "-c", SOURCE, "pipe", str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert pipe.communicate(b"is here", timeout=60)[0] == b"DAP is here"
        assert heard(process)["ended"] == 0
        with socket.socket(socket.AF_UNIX) as second:
            assert second.connect_ex(str(path)) != 0


def listening_ports(parent: int) -> list[str]:
    """Lines of the kernel's table for sockets at which this process or its children listen."""
    children = [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
    held = {str(entry.readlink()) for pid in (parent, *children) for entry in Path(f"/proc/{pid}/fd").iterdir() if entry.is_symlink()}
    lines = [line for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return [line for line in lines if line.split()[3] == "0A" and f"socket:[{line.split()[9]}]" in held]


def test_a_script_under_the_debugger_is_heard_to_its_end(tmp_path: Path) -> None:
    put_debugpy(tmp_path, "import sys; print('under the debugger:', sys.argv[1:]); sys.exit(3)")
    with asked(tmp_path, "debug", "train.py", "--epochs", "3") as process:
        answer = heard(process)
        while "ended" not in answer:
            answer = heard(process)
        assert answer["ended"] == 3
        said = process.stderr.readline()
        assert "'--wait-for-client', 'train.py', '--epochs', '3'" in said and "listen" not in said


def test_what_a_debugged_script_or_a_notebook_writes_is_the_group_s(tmp_path: Path) -> None:
    """Pods of another transport have another user."""
    put_debugpy(tmp_path, "import pathlib; pathlib.Path('made').touch()")
    with asked(tmp_path, "debug", "train.py") as process:
        while "ended" not in heard(process):
            pass
    assert oct((tmp_path / "made").stat().st_mode & 0o777) == "0o664"


def test_a_server_that_ends_at_once_is_told_with_its_last_words_and_without_the_token(tmp_path: Path) -> None:
    put_module(tmp_path, "jupyterlab", f"import sys; print('{TOKEN} in the log'); sys.exit('no such option')")
    with asked(tmp_path, "jupyter") as process:
        assert heard(process) == {"ended": 1, "said": ["… in the log", "no such option"]}


@pytest.mark.parametrize(
    ("kind", "lacks"),
    [
        ("jupyter", "jupyterlab or notebook or jupyter_server: install it in the job's image (pip install "),
        ("debug", "debugpy: install it in the job's image (pip install "),
        (
            "vscode",
            (
                "code-server or openvscode-server or code on its PATH: install one in the job's image (lockstep build trainer --arg"
                " CODE_SERVER=ADDRESS --arg CODE_SERVER_SHA256="
            ),
        ),
    ],
)
def test_what_the_image_lacks_is_said_with_the_remedy(tmp_path: Path, kind: str, lacks: str) -> None:
    with asked(tmp_path, kind, "x.py") as process:
        answer = heard(process)
        assert f"has no {lacks}" in answer["failed"] and answer["lacks"] is True


@pytest.mark.parametrize(
    ("has_pip", "has_uv", "line"),
    [
        (True, True, f"{sys.executable} -m pip install"),
        (False, True, f"{{data}}/lockstep/uv/0.10.1/uv pip install --python {sys.executable}"),
        (False, False, f"uv pip install --python {sys.executable}"),
    ],
)
def test_a_host_s_environment_without_pip_gets_packages_by_the_uv_that_made_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_pip: bool, has_uv: bool, line: str
) -> None:
    if has_uv:
        for age, version in enumerate(("0.10.1", "0.9.2", "0.11.0")):
            (tmp_path / "lockstep/uv" / version).mkdir(parents=True)
            (tmp_path / "lockstep/uv" / version / "uv").touch()
            os.utime(tmp_path / "lockstep/uv" / version / "uv", (1000 - age, 1000 - age))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if has_pip and name == "pip" else None)
    assert editor.installer() == line.format(data=tmp_path)
    assert editor.lacking("debug", on_host=True) == f"{sys.executable} has no debugpy: on this host, {editor.installer()} debugpy"
