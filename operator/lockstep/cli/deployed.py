"""How a deployment ends: what an administrator must do, and what to type next."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockstep.cli.deployment import remember
from lockstep.platforms.output import put

if TYPE_CHECKING:
    from lockstep.cli.deploy import Deployment
    from lockstep.platforms.kubernetes.send import Sent

FOLDER = "deploy"


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
