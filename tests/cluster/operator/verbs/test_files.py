"""A job's files from a laptop: by the pods of the job while they run, by a reader's when they don't."""

from __future__ import annotations

import asyncio
from pathlib import Path

from lockstep.kube.cluster import Cluster
from lockstep.platforms.files.reader import beside
from lockstep.programs import output_of
from support.clusters.cluster_jobs import Jobs, until
from support.in_process import lockstep

SEEN = "import os, socket, sys; print(socket.gethostname(), *sorted(os.listdir(sys.argv[1])))"


def hostname_and_files(jobs: Jobs, name: str, node: int, folder: str) -> list[str]:
    async def read() -> bytes:
        async with await Cluster.connect() as cluster, beside(cluster, jobs.namespace, name, node) as place:
            return await output_of(place, ["python3", "-c", SEEN, folder])

    return asyncio.run(read()).decode().split()


def test_files_go_to_every_volume_and_come_back_while_pods_run_and_when_there_are_none(jobs: Jobs, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights").write_bytes(bytes(range(256)) * 40_000)
    (tmp_path / "model" / "odd 'name'").write_text("1")
    jobs.start("files", storage={"mode": "PerPod"})
    jobs.until_running("files")
    sent = lockstep("cp", f"{tmp_path}/model", "files:/datasets/", "-n", jobs.namespace)
    assert sent.returncode == 0, sent.stderr
    assert sent.stdout.splitlines() == [f"files node {node}: 2 of 2 files copied (10.2 MB), to /datasets/model" for node in (0, 1)]
    assert [hostname_and_files(jobs, "files", node, "/datasets/model")[0] for node in (0, 1)] == ["files-0", "files-1"]

    jobs.change("files", suspend=True)
    jobs.until_condition("files", "Suspended", "True", "Suspended")
    until("the pods are gone", lambda: not jobs.pods("files"))
    fetched = lockstep("cp", "files:/datasets/model", f"{tmp_path}/back", "--node", "1", "-n", jobs.namespace)
    assert fetched.returncode == 0, fetched.stderr
    assert {path.name: path.read_bytes() for path in (tmp_path / "back").iterdir()} == {
        path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()
    }
    pods = jobs.kind("Pod").get(namespace=jobs.namespace).to_dict()["items"]
    assert [pod["metadata"]["name"] for pod in pods if not pod["metadata"].get("deletionTimestamp")] == []
    jobs.end("files")
