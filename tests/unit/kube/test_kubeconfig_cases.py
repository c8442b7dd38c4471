"""Kubeconfigs case by case, as the tests of client-go (tools/clientcmd, transport, auth/exec) and of the official Python client have them.

Where those two differ the Python client's answer counts: a token beside user and password (client-go refuses both together), text beside a
file of the same certificate (client-go refuses), a plugin of v1 without interactiveMode (client-go refuses). A context's user that is
missing is refused, as client-go does it, and so is a context without a cluster. An empty configuration means no cluster here, not
localhost:8080.
"""

from __future__ import annotations

import asyncio
import base64
import datetime
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from lockstep.api.errors import ConfigError, Failed
from lockstep.devcluster.certificates import Authority
from lockstep.kube import kubeconfig
from lockstep.kube.aim import Kubeconfig, environment_kubeconfig
from lockstep.kube.cluster import ApiError, Client
from lockstep.kube.kubeconfig import Server, read_account, read_server
from unit.virtual_time import VirtualClock

V1, BETA = "client.authentication.k8s.io/v1", "client.authentication.k8s.io/v1beta1"
HTTPS = {"server": "https://a:6443"}


def config(
    path: Path, user: dict[str, Any] | None = None, cluster: dict[str, Any] | None = None, context: dict[str, str] | None = None
) -> str:
    content = {
        "current-context": "c",
        "clusters": [{"name": "k", "cluster": {"server": "http://a:8080"} | (cluster or {})}],
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"} | (context or {})}],
        "users": [{"name": "u", "user": user or {}}],
    }
    (path / "config").write_text(yaml.safe_dump(content))
    return str(path / "config")


def header(server: Server) -> str | None:
    return asyncio.run(server.login.authorization())


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pki")
    authority = Authority(folder)
    authority.issue("client", "me")
    authority.issue("server", "server", addresses=("127.0.0.1",))
    return folder


# Who is asked, and as whom


@pytest.mark.parametrize(
    ("user", "headers"),
    [
        ({"as": "joe"}, [("Impersonate-User", "joe")]),
        ({"as": "joe", "as-uid": "7"}, [("Impersonate-User", "joe"), ("Impersonate-Uid", "7")]),
        (
            {"as": "joe", "as-uid": "7", "as-groups": ["a", "b"], "as-user-extra": {"first": ["A", "a"], "second": ["B"]}},
            [
                ("Impersonate-User", "joe"), ("Impersonate-Uid", "7"), ("Impersonate-Group", "a"), ("Impersonate-Group", "b"),
                ("Impersonate-Extra-first", "A"), ("Impersonate-Extra-first", "a"), ("Impersonate-Extra-second", "B"),
            ],
        ),
        ({"as": "joe", "as-user-extra": {"test.example.com/thing.thing": ["x"]}},
            [("Impersonate-User", "joe"), ("Impersonate-Extra-test.example.com%2Fthing.thing", "x")]),
        ({"as": "joe", "as-user-extra": {"a%2Fb": ["x"]}}, [("Impersonate-User", "joe"), ("Impersonate-Extra-a%252Fb", "x")]),
        ({"as": "joe", "as-user-extra": {"ü :": ["x"]}}, [("Impersonate-User", "joe"), ("Impersonate-Extra-%C3%BC%20%3A", "x")]),
        ({"as": "", "as-groups": []}, []),
    ],
)  # fmt: skip
def test_a_user_that_acts_as_another_does_so_in_every_request(tmp_path: Path, user: dict[str, Any], headers: list[tuple[str, str]]) -> None:
    server = read_server(config(tmp_path, {"token": "t", **user}))
    assert list(server.impersonation) == headers
    assert header(server) == "Bearer t"


def id_token(claims: object) -> str:
    return f"e30.{base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip('=')}.x"


def oidc(token: object) -> dict[str, Any]:
    return {"name": "oidc", "config": {"id-token": token}}


VALID = id_token({"exp": 4e9, "name": "Ada ✓"})


@pytest.mark.parametrize(
    ("user", "expected"),
    [
        ({"token": "t", "username": "u", "password": "p"}, "Bearer t"),
        ({"username": "u"}, "Basic " + base64.b64encode(b"u:").decode()),
        ({"username": "u", "password": "p:q"}, "Basic " + base64.b64encode(b"u:p:q").decode()),
        ({"password": "p"}, None),
        ({"token": ""}, None),
        ({"token": "t", "tokenFile": "file"}, "Bearer of-the-file"),
        ({"token": "t", "tokenFile": "gone"}, "Bearer t"),
        ({"token": "t", "tokenFile": "empty"}, "Bearer t"),
        ({"tokenFile": "file"}, "Bearer of-the-file"),
        ({"auth-provider": oidc(VALID)}, f"Bearer {VALID}"),
        ({"auth-provider": oidc(VALID), "token": "t"}, "Bearer t"),
    ],
)
def test_the_header_that_says_who_asks(tmp_path: Path, user: dict[str, Any], expected: str | None) -> None:
    (tmp_path / "file").write_text("of-the-file\n")
    (tmp_path / "empty").write_text("")
    assert header(read_server(config(tmp_path, user))) == expected


@pytest.mark.parametrize("name", ["gone", "empty", "."])
def test_a_token_s_file_without_a_token_is_told_before_anything_is_asked(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ConfigError, match="tokenFile of the kubeconfig can't be read"):
        read_server(config(tmp_path, {"tokenFile": name}))


def test_a_token_s_file_that_is_gone_for_a_moment_leaves_the_last_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubeconfig, "RENEWED_SECONDS", 0.0)
    (tmp_path / "file").write_text("one")
    server = read_server(config(tmp_path, {"token": "t", "tokenFile": "file"}))
    (tmp_path / "file").unlink()
    assert header(server) == "Bearer one"


# What is refused, and how


@pytest.mark.parametrize(
    ("user", "cluster", "words"),
    [
        ({}, HTTPS | {"certificate-authority-data": "abc"}, "certificate-authority-data of k in the kubeconfig is not base64"),
        ({}, HTTPS | {"certificate-authority-data": "aGk=", "insecure-skip-tls-verify": True},
            "certificate-authority and insecure-skip-tls-verify"),
        ({}, HTTPS | {"certificate-authority-data": "aGk="}, "a certificate of the kubeconfig can't be used"),
        ({"client-certificate-data": "aGk="}, HTTPS, "has a client-certificate and no client-key"),
        ({"client-certificate-data": "aGk=", "client-key-data": "aGk="}, HTTPS, "a certificate of the kubeconfig can't be used"),
        ({"client-certificate": "gone", "client-key": "gone"}, HTTPS, "client-certificate of the kubeconfig can't be read"),
        ({"client-certificate-data": "aGk=", "client-key": "gone"}, HTTPS, "client-key of the kubeconfig can't be read"),
        ({}, HTTPS | {"certificate-authority": "gone"}, "certificate-authority of the kubeconfig can't be read"),
        ({}, {"server": ""}, "has no server"),
        ({"as": "joe\r\nX-Remote-User: root"}, {}, "a character that no header may have"),
        *(({"token": "t", **user}, {}, "which names whom to act as")
            for user in ({"as-uid": "7"}, {"as-groups": ["a"]}, {"as-user-extra": {"a": ["b"]}}, {"as": "", "as-uid": "7"})),
        ({"auth-provider": {"name": "oidc"}, "exec": {"apiVersion": V1, "command": "x"}}, {}, "both auth-provider and exec"),
        ({"auth-provider": {"name": "gcp"}}, {}, "auth-provider of user u of the kubeconfig is gcp, .*: log in by a plugin"),
        ({"auth-provider": {"name": "oidc"}}, {}, "has no id-token that is valid now: log in again"),
        *(({"auth-provider": oidc(token)}, {}, "has no id-token that is valid now")
            for token in (None, "é", "a.b.c", f"{VALID}\n", *map(id_token, ({"exp": 1}, {"exp": "x"}, {}, 1, "exp")))),
        ({"exec": {"command": "x"}}, {}, "has apiVersion None, must be one of"),
        ({"exec": {"apiVersion": "client.authentication.k8s.io/v1alpha1", "command": "x"}}, {}, "v1alpha1, must be one of"),
        ({"exec": {"apiVersion": BETA}}, {}, "names no command"),
        ({"exec": {}}, {}, "has apiVersion None"),
        ({"exec": {"apiVersion": BETA, "command": "x", "env": [{"value": "v"}]}}, {}, "an env entry without a name"),
        ({"exec": {"apiVersion": BETA, "command": "x", "interactiveMode": "Sometimes"}}, {}, "must be Never, IfAvailable or Always"),
    ],
)  # fmt: skip
def test_what_kubectl_would_not_take_is_refused_with_its_place(
    tmp_path: Path, user: dict[str, Any], cluster: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        read_server(config(tmp_path, user, cluster))


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"cluster": {"insecure-skip-tls-verify": "false"}},
            "insecure-skip-tls-verify of cluster k in .*config must be true or false, without quotes"),
        ({"cluster": {"insecure-skip-tls-verify": 0}}, "must be true or false"),
        ({"cluster": {"server": 6443}}, "server of cluster k in .*config must be text: put it in quotes"),
        ({"cluster": {"server": ["http://a"]}}, "server of cluster k in .* must be text"),
        ({"cluster": {"tls-server-name": 1}}, "tls-server-name of cluster k in .* must be text"),
        ({"cluster": {"extensions": {"name": "x"}}}, "extensions of cluster k in .* must be a list"),
        ({"cluster": {"server": "ftp://a"}}, "is ftp://a, must be https://HOST:PORT"),
        ({"cluster": {"server": "https://[::1:6443"}}, "must be https://HOST:PORT"),
        ({"cluster": {"server": "https://a:port"}}, "must be https://HOST:PORT"),
        ({"cluster": {"server": "https://"}}, "must be https://HOST:PORT"),
        ({"cluster": {"server": "https://a b"}}, "must be https://HOST:PORT"),
        ({"cluster": HTTPS | {"certificate-authority-data": "!!!!"}}, "certificate-authority-data of k in the kubeconfig is not base64"),
        ({"cluster": HTTPS | {"certificate-authority-data": 1}}, "certificate-authority-data of cluster k in .* must be text"),
        ({"user": {"password": 83, "username": "u"}}, "password of user u in .* must be text: put it in quotes"),
        ({"user": {"token": 12345}}, "token of user u in .* must be text"),
        ({"user": {"token": "t\n"}}, "token of user u in .* has a character that no header may have"),
        ({"user": {"as": "joe", "as-groups": "admins"}}, "as-groups of user u in .* must be a list of texts"),
        ({"user": {"as": "joe", "as-groups": [1]}}, "as-groups of user u in .* must be a list of texts"),
        ({"user": {"as": "joe", "as-user-extra": {"a": "b"}}}, "as-user-extra of user u in .* must map keys to lists"),
        ({"user": {"as": "joe", "as-user-extra": ["a"]}}, "as-user-extra of user u in .* must map keys to lists"),
        ({"user": {"auth-provider": "oidc"}}, "auth-provider of user u in .* must be a mapping"),
        ({"user": {"exec": "login"}}, "exec of user u in .* is no mapping"),
        ({"user": {"exec": {"apiVersion": V1, "command": ["login"]}}}, "command of exec of user u in .* must be text"),
        ({"user": {"exec": {"apiVersion": V1, "command": "x", "args": "--all"}}}, "args of exec of user u in .* must be a list of texts"),
        ({"user": {"exec": {"apiVersion": V1, "command": "x", "env": {"A": "b"}}}}, "env of exec of user u in .* must be a list"),
        ({"user": {"exec": {"apiVersion": V1, "command": "x", "provideClusterInfo": "yes"}}},
            "provideClusterInfo of exec of user u in .* must be true or false"),
        ({"context": {"namespace": 7}}, "namespace of context c in .* must be text"),
        ({"context": {"user": "gone"}}, "has no user gone; there are u"),
        ({"context": {"cluster": "gone"}}, "has no cluster gone; there are k"),
        ({"context": {"cluster": ""}}, "names no cluster; there are k"),
        *(({"cluster": {"proxy-url": url}}, f"proxy-url of cluster k in the kubeconfig .*{words}") for url, words in (
            ("socks5://127.0.0.1:1080", "is a SOCKS proxy, which Lockstep can't speak to"),
            ("socks5h://127.0.0.1:1080", "is a SOCKS proxy"),
            ("ftp://proxy", "must be http://HOST:PORT or https://HOST:PORT"),
            *((url, "must be http") for url in ("proxy:3128", "http://", "http://proxy:port", ":invalid")),
        )),
    ],
)  # fmt: skip
def test_a_value_that_cannot_be_used_is_refused_with_its_place(tmp_path: Path, part: dict[str, Any], words: str) -> None:
    """`insecure-skip-tls-verify: "false"` is text, and a text is true: nobody's certificate would be looked at."""
    with pytest.raises(ConfigError, match=words):
        read_server(config(tmp_path, **part))


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 30))
MERGES = "m0: &m0 {x: y}\n" + "".join(f"m{n}: &m{n} {{<<: [*m{n - 1}, *m{n - 1}]}}\n" for n in range(1, 60))


@pytest.mark.parametrize(
    "text",
    ["[" * 300_000, "a: " * 200, BOMB, MERGES, "a: &a [*a]", "x" * (9 << 20), "\ta: b", "a: b: c", "- a", "text", "users: [{name: [u]}]",
        "users: [{name: 1}]", "users: {u: {}}",
     "current-context: [c]", "clusters: [{name: k, cluster: text}]", "\0", "users: [u]"],
)  # fmt: skip
def test_a_file_that_is_no_kubeconfig_is_refused_within_bounds(tmp_path: Path, text: str) -> None:
    """Some of these end the process, or fill its memory, in a parser without bounds."""
    (tmp_path / "config").write_text(text)
    with pytest.raises(ConfigError) as refused:
        read_server(str(tmp_path / "config"))
    assert len(str(refused.value)) < 1000


def test_anchors_are_written_out_as_kubectl_does(tmp_path: Path) -> None:
    path = Path(config(tmp_path, {"token": "t"}))
    path.write_text(path.read_text().replace("token: t", "token: &t t\n    password: *t"))
    assert header(read_server(str(path))) == "Bearer t"


def test_null_is_as_if_it_were_not_there(tmp_path: Path) -> None:
    user = {"exec": None, "auth-provider": None, "token": None, "as": None, "as-groups": None, "username": "u", "password": None}
    server = read_server(config(tmp_path, user, {"proxy-url": None, "insecure-skip-tls-verify": None, "extensions": None}))
    assert (header(server), server.impersonation) == ("Basic dTo=", ())


@pytest.mark.parametrize("kind", ["clusters", "contexts", "users"])
def test_two_things_of_one_name_in_a_file_are_refused(tmp_path: Path, kind: str) -> None:
    path = Path(config(tmp_path))
    content = yaml.safe_load(path.read_text())
    content[kind] *= 2
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(ConfigError, match=f"two {kind} of the name"):
        read_server(str(path))


def test_a_context_without_a_user_asks_as_nobody(tmp_path: Path) -> None:
    server = read_server(config(tmp_path, context={"user": ""}))
    assert (header(server), server.impersonation) == (None, ())


def test_a_folder_is_no_kubeconfig(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a kubeconfig"):
        read_server(str(tmp_path))


def test_an_empty_kubeconfig_variable_is_as_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert environment_kubeconfig() == Kubeconfig(str(tmp_path / ".kube" / "config"), is_stated=False)


# Several files


def test_things_may_stand_in_different_files_and_the_first_of_a_name_counts_whole(tmp_path: Path) -> None:
    parts: list[dict[str, Any]] = [
        {"current-context": "", "clusters": [{"name": "k", "cluster": {"server": "http://a"}}], "users": None},
        {"current-context": "c", "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}]},
        {
            "current-context": "x",
            "users": [{"name": "u", "user": {"token": "t"}}],
            "contexts": [{"name": "c", "context": {"cluster": "gone"}}],
        },
        {"users": [{"name": "u", "user": {"token": "other", "as": "joe"}}]},
        {},
    ]
    paths = []
    for number, part in enumerate(parts):
        paths.append(tmp_path / str(number))
        paths[-1].write_text(yaml.safe_dump(part))
    server = read_server(os.pathsep.join(map(str, [*paths, paths[0], tmp_path / "gone"])))
    assert (server.url, header(server), server.impersonation) == ("http://a", "Bearer t", ())


def test_paths_are_relative_to_the_file_that_names_them(tmp_path: Path, pki: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    (tmp_path / "token").write_text("t")
    for name in ("ca.crt", "client.crt", "client.key"):
        (tmp_path / name).write_bytes((pki / name).read_bytes())
    user = {"tokenFile": "token", "client-certificate": "client.crt", "client-key": "./client.key"}
    server = read_server(config(tmp_path, user, HTTPS | {"certificate-authority": "ca.crt"}))
    assert server.tls is not None and header(server) == "Bearer t"


def test_paths_are_relative_to_a_link_where_the_kubeconfig_is_one(tmp_path: Path, pki: Path) -> None:
    """As kubectl and the official client: of the path as it is named, wherever the link leads."""
    for name in ("home", "linked"):
        (tmp_path / name).mkdir()
    (tmp_path / "home/token").write_text("mine")
    (tmp_path / "linked/token").write_text("another's")
    config(tmp_path / "linked", {"tokenFile": "token"})
    (tmp_path / "home/config").symlink_to("../linked/config")
    assert header(read_server(str(tmp_path / "home/config"))) == "Bearer mine"


def test_a_ca_s_comments_may_have_any_letters(tmp_path: Path, pki: Path) -> None:
    (tmp_path / "ca.crt").write_bytes("# Émis à Genève\n".encode() + (pki / "ca.crt").read_bytes() + b"\xff\n")
    server = read_server(config(tmp_path, {}, HTTPS | {"certificate-authority": "ca.crt"}))
    assert server.tls is not None and len(server.tls.get_ca_certs()) == 1


def test_a_key_with_a_password_is_refused_and_nobody_is_asked_for_it(tmp_path: Path, pki: Path) -> None:
    from cryptography.hazmat.primitives import serialization

    key = serialization.load_pem_private_key((pki / "client.key").read_bytes(), None)
    form, locked = serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"word")
    (tmp_path / "client.key").write_bytes(key.private_bytes(serialization.Encoding.PEM, form, locked))
    user = {"client-certificate": str(pki / "client.crt"), "client-key": "client.key"}
    with pytest.raises(ConfigError, match="a certificate of the kubeconfig can't be used"):
        read_server(config(tmp_path, user, HTTPS))


@pytest.mark.parametrize(
    ("cluster", "url"),
    [
        ({"server": "http://a:8080/"}, "http://a:8080"),
        ({"server": "https://rancher/k8s/clusters/c-1"}, "https://rancher/k8s/clusters/c-1"),
        ({"server": "a:8080"}, "http://a:8080"),
        ({"server": "a:6443", "insecure-skip-tls-verify": True}, "https://a:6443"),
    ],
)
def test_the_server_s_address(tmp_path: Path, cluster: dict[str, Any], url: str) -> None:
    assert read_server(config(tmp_path, cluster=cluster)).url == url


# Proxies


@pytest.mark.parametrize("url", ["http://proxy:3128", "https://proxy:3129", "http://me:word@proxy:3128", "http://[::1]:3128"])
def test_a_cluster_s_proxy_is_taken_whatever_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://other")
    monkeypatch.setenv("NO_PROXY", "*")
    assert read_server(config(tmp_path, cluster={"proxy-url": url})).proxy == url


def test_a_socks_proxy_of_the_environment_is_refused_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "socks5://127.0.0.1:1080")
    with pytest.raises(ConfigError, match="HTTPS_PROXY or HTTP_PROXY names is a SOCKS proxy"):
        read_server(config(tmp_path))


# Login programs


def test_of_several_files_the_first_current_context_counts_unless_another_is_named(tmp_path: Path) -> None:
    second = tmp_path / "second"
    parts = {"contexts": [{"name": "d", "context": {"cluster": "k", "user": "v"}}], "users": [{"name": "v", "user": {"token": "2"}}]}
    second.write_text(yaml.safe_dump({"current-context": "d", **parts}))
    paths = os.pathsep.join(["", config(tmp_path, {"token": "1"}, context={"namespace": "team"}), str(second)])
    first, named = read_server(paths), read_server(paths, "d")
    assert (first.namespace, header(first), named.namespace, header(named)) == ("team", "Bearer 1", None, "Bearer 2")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("contexts: [{name: x}]", "names no current-context; there are x"),
        ("current-context: y\ncontexts: [{name: x}]", "has no context y; there are x"),
        ("current-context: x\ncontexts: [{name: x, context: {cluster: c}}]", "has no cluster c; there are none"),
    ],
)
def test_a_context_that_is_not_whole_is_told_with_those_there_are(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "config").write_text(content)
    with pytest.raises(ConfigError, match=words):
        read_server(str(tmp_path / "config"))


def test_a_tokens_file_is_read_again_after_a_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = VirtualClock()
    monkeypatch.setattr(kubeconfig, "time", clock)
    (tmp_path / "token").write_text("one\n")
    server = read_server(config(tmp_path, {"tokenFile": "token"}))
    assert header(server) == "Bearer one"
    (tmp_path / "token").write_text("two")
    for seconds, token in ((59, "one"), (1, "two")):
        clock.now += seconds
        assert header(server) == f"Bearer {token}"


@pytest.fixture
def account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of a pod's service account, which this process has."""
    Authority(tmp_path)
    (tmp_path / "token").write_text("one\n")
    monkeypatch.setattr(kubeconfig, "ACCOUNT", tmp_path)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.delenv("KUBERNETES_SERVICE_PORT", raising=False)
    return tmp_path


def test_a_pod_asks_as_its_service_account_and_reads_a_token_that_is_refused_again(account: Path) -> None:
    server = read_account()
    assert (server.url, server.namespace, header(server)) == ("https://[fd00::1]:443", None, "Bearer one")
    (account / "token").write_text("two")
    assert asyncio.run(server.login.renew(time.monotonic())) and header(server) == "Bearer two"


@pytest.mark.parametrize("file", ["token", "ca.crt"])
def test_a_pod_whose_service_account_is_not_whole_has_no_cluster(account: Path, file: str) -> None:
    for damage in ((account / file).unlink, (account / file).touch):
        damage()
        with pytest.raises(ConfigError, match=file):
            read_account()


# Login programs


def program(folder: Path, printed: str | dict[str, Any], code: int = 0, then: dict[str, Any] | None = None) -> dict[str, Any]:
    """A login program that prints this (from its second run on `then`), and the user that logs in by it."""
    script = folder / "login"
    text = printed if isinstance(printed, str) else json.dumps(printed)
    script.write_text(
        f"#!{sys.executable}\nimport os, sys\nfrom pathlib import Path\n"
        f"Path({str(folder / 'asked')!r}).write_text(os.environ['KUBERNETES_EXEC_INFO'])\n"
        f"Path({str(folder / 'profile')!r}).write_text(os.environ.get('PROFILE', ''))\n"
        f"runs = Path({str(folder / 'runs')!r})\nruns.write_text((runs.read_text() if runs.exists() else '') + 'x')\n"
        f"print({text!r} if runs.read_text() == 'x' else {(text if then is None else json.dumps(then))!r})\nsys.exit({code})\n"
    )
    script.chmod(0o755)
    return {"exec": {"apiVersion": V1, "command": "./login", "interactiveMode": "IfAvailable"}}


def credential(version: str = V1, **status: Any) -> dict[str, Any]:
    return {"kind": "ExecCredential", "apiVersion": version, "status": status}


@pytest.mark.parametrize(
    ("printed", "words"),
    [
        ("", "printed no ExecCredential with a kind, an apiVersion and a status"),
        ("[" * 100_000, "printed no ExecCredential"),
        ({"kind": "ExecCredential", "status": {"token": "t"}}, "with a kind, an apiVersion"),
        ({"apiVersion": V1, "status": {"token": "t"}}, "with a kind, an apiVersion"),
        ({"kind": "ExecCredential", "apiVersion": V1}, "with a kind, an apiVersion and a status"),
        ({"kind": "ExecCredential", "apiVersion": V1, "status": None}, "with a kind, an apiVersion and a status"),
        (
            credential(BETA, token="t"),
            "of client.authentication.k8s.io/v1, which the kubeconfig asks for: it is ExecCredential of .*v1beta1",
        ),
        (credential() | {"kind": "Pod"}, "it is Pod"),
        (credential(), "with a token or a certificate"),
        (credential(clientCertificateData="x"), "it has only one"),
        (credential(token="t", clientKeyData="x"), "it has only one"),
        (credential(token="t", expirationTimestamp="soon"), "expirationTimestamp soon is not an RFC 3339 time"),
        (credential(clientCertificateData="foo", clientKeyData="bar"), "gave a certificate that can't be used"),
        *((credential(**status), "printed no ExecCredential that can be used") for status in (
            {"token": "t\n"}, {"token": ["t"]}, {"token": 1}, {"clientCertificateData": 1, "clientKeyData": 2},
            {"token": "t", "expirationTimestamp": 20991231}, {"token": "t", "expirationTimestamp": "2099-12-31T00:00:00"},
        )),
    ],
)  # fmt: skip
def test_what_a_login_program_prints_must_be_a_credential(tmp_path: Path, printed: str | dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_server(config(tmp_path, program(tmp_path, printed), HTTPS))


def test_no_program_of_the_folder_where_one_stands_is_run_by_a_dot_in_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user = program(tmp_path, credential(token="t"))
    user["exec"]["command"] = "login"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f".{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(ConfigError, match="logs in by the program login, which is not installed"):
        read_server(config(tmp_path, user))
    assert not (tmp_path / "runs").exists()


def test_a_login_program_is_beside_the_file_that_names_its_user(tmp_path: Path) -> None:
    """The cluster may stand in another file, which somebody else may have made."""
    for name in ("mine", "theirs"):
        (tmp_path / name).mkdir()
    user = program(tmp_path / "mine", credential(token="mine"))
    program(tmp_path / "theirs", credential(token="theirs"))
    own, other = Path(config(tmp_path / "mine", user)), without_users(Path(config(tmp_path / "theirs")))
    own.write_text(yaml.safe_dump({"users": yaml.safe_load(own.read_text())["users"]}))
    assert header(read_server(f"{other}{os.pathsep}{own}")) == "Bearer mine"


def without_users(path: Path) -> Path:
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | {"users": []}))
    return path


@pytest.mark.parametrize("user", [{"token": "t"}, {"tokenFile": "token"}])
def test_a_token_that_is_stated_counts_before_a_login_program(tmp_path: Path, user: dict[str, Any]) -> None:
    """As kubectl and the official client: the program is not even started."""
    (tmp_path / "token").write_text("t")
    server = read_server(config(tmp_path, {**user, **program(tmp_path, credential(token="of the program"))}))
    assert header(server) == "Bearer t" and not (tmp_path / "runs").exists()


def test_a_person_sees_what_a_login_program_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Which page to open, and the code to enter there, stand on its standard error."""
    monkeypatch.setattr("lockstep.kube.loginprogram.sys.stdin", type("Stdin", (), {"isatty": lambda self: True})())
    user = program(tmp_path, credential(token="t"))
    script = tmp_path / "login"
    script.write_text(
        script.read_text().replace("import os, sys\n", "import os, sys\nprint('open https://login, enter ABCD', file=sys.stderr)\n")
    )
    read_server(config(tmp_path, user))
    assert "enter ABCD" in capfd.readouterr().err


@pytest.mark.parametrize(("seconds", "runs"), [(3600, "x"), (30, "xx")])
def test_a_login_program_is_asked_once_while_its_token_lasts_and_again_when_it_ends(tmp_path: Path, seconds: int, runs: str) -> None:
    ends = (datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=seconds)).isoformat().replace("+00:00", "Z")
    user = program(tmp_path, credential(token="t", expirationTimestamp=ends))
    user["exec"]["env"] = [{"name": "PROFILE", "value": "me"}]
    assert header(read_server(config(tmp_path, user))) == "Bearer t"
    assert ((tmp_path / "runs").read_text(), (tmp_path / "profile").read_text()) == (runs, "me")


@pytest.mark.parametrize(
    ("stated", "words"),
    [
        ({"command": "no-such-program", "installHint": "get it\nfrom us"}, "no-such-program, which is not installed: get it from us"),
        ({"command": sys.executable, "args": ["-c", "import sys; sys.exit('token expired, log in')"]}, "failed: token expired, log in"),
    ],
)
def test_a_login_program_that_fails_is_told_in_its_own_words(tmp_path: Path, stated: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_server(config(tmp_path, {"exec": {"apiVersion": V1} | stated}))


def test_a_login_program_that_fails_without_a_word_is_told_with_its_code(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="failed: exit code 73"):
        read_server(config(tmp_path, program(tmp_path, "", 73)))


@pytest.mark.parametrize(
    ("mode", "terminal", "interactive"),
    [("Never", False, False), ("Never", True, False), ("IfAvailable", False, False), ("IfAvailable", True, True), ("Always", True, True),
        (None, True, True)],
)  # fmt: skip
def test_a_login_program_is_told_whether_it_may_ask_a_person(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str | None, terminal: bool, interactive: bool
) -> None:
    monkeypatch.setattr("lockstep.kube.loginprogram.sys.stdin", type("Stdin", (), {"isatty": lambda self: terminal})())
    user = program(tmp_path, credential(token="t"))
    user["exec"] |= {"interactiveMode": mode}
    assert header(read_server(config(tmp_path, user))) == "Bearer t"
    assert json.loads((tmp_path / "asked").read_text()) == {
        "kind": "ExecCredential",
        "apiVersion": V1,
        "spec": {"interactive": interactive},
    }


def test_a_login_program_that_must_ask_a_person_needs_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.kube.loginprogram.sys.stdin", None)
    user = program(tmp_path, credential(token="t"))
    user["exec"]["interactiveMode"] = "Always"
    with pytest.raises(ConfigError, match="standard input is not a terminal"):
        read_server(config(tmp_path, user))


@pytest.mark.parametrize("version", [V1, BETA])
def test_a_login_program_that_wants_it_is_told_of_the_cluster_and_its_extension(tmp_path: Path, version: str) -> None:
    user = program(tmp_path, credential(version, token="t"))
    user["exec"] |= {"apiVersion": version, "provideClusterInfo": True}
    extension = {"apiVersion": "group/v1", "kind": "PluginConfig", "spec": {"audience": "snorlax"}}
    cluster = {
        "tls-server-name": "bar", "certificate-authority-data": base64.b64encode(b"baz").decode(), "proxy-url": "http://p:1",
        "extensions": [{"name": "other", "extension": {}}, {"name": "client.authentication.k8s.io/exec", "extension": extension}],
    }  # fmt: skip
    read_server(config(tmp_path, user, cluster))
    assert json.loads((tmp_path / "asked").read_text())["spec"]["cluster"] == {
        "server": "http://a:8080", "tls-server-name": "bar", "certificate-authority-data": "YmF6", "proxy-url": "http://p:1",
            "config": extension,
    }  # fmt: skip


# Requests


class ApiServer(ThreadingHTTPServer):
    """Answers /version to whoever shows one of `tokens`, and 401 to all others."""

    tokens: set[str]
    asked: list[list[tuple[str, str]]]


class _Handler(BaseHTTPRequestHandler):
    server: ApiServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.server.asked.append(list(self.headers.items()))
        known = self.headers.get("Authorization") in self.server.tokens
        content = b'{"gitVersion": "v1.36.0"}' if known else b'{"kind": "Status", "message": "Unauthorized", "code": 401}'
        self.send_response(200 if known else 401)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing."""


@pytest.fixture
def api() -> Iterator[ApiServer]:
    with ApiServer(("127.0.0.1", 0), _Handler) as server:
        server.tokens, server.asked = {"Bearer t"}, []
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(api: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user: dict[str, Any]) -> str:
    monkeypatch.setenv("KUBECONFIG", config(tmp_path, user, {"server": f"http://127.0.0.1:{api.server_port}"}))
    return str(Client().request("GET", "/version")["gitVersion"])


def test_requests_carry_every_header_of_impersonation(api: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask(api, tmp_path, monkeypatch, {"token": "t", "as": "readonly", "as-groups": ["a", "b"]}) == "v1.36.0"
    sent = [(name, value) for name, value in api.asked[0] if name.startswith("Impersonate") or name == "Authorization"]
    assert sorted(sent) == [
        ("Authorization", "Bearer t"),
        ("Impersonate-Group", "a"),
        ("Impersonate-Group", "b"),
        ("Impersonate-User", "readonly"),
    ]


def test_a_login_that_was_ended_early_is_made_anew(api: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The token is said to last for years, and the server takes it no more: the second run of the program prints another."""
    old = credential(token="old", expirationTimestamp="2999-01-01T00:00:00Z")
    user = program(tmp_path, old, then=credential(token="t"))
    assert ask(api, tmp_path, monkeypatch, user) == "v1.36.0"
    assert (tmp_path / "runs").read_text() == "xx" and len(api.asked) == 2


def test_a_login_that_stays_refused_is_tried_once_more_and_no_further(
    api: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ApiError) as refused:
        ask(api, tmp_path, monkeypatch, program(tmp_path, credential(token="wrong")))
    assert refused.value.status == 401
    assert (tmp_path / "runs").read_text() == "xx" and len(api.asked) == 2


def test_a_token_that_was_exchanged_in_its_file_is_read_when_the_old_one_is_refused(
    api: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("old")
    monkeypatch.setenv("KUBECONFIG", config(tmp_path, {"tokenFile": "token"}, {"server": f"http://127.0.0.1:{api.server_port}"}))
    client = Client()
    (tmp_path / "token").write_text("t")
    assert client.request("GET", "/version")["gitVersion"] == "v1.36.0"
    assert len(api.asked) == 2


def test_a_token_that_is_stated_is_not_tried_twice(api: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ApiError):
        ask(api, tmp_path, monkeypatch, {"token": "wrong"})
    assert len(api.asked) == 1


class _Refusing(BaseHTTPRequestHandler):
    """A proxy that wants another password."""

    def do_CONNECT(self) -> None:
        self.send_response(407)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing."""


def test_a_proxy_s_password_is_in_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Refusing) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            cluster = HTTPS | {"proxy-url": f"http://me:s3cret@127.0.0.1:{server.server_port}"}
            monkeypatch.setenv("KUBECONFIG", config(tmp_path, {"token": "t"}, cluster))
            with pytest.raises(Failed, match="407 Proxy Authentication Required") as refused:
                Client().request("GET", "/version")
        finally:
            server.shutdown()
            thread.join()
    assert "s3cret" not in str(refused.value)


# Certificates


def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Python 3.13 and newer make their contexts."""
    import ssl

    made = ssl.create_default_context

    def create(*arguments: Any, **options: Any) -> ssl.SSLContext:
        context = made(*arguments, **options)
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        return context

    monkeypatch.setattr("ssl.create_default_context", create)


def without_key_identifiers(folder: Path) -> None:
    """A CA as kubeadm of old, microk8s and EKS made them, and a server's certificate of it: ca.crt, server.crt, server.key."""
    import datetime
    import ipaddress

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    def name(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])

    def builder(subject: str, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        day = datetime.timedelta(days=1)
        made = x509.CertificateBuilder().subject_name(name(subject)).issuer_name(name("ca")).public_key(key)
        return made.serial_number(x509.random_serial_number()).not_valid_before(now - day).not_valid_after(now + day)

    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    authority = builder("ca", ca_key.public_key()).add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    (folder / "ca.crt").write_bytes(authority.sign(ca_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    signed = builder("server", key.public_key()).add_extension(address, critical=False).sign(ca_key, hashes.SHA256())
    (folder / "server.crt").write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "server.key").write_bytes(private)


def test_a_ca_without_key_identifiers_is_trusted_by_newer_pythons_too(
    api: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ssl

    without_key_identifiers(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "server.crt", tmp_path / "server.key")
    api.socket = context.wrap_socket(api.socket, server_side=True)
    strict(monkeypatch)
    cluster = {"server": f"https://127.0.0.1:{api.server_port}", "certificate-authority": "ca.crt"}
    monkeypatch.setenv("KUBECONFIG", config(tmp_path, {"token": "t"}, cluster))
    assert Client().request("GET", "/version")["gitVersion"] == "v1.36.0"


@pytest.mark.parametrize(("count", "is_refused"), [(190, False), (201, True)])
def test_a_kubeconfig_has_at_most_200_000_values_with_its_aliases_written_out(tmp_path: Path, count: int, is_refused: bool) -> None:
    text = f"a: &a [{', '.join(['1'] * 1000)}]\nb: [{', '.join(['*a'] * count)}]\n"
    with pytest.raises(ConfigError, match="more than 200000 values") if is_refused else nullcontext():
        kubeconfig._check_size(text, tmp_path)
