"""Common parts of jobs, wherever they run: a log in the run's folder, and commits on one volume."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from lockstep.api.errors import ConfigError
from lockstep.api.objects import Object, condition, has_ended, is_true
from lockstep.kube.threads import in_thread
from lockstep.plan.pages.logs import LogSelection, request_of
from lockstep.platforms.output import put, say
from lockstep.platforms.places.backend import Job
from lockstep.platforms.places.values import Say, Use
from lockstep_spec.exits import FAILED


class CommonJob(Job):
    """A job whose log is read from the run's folder, and whose commits are on one volume."""

    @property
    def log_uid(self) -> str:
        """Return the uid of the start whose log is read; '' for the newest one of its name."""
        return self.uid

    async def is_over(self, say: Say) -> bool:
        """Return True if no line of its log will come any more. `say` hears what a person who follows it should know."""
        return has_ended(self.look_again())

    async def lines(self, selection: LogSelection, say: Say, *, follow: bool = False) -> AsyncGenerator[str, None]:
        from lockstep.platforms.jobs.runs import folder_lines, followed

        request = {"uid": self.log_uid, **request_of(selection, time.time())}
        async with self.volume(selection.node, say) as volume:
            place, folder = volume.place, volume.run_folder(self.name)
            read = followed(place, folder, request, lambda: self.is_over(say)) if follow else folder_lines(place, folder, **request)
            async with aclosing(read) as lines:
                async for line in lines:
                    yield line

    async def commits(self, verb: str, options: Sequence[str], say: Say) -> tuple[str, int]:
        """Return the answer as of `Job.commits`. Raises ConfigError for shards that are spread over several volumes."""
        from lockstep.platforms.files.results import inspected

        nodes = await in_thread(self.nodes_with_volumes)
        if len(nodes) > 1:
            raise ConfigError(
                f"job {self.name} has one volume per pod, and its shards are spread over {len(nodes)} of them: fetch them (lockstep cp"
                f" {self.name}:runs/{self.name}/checkpoints node-N --node N {self.backend.words.again}, N from {nodes[0]} to {nodes[-1]})"
                f" and name the folders: lockstep checkpoint node-{nodes[0]} …{' --verify' * (verb == 'verify')}"
            )
        async with self.volume(nodes[0] if nodes else 0, say, Use.TRAINER) as volume:
            return await inspected(volume.place, verb, volume.run_folder(self.name), options)


def tell_if_suspended(job: Job, status: Object, before: str, say: Say) -> str:
    """Say that a job is suspended, whose log is followed, where it wasn't before. Return what to pass as `before` next time."""
    reason = str(condition(status, "Progressing").get("reason"))
    if reason == "Suspended" and before != reason:
        say(f"{job.name} is suspended; this goes on when it does (lockstep resume {job.at}), Ctrl-C ends it")
    return reason


async def show_to_its_end(job: Job, selection: LogSelection) -> int:
    """Print a job's log until it has ended. Return the exit code: 0 complete, 1 failed."""
    async with aclosing(job.lines(selection, say, follow=True)) as lines:
        async for line in lines:
            put(line, flush=True)
    return FAILED if is_true(await in_thread(job.look_again), "Failed") else 0
