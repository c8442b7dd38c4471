"""State that an earlier version left in a checkout counts in an installed Lockstep, and what this one writes there leaves the earlier one
working.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from installed.typed import Ended, Installed, Line, Story, refused

CLUSTER = "cluster: {{name: {name}, namespace: team, platform: kubernetes{more}}}\n"
HOSTS = "cluster: {name: hosts-x, platform: hosts}\nhosts: [{name: lab0.invalid, user: ada, workspace: /data, datasets: /data}]\n"
ATTEMPT = {
    "attempt": 1, "jobUid": "u", "restarts": 0, "started": "2026-11-22T20:00:00Z", "outcome": "Complete", "restart": None,
        "checkpoint": None,
    "budget": {"failures": 0, "counted": 0, "committedStep": 0}, "retry": 0, "boots": [], "programs": {},
}  # fmt: skip
SERVER = "http://127.0.0.1:9"


def named_to_the_version_before(root: Path) -> str | None:
    """Return the cluster that the earlier version takes from a checkout's state: one whose file is there, by its name or its path."""
    name = (root / ".lockstep/cluster").read_text(encoding="utf-8").strip()
    return name if (root / "clusters" / f"{name}.yaml").is_file() or Path(name).is_file() else None


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with the state of the version before: a cluster in use, servers, a forced deployment, files of hosts, a quickstart's
    run.
    """
    root = tmp_path / "checkout"
    files = {
        "clusters/theirs.yaml": CLUSTER.format(name="theirs", more=""),
        "clusters/moved.yaml": CLUSTER.format(name="moved", more=", api: api.example.com"),
        ".lockstep/cluster": "theirs\n",
        ".lockstep/servers/theirs": "https://api.example.com:6443\n",
        ".lockstep/forced/moved": f"{SERVER}\n",
        ".lockstep/hosts/x.yaml": HOSTS,
        ".lockstep/hosts.yaml": HOSTS.replace("hosts-x", "bed"),
        ".lockstep/quickstart/workspace/runs/demo/gang/attempts.jsonl": f"{json.dumps(ATTEMPT)}\n",
        ".lockstep/quickstart/workspace/runs/demo/gang/end.json": json.dumps({"state": "Complete", "message": "all ranks are done"}),
        "kubeconfig": (
            f"clusters: [{{name: c, cluster: {{server: '{SERVER}'}}}}]\ncontexts: [{{name: c, context: {{cluster:"
            " c}}]\ncurrent-context: c\n"
        ),
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    for mark in ("manifests/crds", "operator/lockstep"):
        (root / mark).mkdir(parents=True)
    return root


def test_an_upgrade_and_the_way_back_lose_nothing(
    ended: Callable[[Story, str], Ended], environments: Mapping[str, Installed], checkout: Path, tmp_path: Path
) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "space/workspace/runs").mkdir(parents=True)
    (tmp_path / "own.yaml").write_text(CLUSTER.format(name="own", more=""))

    def typed(line: Line) -> None:
        variables = {"KUBECONFIG": str(checkout / "kubeconfig")}
        line.check(environments["cli"].type(line, checkout, tmp_path / "home", variables), checkout)

    typed(Line("use", out=("theirs (.lockstep/cluster of this folder)",)))
    typed(refused("get", "cluster theirs was deployed to https://api.example.com:6443"))
    typed(refused("get --cluster moved", f"{SERVER} doesn't answer", code=1))
    typed(Line("get --local", out=("demo",)))
    typed(Line("doctor .lockstep/hosts/x.yaml", code=1, out=("lab0.invalid",)))
    typed(Line("doctor .lockstep/hosts.yaml", code=1, out=("lab0.invalid",)))
    assert named_to_the_version_before(checkout) == "theirs"

    typed(Line("use moved"))
    assert named_to_the_version_before(checkout) == "moved"
    typed(Line(f"use {tmp_path}/own.yaml"))
    assert named_to_the_version_before(checkout) == f"{tmp_path}/own.yaml"
    typed(Line(f"use {tmp_path}/space"))
    assert named_to_the_version_before(checkout) is None, "a workspace is no cluster to it: it goes by the kubeconfig"
    assert (checkout / ".lockstep/servers/theirs").read_text() == "https://api.example.com:6443\n"
    assert (checkout / ".lockstep/forced/moved").read_text() == f"{SERVER}\n"
