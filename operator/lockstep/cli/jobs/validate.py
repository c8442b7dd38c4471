"""`lockstep validate -f job.yaml`: whether the job could run, without asking any cluster."""

from __future__ import annotations

from lockstep.api.errors import ConfigError
from lockstep.cli.shared.inputs import ClusterOption, FilesOption, NamespaceOption, SetOption, read_all, resolve_inputs
from lockstep.platforms.output import put, tell


def validate(file: FilesOption, cluster: ClusterOption = None, namespace: NamespaceOption = None, changes: SetOption = None) -> None:
    """Check job files against a cluster file. Prints ok, or what is wrong and how to mend it (exit code 2).

    Example: lockstep validate -f job.yaml --cluster barcelona

    Example: lockstep validate jobs/*.yaml
    """
    from lockstep.plan.render.objects import render
    from lockstep.plan.render.resolve import UNNAMED_IMAGE, refuse_missing_gpus
    from lockstep.plan.render.resolved import MADE_BY_OPERATOR

    jobs = read_all(file, cluster, namespace, changes)
    mistakes: list[str] = []
    for inputs in jobs:
        try:
            resolved = resolve_inputs(inputs)
            refuse_missing_gpus(resolved)
            render(resolved)
        except ConfigError as error:
            mistakes += [f"{inputs.source}: {line}" if len(jobs) > 1 else str(line) for line in error.args]
        else:
            if resolved.image == MADE_BY_OPERATOR:
                tell(f"note: {inputs.source}: image: {UNNAMED_IMAGE} (lockstep plan asks it)")
            put(f"{inputs.source}: ok" if len(jobs) > 1 else "ok")
    if mistakes:
        raise ConfigError(*mistakes)
