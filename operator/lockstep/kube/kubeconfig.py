"""Kubeconfig files and a pod's service account: who asks which API server.

It is Lockstep's own for coverage: kr8s has no impersonation, tokenFile and interactiveMode; lightkube no impersonation, tls-server-name,
proxy-url and port forwarding; the official client no impersonation, and it renews OIDC tokens without verifying the provider's certificate.

What kubectl documents: several files (the first that names a thing counts), contexts, certificates and tokens as text or file, user and
password, impersonation, proxies, and credential plugins (`loginprogram.py`). Of the legacy `auth-provider` it reads the ID token of OIDC,
which kubectl renews.

Laxer than kubectl in three things, as the official Python client: a token counts before user and password, text counts before a file of the
same certificate, and a plugin of version v1 need not say its interactiveMode.
"""

from __future__ import annotations

import base64
import json
import os
import ssl
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import yaml

from lockstep.api.errors import ConfigError
from lockstep.api.files.yamltext import FastLoader, load_yaml
from lockstep.kube.loginprogram import Credential, LoginProgram
from lockstep.kube.proxy import proxy_of
from lockstep_spec.files import expanded

Values = dict[str, Any]
RENEWED_SECONDS = 60.0
"""A token's file is read again after as long."""
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Folder of a pod's service account."""
IN_CLUSTER = "KUBERNETES_SERVICE_HOST"
"""Variable that every pod has."""
PROXIES = ("http", "https")
"""Schemes of proxies that aiohttp can speak to."""
_HEADER_NAME = "!#$%&'*+-.^_`|~"
"""Characters that a header's name may hold besides letters and digits (RFC 9110, token)."""
FILE_BYTES_MAX = 8 << 20
DEPTH_MAX = 64
VALUES_MAX = 200_000
"""Limit with aliases written out. Far deeper than any kubeconfig's would end the process in libyaml, and more would fill its memory."""
TEXTS = {
    "cluster": {"server", "tls-server-name", "certificate-authority", "certificate-authority-data", "proxy-url"},
    "context": {"cluster", "user", "namespace"},
    "user": {
        *("client-certificate", "client-certificate-data", "client-key", "client-key-data", "token", "tokenFile", "username", "password"),
        *("as", "as-uid"),
    },
    "exec": {"apiVersion", "command", "installHint", "interactiveMode"},
}
"""Keys that kubectl reads as text, too: `password: 0123` is a number, and another one than it looks like."""
SWITCHES = {"cluster": {"insecure-skip-tls-verify", "disable-compression"}, "exec": {"provideClusterInfo"}}
TEXT_LISTS = {"user": {"as-groups"}, "exec": {"args"}}


@dataclass(frozen=True)
class Server:
    """An API server, and how to prove to it who asks."""

    url: str
    namespace: str | None = None
    """The context's."""
    tls: ssl.SSLContext | None = None
    """None: plain HTTP."""
    login: Credential = field(default_factory=Credential)
    impersonation: tuple[tuple[str, str], ...] = ()
    """Headers by which the request is made as somebody else."""
    tls_name: str | None = None
    """The name in the server's certificate, where it isn't the URL's."""
    proxy: str | None = None
    """None: directly, whatever the environment says."""


def read_server(paths: str, context: str | None = None) -> Server:
    """Return the server of `context`, or of the current one. Raises ConfigError."""
    namespace, cluster, user = _chosen(paths, context)
    if "auth-provider" in user and "exec" in user:
        raise ConfigError(f"user {user['name']} in {paths} has both auth-provider and exec: only one may log in")
    url = _url(cluster, user)
    proxy = _proxy_to(url, cluster)
    authority = _bytes(cluster, "certificate-authority")
    tls = _tls(cluster, user, authority) if url.startswith("https") else None
    impersonation = _impersonation(user)
    login: Credential
    if user.get("exec") is not None and not (user.get("token") or user.get("tokenFile")):
        login = LoginProgram(user["exec"] or {}, cluster, user["name"], user["folder"], authority, lambda *pair: _present(tls, *pair))
        login.credential()
    else:
        login = _stated(user)
    return Server(url, namespace, tls, login, impersonation, cluster.get("tls-server-name"), proxy)


def contexts_with_servers(paths: str) -> Iterator[tuple[str, str]]:
    """Yield the contexts and the URLs of their API servers, the current one first; none that is incomplete. Raises ConfigError."""
    merged = _merged(paths)
    for name in sorted(merged["contexts"], key=lambda name: bool(name != merged["current-context"])):
        with suppress(ConfigError, KeyError):
            yield name, _url(merged["clusters"][merged["contexts"][name]["cluster"]], {})


def read_account() -> Server:
    """Return the API server of the pod that this process is in, for its service account. Raises ConfigError if the pod has none.

    From a pod the API server is near: a proxy that its environment names is for what lies outside of the cluster.
    """
    host, port = os.environ[IN_CLUSTER], os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    login = _TokenFile(ACCOUNT / "token", "")
    try:
        tls = _trusting(cafile=str(ACCOUNT / "ca.crt"))
    except OSError as error:
        raise ConfigError(f"{ACCOUNT}/ca.crt can't be used: {error}") from None
    return Server(f"https://{f'[{host}]' if ':' in host else host}:{port}", None, tls, login)


def _trusting(cadata: str | None = None, cafile: str | None = None) -> ssl.SSLContext:
    """Verify servers as kubectl does: Python 3.13 and newer otherwise refuse CA certificates without key identifiers, as many clusters have
    them.
    """
    context = ssl.create_default_context(cadata=cadata, cafile=cafile)
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context


def _proxy_to(url: str, cluster: Values) -> str | None:
    """The proxy's URL: the cluster's own, else the environment's. None: directly. Raises ConfigError: it can't be used."""
    own = cluster.get("proxy-url")
    proxy = own or proxy_of(url, os.environ)
    if proxy is None:
        return None
    stated = f"proxy-url of cluster {cluster['name']} in the kubeconfig" if own else "the proxy that HTTPS_PROXY or HTTP_PROXY names"
    try:
        parts = urlsplit(str(proxy))
        scheme = parts.scheme if parts.hostname and parts.port != 0 else ""
    except ValueError:
        scheme = ""
    if scheme.startswith("socks"):
        raise ConfigError(
            f"{stated} is a SOCKS proxy, which Lockstep can't speak to: name an HTTP proxy (http:// or https://) that leads there"
        )
    if scheme not in PROXIES:
        raise ConfigError(f"{stated} is not a proxy's URL: it must be http://HOST:PORT or https://HOST:PORT")
    return str(proxy)


def _chosen(paths: str, context: str | None) -> tuple[str | None, Values, Values]:
    """Namespace, cluster and user of a context. Raises ConfigError."""
    merged = _merged(paths)
    name = context or merged["current-context"]
    if not name:
        raise ConfigError(f"{paths} names no current-context; there are {_names(merged['contexts'])}")
    chosen = _named(merged["contexts"], name, "context", paths)
    if not chosen.get("cluster"):
        raise ConfigError(f"context {name} in {paths} names no cluster; there are {_names(merged['clusters'])}")
    cluster = _named(merged["clusters"], chosen["cluster"], "cluster", paths)
    if not cluster.get("server"):
        raise ConfigError(f"cluster {chosen['cluster']} in {paths} has no server")
    return chosen.get("namespace"), cluster, _named(merged["users"], chosen["user"], "user", paths) if chosen.get("user") else {}


def _url(cluster: Values, user: Values) -> str:
    """Return the server's URL; without a scheme https where anything is said about certificates, as kubectl has it. Raises ConfigError."""
    stated = str(cluster["server"]).rstrip("/")
    if "://" not in stated:
        keys = [cluster.get(f"certificate-authority{end}") for end in ("", "-data")] + [
            user.get(f"client-certificate{end}") for end in ("", "-data")
        ]
        stated = f"https://{stated}" if any(keys) or cluster.get("insecure-skip-tls-verify") else f"http://{stated}"
    try:
        parts = urlsplit(stated)
        usable = (
            parts.scheme in ("http", "https")
            and parts.hostname
            and parts.port != 0
            and not parts.netloc.endswith(":")
            and stated.isprintable()
            and " " not in stated
        )
    except ValueError:
        usable = False
    if not usable:
        raise ConfigError(f"server of cluster {cluster['name']} in the kubeconfig is {stated}, must be https://HOST:PORT")
    return stated


def _impersonation(user: Values) -> tuple[tuple[str, str], ...]:
    """Headers as https://kubernetes.io/docs/reference/access-authn-authz/authentication/#user-impersonation has them."""
    name, uid, groups, extra = (user.get(key) for key in ("as", "as-uid", "as-groups", "as-user-extra"))
    if not name:
        if uid or groups or extra:
            raise ConfigError(
                f"user {user['name']} of the kubeconfig has as-uid, as-groups or as-user-extra without as, which names whom to act as"
            )
        return ()
    headers = [("Impersonate-User", name)] + ([("Impersonate-Uid", uid)] if uid else [])
    headers += [("Impersonate-Group", group) for group in groups or []]
    for key, values in (extra or {}).items():
        escaped = quote(str(key), safe=_HEADER_NAME.replace("%", ""))
        headers += [(f"Impersonate-Extra-{escaped}", value) for value in values or []]
    for header, value in headers:
        if not str(value).isprintable():
            raise ConfigError(f"{header} of user {user['name']} of the kubeconfig has a character that no header may have")
    return tuple((header, str(value)) for header, value in headers)


def chosen_context(paths: str, context: str | None) -> tuple[str | None, str | None]:
    """Return the name of `context`, or of the current one, and its namespace; None for what isn't there to read."""
    try:
        merged = _merged(paths)
    except ConfigError:
        return context, None
    name = context or merged["current-context"]
    return name, merged["contexts"].get(name, {}).get("namespace") or None


def _merged(paths: str) -> Values:
    """The files' clusters, contexts and users by name; each knows its folder, for relative paths."""
    merged: Values = {"clusters": {}, "contexts": {}, "users": {}, "current-context": None}
    files = [expanded(path) for path in paths.split(os.pathsep) if path]
    if not any(path.exists() for path in files):
        raise ConfigError(f"there is no kubeconfig at {paths}")
    for path in filter(Path.exists, files):
        folder = Path(os.path.abspath(path)).parent  # noqa: PTH100 (of the path as it is named: kubectl follows no link here)
        try:
            content = _loaded(path) or {}
            for kind, key in (("clusters", "cluster"), ("contexts", "context"), ("users", "user")):
                items = {}
                for item in content.get(kind) or []:
                    if not isinstance(item["name"], str):
                        raise ConfigError(f"a name in {kind} of {path} must be text: put it in quotes")
                    if item["name"] in items:
                        raise ConfigError(f"{path} has two {kind} of the name {item['name']}")
                    items[item["name"]] = {
                        **_checked(item.get(key) or {}, key, f"{key} {item['name']} in {path}"),
                        "name": item["name"],
                        "folder": folder,
                    }
                merged[kind] = items | merged[kind]
            current = content.get("current-context") or None
            if not isinstance(current, str | None):
                raise ConfigError(f"current-context of {path} must be text: put it in quotes")
            merged["current-context"] = merged["current-context"] or current
        except (OSError, yaml.YAMLError, AttributeError, KeyError, TypeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is not a kubeconfig: {' '.join(str(error).split())}") from None
    return merged


def _loaded(path: Path) -> Any:
    """Return the file's content. Raises ConfigError, OSError, UnicodeDecodeError, yaml.YAMLError."""
    with path.open("rb") as file:
        data = file.read(FILE_BYTES_MAX + 1)
    if len(data) > FILE_BYTES_MAX:
        raise ConfigError(f"{path} is not a kubeconfig: it has more than {FILE_BYTES_MAX >> 20} MiB")
    text = data.decode("utf-8")
    _check_size(text, path)
    return load_yaml(text)


def _check_size(text: str, path: Path) -> None:
    """Refuse a text that is too deep or too large before anything is made of it: the loader recurses, and writes aliases of aliases out."""
    sizes: dict[str, int] = {}
    open_ones: list[tuple[str | None, int]] = []
    size = 0
    for event in yaml.parse(text, FastLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            open_ones.append((event.anchor, size))
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = open_ones.pop()
            if anchor is not None:
                sizes[anchor] = size - before
        elif isinstance(event, yaml.ScalarEvent) and event.anchor is not None:
            sizes[event.anchor] = 0
        elif isinstance(event, yaml.AliasEvent):
            size += sizes.get(str(event.anchor), VALUES_MAX)  # (of something that it is in itself, else)
        size += 1
        if len(open_ones) > DEPTH_MAX or size > VALUES_MAX:
            raise ConfigError(f"{path} is not a kubeconfig: it is nested more than {DEPTH_MAX} deep, or has more than {VALUES_MAX} values")


def _checked(values: Any, kind: str, where: str) -> Values:
    """`values` less what is null, each of the type that it has to be: kubectl reads no other one either. Raises ConfigError."""
    if not isinstance(values, dict):
        raise ConfigError(f"{where} is no mapping")
    stated = {key: value for key, value in values.items() if value is not None}
    for key, value in stated.items():
        if key in TEXTS.get(kind, ()) and not isinstance(value, str):
            raise ConfigError(f"{key} of {where} must be text: put it in quotes")
        if key in SWITCHES.get(kind, ()) and not isinstance(value, bool):
            raise ConfigError(f"{key} of {where} must be true or false, without quotes")
        if key in TEXT_LISTS.get(kind, ()) and not _is_list_of(value, str):
            raise ConfigError(f"{key} of {where} must be a list of texts")
    if kind == "user":
        _check_user(stated, where)
    if kind == "exec" and not _is_list_of(stated.get("env", []), dict):
        raise ConfigError(f"env of {where} must be a list of names and values")
    if kind == "cluster" and not _is_list_of(stated.get("extensions", []), dict):
        raise ConfigError(f"extensions of {where} must be a list of names and extensions")
    return stated


def _check_user(user: Values, where: str) -> None:
    extra = user.get("as-user-extra", {})
    if not (isinstance(extra, dict) and all(isinstance(key, str) and _is_list_of(values or [], str) for key, values in extra.items())):
        raise ConfigError(f"as-user-extra of {where} must map keys to lists of texts")
    if not isinstance(user.get("auth-provider", {}), dict):
        raise ConfigError(f"auth-provider of {where} must be a mapping")
    if not user.get("token", "").isprintable():
        raise ConfigError(f"token of {where} has a character that no header may have, such as the end of a line")
    if "exec" in user:
        user["exec"] = _checked(user["exec"], "exec", f"exec of {where}")


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(item, kind) for item in value)


def _names(entries: Values) -> str:
    return ", ".join(sorted(map(str, entries))) or "none"


def _named(entries: Values, name: Any, kind: str, paths: str) -> Values:
    if name not in entries:
        raise ConfigError(f"{paths} has no {kind} {name}; there are {_names(entries)}")
    return dict(entries[name])


def _bytes(values: Values, key: str) -> bytes | None:
    """`key-data` (base64), else the file `key`."""
    if values.get(f"{key}-data"):
        try:
            return base64.b64decode("".join(values[f"{key}-data"].split()), validate=True)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{key}-data of {values['name']} in the kubeconfig is not base64: {error}") from None
    if values.get(key):
        path = values["folder"] / expanded(str(values[key]))
        try:
            return bytes(path.read_bytes())
        except OSError as error:
            raise ConfigError(f"{key} of the kubeconfig can't be read: {error}") from None
    return None


def _tls(cluster: Values, user: Values, authority: bytes | None) -> ssl.SSLContext:
    insecure = bool(cluster.get("insecure-skip-tls-verify"))
    if insecure and authority:
        raise ConfigError(
            f"cluster {cluster['name']} in the kubeconfig has a certificate-authority and insecure-skip-tls-verify: remove one of them"
        )
    certificate, key = _bytes(user, "client-certificate"), _bytes(user, "client-key")
    if certificate and not key:
        raise ConfigError(f"user {user['name']} of the kubeconfig has a client-certificate and no client-key")
    try:
        context = _trusting(authority.decode("ascii", "backslashreplace") if authority else None)  # (comments may have any letters)
        if certificate and key:
            _present(context, certificate.decode(), key.decode())
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(f"a certificate of the kubeconfig can't be used: {error}") from None
    if insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _present(context: ssl.SSLContext | None, certificate: str, key: str) -> None:
    """Connections made from now on show this certificate (PEM). Raises ssl.SSLError."""
    if context is not None:
        with _file(certificate.encode()) as certificate_file, _file(key.encode()) as key_file:
            context.load_cert_chain(certificate_file, key_file, password="")  # (a key with a password is refused, not asked for)


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


def _stated(user: Values) -> Credential:
    """Return the login by a token, a token's file or a password. Raises ConfigError."""
    token = str(user.get("token") or "")
    if user.get("tokenFile"):
        return _TokenFile(user["folder"] / expanded(str(user["tokenFile"])), token)
    if not token and "auth-provider" in user:
        token = _id_token(user["auth-provider"], f"auth-provider of user {user['name']} of the kubeconfig")
    if token or not user.get("username"):
        return Credential(f"Bearer {token}" if token else None)
    return Credential("Basic " + base64.b64encode(f"{user['username']}:{user.get('password') or ''}".encode()).decode())


def _id_token(provider: Values, where: str) -> str:
    """Return the ID token of the legacy login by OIDC. Raises ConfigError for one that has ended, and for other legacy logins."""
    if provider.get("name") != "oidc":
        raise ConfigError(
            f"{where} is {provider.get('name')}, which Kubernetes' clients have dropped: log in by a plugin (exec), as"
            " `gcloud container clusters get-credentials` and `kubelogin convert-kubeconfig` write it"
        )
    try:
        token = str(provider["config"]["id-token"])
        is_valid = token.isprintable() and json.loads(base64.urlsafe_b64decode(token.split(".")[1] + "=="))["exp"] > time.time()
    except (LookupError, TypeError, ValueError, RecursionError):
        is_valid = False
    if not is_valid:
        raise ConfigError(f"{where} has no id-token that is valid now: log in again, or have it renewed (`kubectl auth whoami`)")
    return token


class _TokenFile(Credential):
    """A token that another program renews in a file."""

    def __init__(self, path: Path, otherwise: str) -> None:
        """Read it. `otherwise`: the token that counts as long as the file can't be read; "" for none. Raises ConfigError as `read`."""
        super().__init__(f"Bearer {otherwise}" if otherwise else None)
        self.path = path
        self.read()

    async def authorization(self) -> str | None:
        if time.monotonic() - self.read_at >= RENEWED_SECONDS:
            self.read()
        return self.header

    async def renew(self, since: float) -> bool:
        if self.read_at > since:
            return True
        refused = self.header
        self.read()
        return self.header != refused

    def read(self) -> None:
        """Read the token. Raises ConfigError when there is none, and none was there before."""
        try:
            token = self.path.read_text(encoding="utf-8").strip()
            problem = None if token else f"{self.path} is empty"
        except (OSError, UnicodeDecodeError) as error:
            token, problem = "", str(error)
        self.read_at = time.monotonic()
        if token:
            self.header = f"Bearer {token}"
        elif not self.header:
            raise ConfigError(f"tokenFile of the kubeconfig can't be read: {problem}")
