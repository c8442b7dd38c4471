"""Who asks which server, from kubeconfigs as people have them."""

from __future__ import annotations

import asyncio
import datetime
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from lockstep.api.errors import ConfigError
from lockstep.devcluster.certificates import Authority
from lockstep.kube import kubeconfig
from lockstep.kube.kubeconfig import Server, read_account, read_server
from unit.virtual_time import VirtualClock

V1 = "client.authentication.k8s.io/v1"


def write(path: Path, user: dict[str, Any], *, name: str = "a", **cluster: Any) -> str:
    content = {
        "current-context": name,
        "clusters": [{"name": name, "cluster": {"server": f"http://{name}:8080"} | cluster}],
        "contexts": [{"name": name, "context": {"cluster": name, "user": name, "namespace": f"team-{name}"}}],
        "users": [{"name": name, "user": user}],
    }
    path.write_text(yaml.safe_dump(content))
    return str(path)


def header(server: Server) -> str | None:
    return asyncio.run(server.login.authorization())


def test_a_tokens_file_is_read_again_after_a_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = VirtualClock()
    monkeypatch.setattr(kubeconfig, "time", clock)
    (tmp_path / "token").write_text("one\n")
    server = read_server(write(tmp_path / "k", {"tokenFile": "token"}))
    assert header(server) == "Bearer one"
    (tmp_path / "token").write_text("two")
    clock.now += 59
    assert header(server) == "Bearer one"
    clock.now += 1
    assert header(server) == "Bearer two"


def test_of_several_files_the_first_that_names_a_thing_counts(tmp_path: Path) -> None:
    first = write(tmp_path / "1", {"token": "1"})
    second = write(tmp_path / "2", {"token": "2"}, name="b")
    paths = os.pathsep.join(["", first, second, str(tmp_path / "gone")])
    assert (read_server(paths).url, read_server(paths).namespace) == ("http://a:8080", "team-a")
    assert (read_server(paths, "b").url, header(read_server(paths, "b"))) == ("http://b:8080", "Bearer 2")
    again = os.pathsep.join([first, write(tmp_path / "3", {"token": "3"})])
    assert header(read_server(again)) == "Bearer 1"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{a: ", "is not a kubeconfig"),
        ("[1, 2]", "is not a kubeconfig"),
        ("contexts: [{name: x}]", "names no current-context; there are x"),
        ("current-context: y\ncontexts: [{name: x}]", "has no context y; there are x"),
        ("current-context: x\ncontexts: [{name: x, context: {cluster: c}}]", "has no cluster c; there are none"),
        ("current-context: x\ncontexts: [{name: x, context: {cluster: c}}]\nclusters: [{name: c}]", "cluster c in .* has no server"),
    ],
)
def test_a_kubeconfig_that_cannot_be_used_is_named_with_what_is_wrong(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "k").write_text(content)
    with pytest.raises(ConfigError, match=said):
        read_server(str(tmp_path / "k"))


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
    (account / file).write_text("")
    with pytest.raises(ConfigError, match=file):
        read_account()
    (account / file).unlink()
    with pytest.raises(ConfigError, match=file):
        read_account()


def plugin(folder: Path, status: dict[str, Any], **stated: Any) -> dict[str, Any]:
    """A login program that prints what it was told, and counts its runs."""
    script = folder / "login"
    script.write_text(
        f"#!{sys.executable}\nimport json, os\nfrom pathlib import Path\n"
        f"count = Path({str(folder / 'count')!r})\ncount.write_text(str(int(count.read_text() or 0) + 1) if count.exists() else '1')\n"
        f"Path({str(folder / 'told')!r}).write_text(os.environ['KUBERNETES_EXEC_INFO'] + os.environ.get('PROFILE', ''))\n"
        f"print(json.dumps({{'apiVersion': {V1!r}, 'kind': 'ExecCredential', 'status': {status!r}}}))\n"
    )
    script.chmod(0o755)
    return {
        "exec": {
            "apiVersion": V1,
            "command": "./login",
            "env": [{"name": "PROFILE", "value": "me"}],
            **stated,
        }
    }


def runs(folder: Path) -> int:
    return int((folder / "count").read_text())


def test_a_login_program_is_asked_once_while_its_token_lasts(tmp_path: Path) -> None:
    ends = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1)
    server = read_server(write(tmp_path / "k", plugin(tmp_path, {"token": "t", "expirationTimestamp": ends.isoformat()})))
    assert [header(server), header(server)] == ["Bearer t", "Bearer t"]
    assert runs(tmp_path) == 1
    assert (tmp_path / "told").read_text().endswith("me")


def test_a_login_program_is_asked_again_when_its_token_ends(tmp_path: Path) -> None:
    ends = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=60.0 / 2)
    server = read_server(
        write(tmp_path / "k", plugin(tmp_path, {"token": "t", "expirationTimestamp": ends.isoformat().replace("+00:00", "Z")}))
    )
    assert header(server) == "Bearer t"
    assert runs(tmp_path) == 2


@pytest.mark.parametrize(
    ("stated", "said"),
    [
        ({"command": "no-such-program", "installHint": "get it\nfrom us"}, "no-such-program, which is not installed: get it from us"),
        ({"command": sys.executable, "args": ["-c", "import sys; sys.exit('token expired, log in')"]}, "failed: token expired, log in"),
        ({"command": sys.executable, "args": ["-c", "print('hello')"]}, "printed no ExecCredential"),
    ],
)
def test_a_login_program_that_fails_is_told_in_its_own_words(tmp_path: Path, stated: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_server(write(tmp_path / "k", {"exec": {"apiVersion": V1} | stated}))
