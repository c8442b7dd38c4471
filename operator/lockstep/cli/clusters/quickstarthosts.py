"""`lockstep quickstart --hosts`: the demo on two hosts of this one machine, reached over ssh as machines of one's own are."""

from __future__ import annotations

import asyncio
from pathlib import Path

from lockstep.api.errors import Failed
from lockstep.cli.clusters.demo import AGAIN, GENERATE_SECONDS, SAMPLE, demo_folder, generate_command, print_result, sample_file, step
from lockstep.cli.shared.places import Verb
from lockstep.platforms.hosts.backend import HostsBackend, HostsJob
from lockstep.platforms.output import put_text

HOSTS = 2


def run_on_bed(verb: Verb) -> int:
    """Bring two hosts up on this machine, train the demo on them, show a sample of its adapter, and return the exit code."""
    from lockstep.api.names import FRESH
    from lockstep.api.objects import Typed
    from lockstep.cli.clusters.devcluster import BED, bring_hosts_up
    from lockstep.cli.shared.clusterfiles import use
    from lockstep.cli.shared.folders import from_here, write_state
    from lockstep.cli.shared.inputs import read_inputs
    from lockstep.cli.shared.jobargs import TargetOptions
    from lockstep.cli.shared.target import load
    from lockstep.platforms.places.backend import Order

    with step("Bring up two hosts on this machine, each with a systemd, an sshd and a disk"):
        file = bring_hosts_up(HOSTS)
    cluster = write_state(BED, file.read_text(encoding="utf-8"))
    named = str(from_here(cluster))
    use(named)
    demo = demo_folder()
    here = f"cluster={load(verb, named).cluster.name}"
    inputs = read_inputs(sample_file(), TargetOptions(named, verb=verb), [here])
    backend = HostsBackend(inputs.cluster, named)
    with step("Copy the base model and the texts to both hosts"):
        asyncio.run(_copy(backend, demo))
    again = any(job.name == inputs.job.metadata.name for job in backend.jobs())
    if again:
        inputs = read_inputs(sample_file(), TargetOptions(named, verb=verb), [here, FRESH])
    with step(f"Train{AGAIN if again else ''}: lockstep run -f {sample_file()} {backend.again}{' --fresh' if again else ''}"):
        code = backend.run(Order(inputs.job, inputs.cluster, Typed(str(sample_file()), (), (FRESH,))))
    if code != 0:
        return code
    with step(SAMPLE):
        job = backend.job(inputs.job.metadata.name)
        put_text(asyncio.run(_sample(job)))
    commands = f"""\
  lockstep get {backend.again}
  lockstep why {inputs.job.metadata.name} {backend.again}
  lockstep logs {inputs.job.metadata.name} {backend.again}
  lockstep devcluster down
"""
    print_result(job.status["result"], commands, f" on host {job.seen.first}")
    return 0


async def _copy(backend: HostsBackend, demo: Path) -> None:
    """Put the model and the texts into the folders of every host. Raises Failed."""
    from lockstep.platforms.files.transfer import TransferProgress
    from lockstep.platforms.files.transfer import put as send

    fleet = backend.fleet()
    answers, problems = await fleet.look()
    if problems:
        raise Failed("; ".join(problems.values()))

    async def one(name: str) -> None:
        facts = answers[name]
        for source, folder in (
            (demo / "models", f"{facts.workspace.path}/models"),
            *((path, facts.datasets.path) for path in (demo / "datasets").iterdir()),
        ):
            target = folder if source.is_dir() else f"{folder}/{source.name}"
            await send(
                fleet.place(name),
                source,
                target,
                [facts.workspace.path, facts.datasets.path],
                TransferProgress(lambda: None),
                own_umask=True,
            )

    _, problems = await fleet.all(backend.hosts.names, one)
    if problems:
        raise Failed("; ".join(problems.values()))


async def _sample(job: HostsJob) -> str:
    """Text of the demo's model without and with the adapter, written on node 0's host."""
    from lockstep.programs import output_of

    record = job.record_on(job.seen.first)
    assert record is not None  # noqa: S101 (it has just run)
    command = generate_command(f"{record.workspace}/models/tiny-base", job.status["result"]["adapter"])
    place = job.backend.fleet().place(job.seen.first)
    printed = await output_of(place, [record.command[0], *command[1:]], seconds=GENERATE_SECONDS)
    return printed.decode(errors="replace")
