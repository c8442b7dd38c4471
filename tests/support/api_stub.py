"""An API server that has nothing, remembers what it was asked, and refuses what a test wants it to: for verbs whose requests matter more
than the cluster.
"""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

Object = dict[str, Any]
ALWAYS: dict[str, Object] = {
    "/version": {"gitVersion": "v1.36.0"},
    "/apis": {"kind": "APIGroupList", "groups": []},
    "/apis/lockstep.dev/v1alpha1": {"kind": "APIResourceList", "resources": []},
}


@dataclass
class ApiStub:
    """`objects`: path → what stands there. `forbidden`: plurals that the person may do nothing with; "*": everything."""

    objects: dict[str, Object] = field(default_factory=dict)
    forbidden: set[str] = field(default_factory=set)
    warnings: dict[str, str] = field(default_factory=dict)
    """Plural → what a write of it is warned of."""
    asked: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    """(method, path, query) of every request."""
    accepted: list[str] = field(default_factory=list)
    """The Accept header of each of them."""
    url: str = ""

    def answer(self, method: str, path: str, body: Object | bytes | None) -> tuple[int, Object | str]:
        """Status and reply: an object, or the text of a log. `body` is bytes where no JSON was sent."""
        plural = self.plural(path)
        if plural in self.forbidden or ("*" in self.forbidden and plural):
            verb = {"GET": "get", "POST": "create", "PATCH": "patch"}.get(method, "delete")
            message = f'{plural} is forbidden: User "someone" cannot {verb} resource "{plural}" in API group "" in the namespace "team"'
            return 403, {"kind": "Status", "status": "Failure", "reason": "Forbidden", "message": message, "code": 403}
        if path in ALWAYS | self.objects:
            return 200, (ALWAYS | self.objects)[path]
        if method != "GET":
            return 201, body if isinstance(body, dict) else {}
        if path.rsplit("/", 1)[-1] == plural:
            return 200, {"kind": "List", "metadata": {"resourceVersion": "1"}, "items": []}
        return 404, {"kind": "Status", "status": "Failure", "reason": "NotFound", "message": f"{path} not found", "code": 404}

    @staticmethod
    def plural(path: str) -> str:
        """`/api/v1/namespaces/team/pods/x` → pods; of /version and the like ''."""
        parts = path.strip("/").split("/")
        rest = parts[2:] if parts[0] == "api" else parts[3:] if parts[0] == "apis" else []
        if len(rest) > 2 and rest[0] == "namespaces":
            rest = rest[2:]
        return rest[0] if rest else ""


def _handler(stub: ApiStub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def _any(self) -> None:
            parts = urlsplit(self.path)
            size = int(self.headers.get("Content-Length") or 0)
            text = self.rfile.read(size)
            stub.asked.append((self.command, parts.path, dict(parse_qsl(parts.query))))
            stub.accepted.append(self.headers.get("Accept", ""))
            raw = self.headers.get("Content-Type") == "application/octet-stream"
            status, reply = stub.answer(self.command, parts.path, text if raw else json.loads(text) if text else None)
            content = reply.encode() if isinstance(reply, str) else json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/plain" if isinstance(reply, str) else "application/json")
            self.send_header("Content-Length", str(len(content)))
            if self.command != "GET" and (said := stub.warnings.get(stub.plural(parts.path))):
                quoted = said.replace('"', '\\"')
                self.send_header("Warning", f'299 - "{quoted}"')
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PATCH = do_PUT = do_DELETE = _any

        def log_message(self, format: str, *args: Any) -> None:
            """A test's output is not the place."""

    return Handler


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has gone before it was answered."""


@contextmanager
def served(stub: ApiStub, folder: Path, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None) -> Iterator[Path]:
    """The stub on a port of this machine, and a kubeconfig that reaches it by `host`."""
    server = _Server(("127.0.0.1", 0), _handler(stub))
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    stub.url = f"http{'s' if tls is not None else ''}://{host}:{server.server_address[1]}"
    try:
        yield kubeconfig(folder, stub.url)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def kubeconfig(folder: Path, url: str) -> Path:
    path = folder / "kubeconfig"
    clusters = [{"name": "c", "cluster": {"server": url}}]
    contexts = [{"name": "c", "context": {"cluster": "c", "user": "u"}}]
    users = [{"name": "u", "user": {"token": "t"}}]
    known = {"apiVersion": "v1", "kind": "Config", "clusters": clusters, "contexts": contexts, "users": users, "current-context": "c"}
    path.write_text(json.dumps(known), encoding="utf-8")
    return path
