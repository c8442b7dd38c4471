"""Verbs of the command line that serve something until Ctrl-C, and what their pods run meanwhile."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from aiohttp.abc import AbstractResolver, ResolveResult

from support.clusters.cluster_jobs import Jobs

LOCKSTEP = [sys.executable, "-m", "lockstep.cli.main"]
CODE_SERVER = """#!/usr/bin/env python3
import http.server, json, os, socketserver, sys
options = dict(zip(sys.argv, sys.argv[1:]))
path = options.get("--socket") or options["--socket-path"]
told = {"argv": sys.argv[1:], "cwd": os.getcwd(), "pid": os.getpid(), "socket": path,
        "folder": oct(os.stat(os.path.dirname(path)).st_mode & 0o777)}
class Page(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        if self.path == "/echo":
            self.send_response(101)
            self.end_headers()
            self.wfile.write(self.rfile.read())
            self.close_connection = True
            return
        body = json.dumps(told | {"path": self.path}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_): pass
class Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    def get_request(self):
        return self.socket.accept()[0], ("here", 0)
Server(path, Page).serve_forever()
"""
"""Stand-in for code-server, openvscode-server and `code serve-web`, which show VS Code in a browser. It listens at the socket that it was
told, and says how it was started. At /echo it sends back what it gets.
"""


ADDRESS = re.compile(r"^http://(lockstep-[0-9a-f]{12}\.localhost:(\d+))(/\?(?:folder=/workspace&)?token=(.+))$")
"""Address that a verb prints: the server's own name with its port, the port, the rest, and the token in it."""


class OnLoopback(AbstractResolver):
    """What browsers do with names below `localhost`, which not every system's resolver knows."""

    async def resolve(self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET) -> list[ResolveResult]:
        return [{"hostname": host, "host": "127.0.0.1", "port": port, "family": socket.AF_INET, "proto": 0, "flags": 0}]

    async def close(self) -> None: ...


@contextmanager
def started(jobs: Jobs, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A verb that goes on until Ctrl-C, which it gets."""
    command = [*LOCKSTEP, *arguments, "-n", jobs.namespace]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        yield process
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
    finally:
        process.kill()
        process.communicate()


def all_processes(jobs: Jobs, kubectl: Callable[..., subprocess.CompletedProcess[str]], pod: str) -> str:
    """Arguments and variables of everything in the pod, but for this look itself."""
    look = "import glob\nfor p in glob.glob('/proc/[0-9]*/cmdline') + glob.glob('/proc/[0-9]*/environ'):\n"
    look += " try: print(open(p).read() if 'all_processes' not in open(p).read() else '')\n except OSError: pass\n# all_processes"
    return kubectl("exec", "-n", jobs.namespace, pod, "-c", "trainer", "--", "python3", "-c", look).stdout
