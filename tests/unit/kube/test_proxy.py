"""Requests to the API server and the proxy that the environment names: as kubectl, and from a pod never."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from lockstep.devcluster.certificates import Authority
from lockstep.kube import kubeconfig
from lockstep.kube.cluster import Client
from lockstep.kube.proxy import proxy_of
from support.api_stub import ApiStub, served

HERE = "0.0.0.0"  # noqa: S104 (where one connects to: this machine, by an address that is none of its loopback's)
OPENSHIFT = "10.128.0.0/14,172.30.0.0/16,.cluster.local,.svc,localhost,127.0.0.1"


@pytest.mark.parametrize(
    ("url", "no_proxy", "direct"),
    [
        ("https://172.30.0.1:443", OPENSHIFT, True),
        ("https://172.31.0.1:443", OPENSHIFT, False),
        ("https://kubernetes.default.svc", OPENSHIFT, True),
        ("https://172.30.0.1", "172.30.0.1", True),
        ("https://172.30.0.1:6443", "172.30.0.1:6443, other", True),
        ("https://172.30.0.1:6443", "172.30.0.1:443", False),
        ("https://172.30.0.1", "172.30.0.9/16", True),  # more bits than the mask has
        ("https://172.30.0.1", "172.30.0.0/33,no/where", False),
        ("https://[fd00::1]:6443", "fd00::/8", True),
        ("https://[fd00::1]:6443", "[fd00::1]:6443", True),
        ("https://[fd00::1]:6443", "fd00::1", True),
        ("https://[fd00::1]:6443", "10.0.0.0/8", False),
        ("https://api.example.com:6443", "example.com", True),
        ("https://API.example.com:6443", "*.EXAMPLE.com", True),
        ("https://api.example.com:6443", "api.example.com:6443", True),
        ("https://api.example.com:6443", "api.example.com:443", False),
        ("https://example.com", ".example.com", False),
        ("https://notexample.com", "example.com", False),
        ("https://anything", "*", True),
        ("https://localhost:6443", "", True),
        ("https://127.0.9.1:6443", "", True),
        ("https://[::1]:6443", "", True),
        ("https://api.example.com", "", False),
    ],
)
def test_no_proxy_is_read_as_kubectl_reads_it(url: str, no_proxy: str, direct: bool) -> None:
    found = proxy_of(url, {"HTTPS_PROXY": "http://proxy:3128", "NO_PROXY": no_proxy})
    assert found == (None if direct else "http://proxy:3128")


def test_the_proxy_is_that_of_the_url_s_scheme_and_capitals_come_first() -> None:
    assert proxy_of("http://a", {"HTTPS_PROXY": "http://p"}) is None
    assert proxy_of("http://a", {"http_proxy": "http://p"}) == "http://p"
    assert proxy_of("https://a", {"HTTPS_PROXY": "", "https_proxy": "p:3128"}) == "http://p:3128"
    assert proxy_of("https://a", {"HTTPS_PROXY": "http://p", "https_proxy": "http://q"}) == "http://p"
    assert proxy_of("https://a", {"ALL_PROXY": "http://p"}) is None


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What a proxy that lets nothing through was asked for. HTTP_PROXY and HTTPS_PROXY name it."""
    asked: list[str] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection:
                    asked.append(connection.recv(65536).decode().splitlines()[0])
                    connection.sendall(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")

    thread = threading.Thread(target=serve)
    thread.start()
    for name in ("http_proxy", "https_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    for name in ("HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{listener.getsockname()[1]}")
    yield asked
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


def version() -> str:
    return str(Client().request("GET", "/version")["gitVersion"])


@pytest.mark.parametrize("is_named", [True, False])
def test_a_laptop_reaches_a_server_in_a_network_that_no_proxy_names_directly_and_others_by_the_proxy(
    is_named: bool, proxy: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(stub := ApiStub(), tmp_path, HERE) as kubeconfig:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
        monkeypatch.setenv("NO_PROXY", "10.0.0.0/8" + (",0.0.0.0/8" if is_named else ""))
        with contextlib.nullcontext() if is_named else pytest.raises(Exception, match="403"):
            assert version() == "v1.36.0"
    assert (len(stub.asked), proxy) == ((1, []) if is_named else (0, [f"GET {stub.url}/version HTTP/1.1"]))


def test_a_pod_never_asks_the_proxy_for_the_api_server(proxy: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HTTPS_PROXY of a cluster's pod.env reaches the operator, too, and its NO_PROXY may know nothing of the API server's address."""
    account = in_cluster(tmp_path, monkeypatch)
    with served(stub := ApiStub(), tmp_path, HERE, tls=account):
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(urlsplit(stub.url).port))
        assert version() == "v1.36.0"
    assert (len(stub.asked), proxy) == (1, [])


def in_cluster(folder: Path, monkeypatch: pytest.MonkeyPatch) -> ssl.SSLContext:
    """What a pod has of its service account, for a server with the returned certificate."""
    authority = Authority(folder)
    (folder / "token").write_text("t")
    monkeypatch.setattr(kubeconfig, "ACCOUNT", folder)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", HERE)
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("HOME", str(folder))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    certificate = authority.issue("server", "server", addresses=(HERE,))
    context.load_cert_chain(certificate, certificate.with_suffix(".key"))
    return context
