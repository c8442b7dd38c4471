"""Kubeconfig files, read without the client library, whose import takes longer than most verbs: who asks which server.

What kubectl documents: several files (the first that names a thing counts), contexts, certificates and tokens as text or file, user and password, and
credential plugins (`exec`, by which `oc`, EKS, GKE and OIDC logins work). The legacy `auth-provider` is left to the library (`read` returns None).
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from lockstep.api.errors import ConfigError
from lockstep.plan.proxy import proxy_of

Values = dict[str, Any]
RENEWED_SECONDS = 60.0
"""A plugin's token is fetched anew this long before its end; a token's file is read again after as long."""
PLUGIN_SECONDS = 300.0
"""A plugin may open a browser and wait for a person."""
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


async def nobody() -> str | None:
    """No Authorization header: a client certificate says who asks, or nothing does."""
    return None


@dataclass(frozen=True)
class Server:
    """An API server, and how to prove to it who asks."""

    url: str
    namespace: str | None = None
    """The context's."""
    tls: ssl.SSLContext | None = None
    """None: plain HTTP."""
    authorization: Callable[[], Awaitable[str | None]] = nobody
    """The header of that name, as it has to be now."""
    tls_name: str | None = None
    """The name in the server's certificate, where it isn't the URL's."""
    proxy: str | None = None
    """None: directly, whatever the environment says."""


def read(paths: str, context: str | None = None) -> Server | None:
    """The server of `context`, or of the current one. None: only the client library can log in there. Raises ConfigError."""
    merged = _merged(paths)
    name = context or merged["current-context"]
    if not name:
        raise ConfigError(f"{paths} names no current-context; there are {_names(merged['contexts'])}")
    chosen = _named(merged["contexts"], name, "context", paths)
    cluster = _named(merged["clusters"], chosen.get("cluster"), "cluster", paths)
    user = _named(merged["users"], chosen["user"], "user", paths) if chosen.get("user") else {}
    if "auth-provider" in user:
        return None
    if not cluster.get("server"):
        raise ConfigError(f"cluster {chosen.get('cluster')} in {paths} has no server")
    plugin = _Plugin(user["exec"], cluster) if "exec" in user else None
    proved = plugin.credential() if plugin is not None else {}
    return Server(
        url=str(cluster["server"]).rstrip("/"),
        namespace=chosen.get("namespace"),
        tls=_tls(cluster, user, proved) if str(cluster["server"]).startswith("https") else None,
        authorization=plugin.authorization if plugin is not None and "token" in proved else _stated(user),
        tls_name=cluster.get("tls-server-name"),
        proxy=cluster.get("proxy-url") or proxy_of(str(cluster["server"]), os.environ),
    )


def namespace_of_context(paths: str, context: str | None) -> str | None:
    """The namespace that `context`, or the current one, names; None where it names none, or there is nothing to read."""
    try:
        merged = _merged(paths)
    except ConfigError:
        return None
    chosen: Values = merged["contexts"].get(context or merged["current-context"]) or {}
    return chosen.get("namespace") or None


def _merged(paths: str) -> Values:
    """The files' clusters, contexts and users by name; each knows its folder, for relative paths."""
    merged: Values = {"clusters": {}, "contexts": {}, "users": {}, "current-context": None}
    found = [Path(path).expanduser() for path in paths.split(os.pathsep) if path]
    if not any(path.exists() for path in found):
        raise ConfigError(f"there is no kubeconfig at {paths}")
    for path in filter(Path.exists, found):
        try:
            content = yaml.load(path.read_text(encoding="utf-8"), _Loader) or {}  # noqa: S506 (a safe loader)
            for kind, key in (("clusters", "cluster"), ("contexts", "context"), ("users", "user")):
                for item in content.get(kind) or []:
                    merged[kind].setdefault(item["name"], {**(item.get(key) or {}), "folder": path.resolve().parent})
            merged["current-context"] = merged["current-context"] or content.get("current-context")
        except (OSError, yaml.YAMLError, AttributeError, KeyError, TypeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is no kubeconfig: {' '.join(str(error).split())}") from None
    return merged


def _names(known: Values) -> str:
    return ", ".join(sorted(map(str, known))) or "none"


def _named(known: Values, name: Any, kind: str, paths: str) -> Values:
    if name not in known:
        raise ConfigError(f"{paths} has no {kind} {name}; there are {_names(known)}")
    return dict(known[name])


def _bytes(values: Values, key: str) -> bytes | None:
    """`key-data` (base64), else the file `key`."""
    if values.get(f"{key}-data"):
        return base64.b64decode(values[f"{key}-data"])
    if values.get(key):
        path = values["folder"] / Path(str(values[key])).expanduser()
        try:
            return bytes(path.read_bytes())
        except OSError as error:
            raise ConfigError(f"{key} of the kubeconfig can't be read: {error}") from None
    return None


def _tls(cluster: Values, user: Values, proved: Values) -> ssl.SSLContext:
    authority = _bytes(cluster, "certificate-authority")
    try:
        context = ssl.create_default_context(cadata=authority.decode() if authority else None)
        certificate, key = _bytes(user, "client-certificate"), _bytes(user, "client-key")
        if proved.get("clientCertificateData"):
            certificate, key = proved["clientCertificateData"].encode(), str(proved.get("clientKeyData", "")).encode()
        if certificate and key:
            with _file(certificate) as certificate_file, _file(key) as key_file:
                context.load_cert_chain(certificate_file, key_file)
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(f"a certificate of the kubeconfig can't be used: {error}") from None
    if cluster.get("insecure-skip-tls-verify"):
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


@contextmanager
def _file(content: bytes) -> Any:
    """OpenSSL takes a client's certificate from files only. Readable for its owner, and gone a moment later."""
    descriptor, name = tempfile.mkstemp(prefix="lockstep-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        yield name
    finally:
        Path(name).unlink()


def _stated(user: Values) -> Callable[[], Awaitable[str | None]]:
    """The header for a token, a token's file or a password."""
    if user.get("tokenFile") and not user.get("token"):
        return _TokenFile(user["folder"] / Path(user["tokenFile"]).expanduser()).authorization
    header = None
    if user.get("token"):
        header = f"Bearer {user['token']}"
    elif user.get("username") is not None and user.get("password") is not None:
        header = "Basic " + base64.b64encode(f"{user['username']}:{user['password']}".encode()).decode()

    async def authorization() -> str | None:
        return header

    return authorization


@dataclass
class _TokenFile:
    """A token that somebody else renews in a file."""

    path: Path
    read_at: float = -RENEWED_SECONDS
    header: str | None = None

    async def authorization(self) -> str | None:
        if time.monotonic() - self.read_at >= RENEWED_SECONDS:
            try:
                self.header, self.read_at = f"Bearer {self.path.read_text(encoding='utf-8').strip()}", time.monotonic()
            except OSError as error:
                raise ConfigError(f"tokenFile of the kubeconfig can't be read: {error}") from None
        return self.header


@dataclass
class _Plugin:
    """A credential plugin: a program that prints an ExecCredential. Asked again shortly before its token's end."""

    stated: Values
    cluster: Values
    given: Values = field(default_factory=dict)
    until: float | None = None

    async def authorization(self) -> str | None:
        token = self.credential().get("token")
        return None if token is None else f"Bearer {token}"

    def credential(self) -> Values:
        """Raises ConfigError with the plugin's own words."""
        if self.given and (self.until is None or time.time() < self.until - RENEWED_SECONDS):
            return self.given
        command = [self._program(), *map(str, self.stated.get("args") or [])]
        extra = {str(item["name"]): str(item["value"]) for item in self.stated.get("env") or []}
        told = json.dumps({"apiVersion": self.stated.get("apiVersion"), "kind": "ExecCredential", "spec": self._spec()})
        try:
            ended = subprocess.run(
                command, env={**os.environ, **extra, "KUBERNETES_EXEC_INFO": told}, capture_output=True,
                stdin=None if sys.stdin is not None and sys.stdin.isatty() else subprocess.DEVNULL, timeout=PLUGIN_SECONDS, check=False,
            )  # fmt: skip
            if ended.returncode != 0:
                raise ConfigError(
                    f"the login program {command[0]} of the kubeconfig failed: {_last_words(ended.stderr) or ended.returncode}"
                )
            self.given = dict(json.loads(ended.stdout)["status"])
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ConfigError(f"the login program {command[0]} of the kubeconfig can't be run: {error}") from None
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f"the login program {command[0]} of the kubeconfig printed no ExecCredential with a status") from None
        ends = self.given.get("expirationTimestamp")
        self.until = None if ends is None else datetime.fromisoformat(str(ends)).timestamp()
        return self.given

    def _program(self) -> str:
        stated = str(self.stated.get("command") or "")
        found = str(self.cluster["folder"] / stated) if "/" in stated else shutil.which(stated)
        if not found or not Path(found).exists():
            hint = (
                f": {' '.join(str(self.stated['installHint']).split())}"
                if self.stated.get("installHint")
                else "; install it, or log in again"
            )
            raise ConfigError(f"the kubeconfig logs in by the program {stated or '(none named)'}, which is not installed{hint}")
        return found

    def _spec(self) -> Values:
        spec: Values = {"interactive": sys.stdin is not None and sys.stdin.isatty()}
        if self.stated.get("provideClusterInfo"):
            shown = {"server": self.cluster.get("server"), "tls-server-name": self.cluster.get("tls-server-name")}
            shown |= {"insecure-skip-tls-verify": self.cluster.get("insecure-skip-tls-verify"), "proxy-url": self.cluster.get("proxy-url")}
            authority = _bytes(self.cluster, "certificate-authority")
            shown["certificate-authority-data"] = base64.b64encode(authority).decode() if authority else None
            spec["cluster"] = {key: value for key, value in shown.items() if value is not None}
        return spec


def _last_words(errors: bytes) -> str:
    return " ".join(errors.decode(errors="replace").split())[-300:]
