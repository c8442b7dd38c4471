"""How a deployment ends: what an administrator must do, and what to type next."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockstep.api.errors import ConfigError
from lockstep.platforms.output import put

if TYPE_CHECKING:
    from lockstep.cli.deploy import Deployment
    from lockstep.platforms.kubernetes.send import Sent

FOLDER = "deploy"
FORCED = "forced"
PLACES = "servers"
"""Where a cluster whose file states no cluster.api was deployed to."""
LAST = "cluster"
"""Which cluster is meant where none is named, here and in the Makefile: the one that was deployed last."""


def tell_left(plan: Deployment, sent: Sent) -> None:
    """What is missing, differs or can't be seen, and the commands by which an administrator puts it right."""
    from lockstep.plan.deploy import State, called, for_an_administrator, open_ones

    left = open_ones(sent.left)
    if not left:
        return
    cluster = plan.cluster.cluster.name
    sure = any(part.state is not State.UNSEEN for part in left)
    put(
        "",
        "NOT COMPLETE: you may not send these:" if sure else "You may neither send nor see these; that all is well with them is unknown:",
    )
    for part in left:
        put(f"  {called(part.item)}: {part.state.value}{f' ({part.reason})' if part.reason else ''}")
    put("An administrator of the cluster types, in a checkout:")
    put(f"  make deploy-cluster CLUSTER={cluster} {plan.choices} DEV=0")
    put(f"or, with the files that were just written, in which the operator's image is {plan.sent_image} (OPERATOR_IMAGE= names another):")
    for command in admin_commands(cluster, *for_an_administrator(left)):
        put(f"  {command}")
    if sure:
        put(f"Then repeat: make deploy-cluster CLUSTER={cluster} {plan.choices}")


def admin_commands(cluster: str, definitions: list[dict[str, Any]], others: list[dict[str, Any]]) -> list[str]:
    """Write the files, and say how they are applied: in the name of deploy, so that a later one can also take something away."""
    from lockstep.api.yamltext import dump_all_yaml
    from lockstep.cli.paths import from_here, state_folder
    from lockstep.platforms.kubernetes.install import FIELD_MANAGER

    commands = []
    folder = state_folder() / FOLDER / cluster
    folder.mkdir(parents=True, exist_ok=True)
    for name, objects in (("definitions.yaml", definitions), ("cluster.yaml", others)):
        path = folder / name
        path.unlink(missing_ok=True)
        if not objects:
            continue
        path.write_text(dump_all_yaml(objects), encoding="utf-8")
        shown = from_here(path)
        commands.append(f"kubectl apply --server-side --force-conflicts --field-manager={FIELD_MANAGER} -f {shown}")
        if objects is definitions:
            commands.append(f"kubectl wait --for=condition=Established -f {shown}")
    return commands


def tell_end(plan: Deployment, *, dev: bool, complete: bool) -> None:
    """The cluster's notes, what is ready, and the next commands."""
    cluster, namespace = plan.cluster.cluster.name, plan.namespace
    if plan.profile.spec.notes:
        put("", f"Notes of {plan.profile.metadata.name}:", *plan.profile.spec.notes.rstrip().splitlines())
    if not complete:
        put("", f"What is wrong: lockstep doctor {cluster}")
        return
    remember(cluster)
    warned = f", with {len(plan.findings)} of the cluster file's lines to mend (warnings above)" if plan.findings else ""
    put("", f"Ready{warned}. Next:")
    for command, meaning in _next_with_pods(cluster, namespace) if dev else _next_without(plan):
        put(f"  {command:<62} # {meaning}")


def _next_with_pods(cluster: str, namespace: str) -> list[tuple[str, str]]:
    from lockstep.api.names import DEV_ENVIRONMENT

    return [
        (f"kubectl get pods -n {namespace} -l app={DEV_ENVIRONMENT}-multi", "the pods"),
        (f"make sync-multi-node CLUSTER={cluster}", "workspace/ to all of them"),
        (f"make run-multi-node CLUSTER={cluster} SCRIPT=train_multi_node.py", "on all nodes; Ctrl-C stops it"),
        (f"make shell-multi-node CLUSTER={cluster}", "a shell in node 0"),
    ]


def _next_without(plan: Deployment) -> list[tuple[str, str]]:
    """A job of this cluster: the samples are for others."""
    cluster, namespace = plan.cluster.cluster.name, plan.namespace
    return [
        (f"lockstep init job first --cluster {cluster} -o first.yaml", "a job: set its model and data"),
        (f"lockstep plan -f first.yaml --cluster {plan.file}", "does it fit? Nothing is started"),
        (f"kubectl apply -n {namespace} -f first.yaml", "start it"),
        (f"kubectl get tj -n {namespace} -w", "what becomes of it"),
        (f"make status-cluster CLUSTER={cluster}", "operator, TrainingCluster and jobs"),
    ]


def remember(cluster: str) -> None:
    """The default from now on."""
    from lockstep.cli.paths import state_folder

    path = state_folder() / LAST
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{cluster}\n", encoding="utf-8")


def remember_forced(cluster: str, server: str) -> None:
    """Take this API server for the cluster's from now on, though its file names another: a deployment was forced there."""
    _write_server(FORCED, cluster, server)


def was_forced(cluster: str, server: str) -> bool:
    """Whether a deployment of this cluster was forced to this API server from this checkout."""
    return _read_server(FORCED, cluster) == server


def remember_server(cluster: str, server: str) -> None:
    """Where a cluster is whose file doesn't say so: its verbs are kept to this API server until it is deployed to another."""
    _write_server(PLACES, cluster, server)


def server_of(cluster: str) -> str | None:
    """Where this checkout has deployed a cluster whose file doesn't say where it is."""
    return _read_server(PLACES, cluster)


def _write_server(folder: str, cluster: str, server: str) -> None:
    from lockstep.cli.paths import state_folder

    path = state_folder() / folder / cluster
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{server}\n", encoding="utf-8")


def _read_server(folder: str, cluster: str) -> str | None:
    from lockstep.cli.paths import state_folder

    try:
        return (state_folder() / folder / cluster).read_text(encoding="utf-8").strip() or None
    except (OSError, ValueError, ConfigError):
        return None


def deployed_last() -> str | None:
    """The cluster that was deployed last, as long as clusters/ has its file. None: none was, or this is no checkout."""
    from lockstep.cli.paths import checkout, state_folder

    try:
        root = checkout()
        name = (state_folder() / LAST).read_text(encoding="utf-8").strip()
    except (OSError, ValueError, ConfigError):
        return None
    return name if (root / "clusters" / f"{name}.yaml").is_file() else None


def forget(cluster: str) -> None:
    """A cluster that is gone is nobody's default."""
    from lockstep.cli.paths import state_folder

    for folder in (FORCED, PLACES):
        (state_folder() / folder / cluster).unlink(missing_ok=True)
    if deployed_last() == cluster:
        (state_folder() / LAST).unlink(missing_ok=True)
