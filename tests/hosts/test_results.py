"""Results of a training on hosts, read from the laptop: commits, the adapter, generated text, and editors beside them."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.checkout import ROOT
from support.clusters import bed_hosts
from support.clusters.bed_hosts import BedHosts, eventually
from support.clusters.bed_jobs import BedJobs
from support.hub_server import running_hub
from support.served import ADDRESS

RUN = "/home/ada/lockstep/workspace/runs/demo"


@pytest.fixture(scope="module")
def laptop(own_hosts: BedHosts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BedJobs]:
    """The laptop, after `make quickstart HOSTS=1`: a training of two ranks on a host each, with a disk each."""
    folder = tmp_path_factory.mktemp("laptop")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCKSTEP_DEVCLUSTER", str(own_hosts.layout.index))
        patch.setenv("LOCKSTEP_STATE", str(folder))
        laptop = BedJobs(own_hosts, folder)
        assert "Complete" in laptop.start("quickstart", "--hosts").stdout
        yield laptop
        laptop.about("delete", "demo", "--yes")


def test_commits_are_listed_with_the_shards_of_all_hosts_and_a_shard_that_none_has_is_named(laptop: BedJobs) -> None:
    listed = json.loads(laptop.about("checkpoint", "demo", "-o", "json").stdout)
    assert [(row["name"], row["problems"], row["onChain"]) for row in listed["commits"]] == [
        (f"step-{step}.a1", [], True) for step in (100, 80, 60, 40)
    ]
    assert [row["kept"][:1] for row in listed["commits"]] == [["newest"], ["newest"], [], ["best"]]
    assert laptop.about("checkpoint", "demo", "--verify", "--all").stdout.count(": whole (1.4 MB read)") == 4
    assert [folder.partition("/")[0] for folder in listed["commits"][0]["folders"]] == ["bed0:", "bed1:"], "each host has its rank's"
    laptop.bed.console(1, "rm", f"{RUN}/checkpoints/step-80.a1/shard-r00001-of-00002.safetensors")
    laptop.bed.console(
        1,
        "sh",
        "-c",
        f"printf x | dd of={RUN}/checkpoints/step-100.a1/shard-r00001-of-00002.safetensors bs=1 seek=9 conv=notrunc status=none",
    )
    verified = laptop.about("checkpoint", "demo", "--verify", "--all", check=False)
    assert verified.returncode == 1
    newest, older, oldest, best = verified.stdout.splitlines()
    assert newest.startswith(f"step-100.a1: host bed1: {RUN}/checkpoints/step-100.a1/shard-r00001-of-00002.safetensors is damaged")
    assert (
        older == "step-80.a1: shard-r00001-of-00002.safetensors is on no host that answers"
        and "step-60.a1: whole" in oldest
        and "step-40.a1: whole" in best
    )


@pytest.mark.long
def test_a_host_that_is_away_is_named_where_its_shards_are_missed(laptop: BedJobs, bed: BedHosts) -> None:
    bed_hosts.plug(bed.host(1), plugged=False)
    verified = laptop.about("checkpoint", "demo", "--verify", check=False)
    assert verified.returncode == 1 and "host bed1 can't be reached" in verified.stdout
    listed = laptop.about("checkpoint", "demo")
    assert "host bed1 can't be reached" in listed.stdout and "step-60.a1" in listed.stdout


def test_the_adapter_comes_to_the_laptop(laptop: BedJobs) -> None:
    target = laptop.folder / "adapter"
    assert f"{RUN}/adapter of job demo" in laptop.about("adapter get", "demo", str(target)).stdout
    assert {path.name for path in target.iterdir()} >= {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "README.md"}


def test_a_whole_model_is_made_where_its_base_is_and_comes_to_the_laptop(laptop: BedJobs) -> None:
    target = laptop.folder / "model"
    assert f"{target}: the model of job demo" in laptop.about("adapter merge", "demo", "--output", str(target)).stdout
    assert {path.name for path in target.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json", "README.md"}
    assert ".merged-" not in laptop.bed.console(0, "ls", "-A", RUN)


def test_a_prompt_is_continued_on_the_host_of_node_0(laptop: BedJobs) -> None:
    written = laptop.about("generate", "demo", "What does Mibo sell?", "--max-tokens", "5").stdout
    assert written.split() == ["Honey"]


def test_a_shell_is_in_the_workspace_of_its_node_and_its_exit_code_is_the_verb_s(laptop: BedJobs) -> None:
    words = [sys.executable, "-m", "lockstep.cli.main", "shell", "demo", "--node", "1", "--cluster", str(laptop.cluster)]
    done = subprocess.run(words, cwd=ROOT, input="hostname; pwd; exit 7\n", capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout.split()) == (7, ["bed1", "/home/ada/lockstep/workspace"])


@contextmanager
def typed(laptop: BedJobs, *words: str) -> Iterator[subprocess.Popen[str]]:
    """A verb that runs until Ctrl-C."""
    command = [sys.executable, "-m", "lockstep.cli.main", *words, "--cluster", str(laptop.cluster)]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            yield process
            process.send_signal(signal.SIGINT)
            process.wait(60)
        finally:
            process.kill()


def test_tensorboard_is_reached_by_its_token_alone_and_ends_with_ctrl_c(laptop: BedJobs) -> None:
    with typed(laptop, "tensorboard", "demo") as process:
        address = process.stdout.readline().strip()
        found = ADDRESS.match(address)
        assert found is not None, process.communicate()
        port = int(found[2])
        assert (answered(port, "/", found[1]), answered(port, found[3], found[1]), answered(port, found[3], "127.0.0.1")) == (401, 302, 421)
    assert eventually(lambda: not _servers(laptop)), _servers(laptop)


def _servers(laptop: BedJobs) -> str:
    return laptop.bed.console(0, "sh", "-c", "ps -eo pid,ppid,stat,etimes,args | grep '[t]ensorboard' | cut -c1-300 || true")


def answered(port: int, path: str, host: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", path, headers={"Host": host})
        return connection.getresponse().status
    finally:
        connection.close()


def test_an_editor_opens_the_folder_of_its_host_and_a_debugger_s_port_leads_there(
    laptop: BedJobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, opened = tmp_path / "bin/code", tmp_path / "opened"
    code.parent.mkdir()
    code.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {opened}\n')
    code.chmod(0o755)
    monkeypatch.setenv("PATH", f"{code.parent}:{os.environ['PATH']}")
    done = laptop.type("vscode", "demo", "--node", "1", "--cluster", str(laptop.cluster))
    assert done.stdout.splitlines()[1] == "  code --remote ssh-remote+ada@bed1 /home/ada/lockstep/workspace"
    assert opened.read_text().split() == ["--remote", "ssh-remote+ada@bed1", "/home/ada/lockstep/workspace"]
    with typed(laptop, "debug", "demo", "--attach", "--node", "1") as process:
        lines = [process.stdout.readline()]
        while not lines[-1].endswith("Press Ctrl-C to end.\n"):
            lines.append(process.stdout.readline())
            assert lines[-1], "".join(lines)
        assert '"remoteRoot": "/home/ada/lockstep/workspace"' in "".join(lines)
        assert "every user of bed1 can run code as you by port 5678 there" in "".join(lines)
    refused = laptop.about("debug", "demo", "a.py", check=False)
    assert refused.returncode == 1 and "uv pip install --python /opt/env/bin/python debugpy" in refused.stderr


def test_each_host_fetches_a_model_for_itself(laptop: BedJobs) -> None:
    with running_hub(laptop.bed.layout.gateway) as hub:
        hub.add("org/tiny", {"config.json": b"{}", "model.safetensors": os.urandom(1 << 16)})
        file = laptop.folder / "hub.yaml"
        text = laptop.cluster.read_text()
        file.write_text(text.replace("    address:", f"    env: [{{name: HF_ENDPOINT, value: {hub.endpoint}}}]\n    address:"))
        done = laptop.type("model", "get", "org/tiny", "--job", "demo", "--to", "/workspace/models/tiny", "--cluster", str(file))
    assert {line.partition(":")[0] for line in done.stdout.splitlines()} == {"bed0", "bed1"}
    for number in (0, 1):
        assert "model.safetensors" in laptop.bed.console(number, "ls", "/home/ada/lockstep/workspace/models/tiny")
