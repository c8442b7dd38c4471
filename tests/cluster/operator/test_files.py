"""A job's files from a laptop: by the pods of the job while they run, by a reader's when they don't."""

from __future__ import annotations

import asyncio

from cluster_jobs import Jobs, until
from lockstep.platforms.kubernetes.cluster import Cluster
from lockstep.platforms.kubernetes.exec import output_of
from lockstep.platforms.kubernetes.reader import beside


def hostname_and_files(jobs: Jobs, name: str, node: int) -> list[str]:
    async def read() -> bytes:
        async with await Cluster.connect() as cluster, beside(cluster, jobs.namespace, name, node) as place:
            command = ["python3", "-c", "import os, socket; print(socket.gethostname(), *sorted(os.listdir('/workspace')))"]
            return await output_of(cluster, place, command)

    return asyncio.run(read()).decode().split()


def test_files_of_a_job_are_seen_by_its_pod_while_it_runs_and_by_a_reader_afterwards(jobs: Jobs) -> None:
    jobs.start("files", storage={"mode": "PerPod"})
    jobs.until_running("files")
    host, *files = hostname_and_files(jobs, "files", 1)
    assert host == "files-1" and "runs" in files
    jobs.change("files", suspend=True)
    jobs.until_condition("files", "Suspended", "True", "Suspended")
    until("the pods are gone", lambda: not jobs.pods("files"))
    host, *left = hostname_and_files(jobs, "files", 1)
    assert host.startswith("files-reader-") and left == files
    pods = jobs.kind("Pod").get(namespace=jobs.namespace).to_dict()["items"]
    assert all(pod["metadata"].get("deletionTimestamp") for pod in pods)
    jobs.end("files")
