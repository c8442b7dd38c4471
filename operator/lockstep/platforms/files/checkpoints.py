"""A job's commits, read where they are: gigabytes are verified beside their volume, and only the answer travels."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.api.errors import ConfigError
from lockstep.kube.cluster import Cluster
from lockstep.kube.exec import program
from lockstep.platforms.files.adapters import run_folder
from lockstep.platforms.files.reader import Say, beside, nodes_with_volumes
from lockstep_spec.exits import CONFIGURATION

MODULE = "lockstep_train.inspect"
ANSWER_BYTES_MAX = 64 << 20
BAD_NEWS = 1


async def inspected(cluster: Cluster, namespace: str, job: str, verb: str, options: Sequence[str], say: Say) -> tuple[str, int]:
    """What the trainer's program prints of the job's run, and its exit code: 0, or 1 for an answer that is bad news.

    In a pod of the job, or in a short-lived one that mounts its claims. Raises ConfigError, NoReader or ProgramFailed.
    """
    nodes = await nodes_with_volumes(cluster, namespace, job)
    if len(nodes) > 1:
        raise ConfigError(
            f"job {job} has a volume a pod, and its shards are spread over {len(nodes)}: fetch them (lockstep cp {job}:runs/{job}/checkpoints node-N "
            f"--node N -n {namespace}, N from {nodes[0]} to {nodes[-1]}) and name the folders: lockstep checkpoint {verb} node-{nodes[0]} …"
        )
    folder = run_folder(job)
    async with beside(cluster, namespace, job, nodes[0] if nodes else 0, say=say) as place:
        answer = bytearray()
        async with program(cluster, place, ["python3", "-m", MODULE, verb, folder, *options], stdin=False, pings=True) as running:
            while data := await running.read():
                answer += data
                if len(answer) > ANSWER_BYTES_MAX:
                    raise ConfigError(f"pod {place.pod}: {MODULE} prints more than {ANSWER_BYTES_MAX} bytes, which is no answer")
            if running.code == CONFIGURATION:
                raise ConfigError(str(running.failure()))
            if running.code != 0 and not (running.code == BAD_NEWS and answer):
                raise running.failure()
            return answer.decode(errors="replace"), BAD_NEWS if running.code else 0
