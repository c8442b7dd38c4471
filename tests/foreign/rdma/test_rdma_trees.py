"""Preflight's answer to the RDMA devices of clusters as they are out there: made-up trees of /sys, /proc and /dev for the nodes in
trees.yaml.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from lockstep_gang.agent.preflight import facts
from lockstep_gang.contract.fabric import are_whole_names
from lockstep_gang.contract.preflight import Expected, ExpectedRdma, Finding, Looked
from lockstep_gang.lifecycle.preflight.checks import judge_all
from lockstep_spec.choices import Severity
from unit.gang.cases import make_run

TABLE = yaml.safe_load((Path(__file__).parent / "trees.yaml").read_text(encoding="utf-8"))
KINDS, TREES = TABLE["kinds"], TABLE["trees"]
NO_GID = ":".join(["0000"] * 8)


def devices_of(node: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], dict[int, dict[str, Any]]]]:
    """(name, what differs from its kind, its ports)."""
    for key, value in node.items():
        first, _, last = key.partition("..")
        stem, number = re.fullmatch(r"(.*?)(\d+)", first).groups()  # type: ignore[union-attr]
        kind, changes = value if isinstance(value, list) else (value, {})
        kinds = kind["ports"] if isinstance(kind, dict) else {1: kind}
        for index in range(int(number), int(last or number) + 1):
            yield f"{stem}{index}", changes, {port: KINDS[name] | changes for port, name in kinds.items()}


def write(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n", encoding="utf-8")


def build(root: Path, node: dict[str, Any], machine: dict[str, Any]) -> None:
    write(root / "proc/self/status", f"Name:\tpython3\nCapEff:\t{machine.get('caps', '0' * 16)}")
    for number, (name, changes, ports) in enumerate(devices_of(node)):
        device = root / "sys/class/infiniband" / name
        none = any(port.get("guid") == "none" for port in ports.values())
        write(device / "node_guid", "0000:0000:0000:0000" if none else f"9c63:c003:0055:{number:04x}")
        write(device / f"device/infiniband_verbs/uverbs{number}/ibdev", name)
        if changes.get("open", True):
            write(root / f"dev/infiniband/uverbs{number}", "")
        for index, port in ports.items():
            folder = device / f"ports/{index}"
            for key, text in (("state", port.get("state", "4: ACTIVE")), ("link_layer", port["layer"]), ("rate", port["rate"])):
                write(folder / key, text)
            for slot in range(max(port["gids"], default=-1) + 2):
                gid, kind = port["gids"].get(slot, (NO_GID, ""))
                write(folder / f"gids/{slot}", gid)
                if kind:
                    write(folder / f"gid_attrs/types/{slot}", kind)
                    write(folder / f"gid_attrs/ndevs/{slot}", f"net{number}")
    for name, mtu in machine.get("mtus", {}).items():
        write(root / f"sys/class/net/{name}/mtu", mtu)
    for index in range(machine.get("gpus", 0)):
        write(root / f"dev/nvidia{index}", "")


def expected_of(file: dict[str, Any]) -> ExpectedRdma:
    """Return what the cluster file leads preflight to expect, as the plan renders it."""
    devices = tuple(file.get("devices", ()))
    names = {name.partition(":")[0] for name in devices}
    count = (len(names) if are_whole_names(names) else 0) or file.get("rails")
    return ExpectedRdma(devices, count, file.get("gid_index"), tuple(file.get("interfaces", ())), file.get("mtu"), file.get("rate"))


def answer(tree: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Finding]:
    file, nodes = tree["file"], tree["nodes"] * (2 if len(tree["nodes"]) == 1 else 1)
    expected, gpus, looked = expected_of(file), file.get("gpus", 0), []
    for index, node in enumerate(nodes):
        machine, root = tree | tree.get("also", {}).get(index, {}), folder / str(index)
        build(root, node, machine)
        monkeypatch.setattr(facts, "_memlock_bytes", lambda machine=machine: machine.get("memlock"))
        own = Looked(port=4000, gpus=facts.gpu_facts(root), rdma=facts.rdma_facts(expected, root))
        looked.append((index, own, 0.0, 0.1))
    run = make_run(nodes=len(nodes), gpus_per_node=gpus, ranks_per_node=gpus or 1, preflight=Expected(rdma=expected))
    return judge_all(run, looked, {})


def fits(finding: Finding, check: str, words: list[object]) -> bool:
    text = f"{finding.message} -> {finding.fix}"
    return finding.check in check.split("|") and all(re.search(str(word), text, re.IGNORECASE) for word in words)


@pytest.mark.parametrize("name", TREES)
def test_a_cluster_is_refused_only_if_it_can_t_work(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind of trouble is one line, and nothing else is said."""
    tree = TREES[name]
    findings = answer(tree, tmp_path, monkeypatch)
    lines = "\n".join(f"{f.severity.value} {f.check}: {f.message} -> {f.fix}" for f in findings)
    wanted = [(Severity.ERROR, *item) for item in tree.get("refused", {}).items()]
    wanted += [(Severity.WARNING, *item) for item in tree.get("warns", {}).items()]
    for severity, check, words in wanted:
        matches = [f for f in findings if f.severity is severity and fits(f, check, words)]
        assert len(matches) == 1, f"{len(matches)} × {severity.value} {check} with {words}, of:\n{lines or 'nothing'}"
        findings.remove(matches[0])
    warnings = [f for f in findings if f.severity is Severity.WARNING]
    allowed = [next((f for f in warnings if fits(f, *item)), None) for item in tree.get("may", {}).items()]
    assert [f"{f.severity.value} {f.check}: {f.message}" for f in findings if f not in allowed] == []
