"""TrainingJob and TrainingCluster to one resolved job: every value decided, with the layer that set it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from enum import Enum
from posixpath import basename, dirname, isabs, join, normpath
from typing import Any, TypeVar

from lockstep.api.cluster import Amounts, Rdma, TrainingCluster
from lockstep.api.errors import ConfigError
from lockstep.api.hosts import HostsCluster
from lockstep.api.job import RANKS_MAX, JobType, OwnAmounts, TrainingJob, ranks_a_node
from lockstep.api.model import Model, deprecations
from lockstep.api.names import ANNOTATION_NETWORKS, ANNOTATION_RUN_HASH, DATASETS, WORKSPACE
from lockstep.api.podtemplate import PodTemplate
from lockstep.api.quantity import number
from lockstep.api.shared import MAY_NAME_PATHS, PlainVariable, Variable
from lockstep.api.training import ON_VOLUMES
from lockstep.plan.layers import Layer, Layered, Notice, Setting, written
from lockstep.plan.render.fabric import Transport, Variables, choose_transport, fabric_refusals, fabric_warnings, nccl_environment
from lockstep.plan.render.pod import variable_warnings
from lockstep.plan.render.resolved import MADE_BY_OPERATOR, PlatformDefaults, Refused, Resolved
from lockstep.plan.render.scheduling import scheduling_refusals
from lockstep.plan.render.storage import claim_refusals, volume_refusals
from lockstep_spec.choices import StorageMode

T = TypeVar("T")
M = TypeVar("M", bound=Model)

UNNAMED_IMAGE = (
    "neither the job nor its cluster sets one: the operator uses lockstep-trainer:TAG from its own registry, and refuses the job if its own"
    " image isn't called lockstep-operator:TAG"
)
"""Description of the image for those who haven't seen the operator."""
PLACEHOLDER_MODEL, PLACEHOLDER_DATA = "/workspace/models/MODEL", "/datasets/train.jsonl"
"""Paths that `lockstep init job` writes."""
PYTHON = "python3"
MORE_GPUS = "MoreGPUsThanNodesHave"
_LEAST_AMOUNTS = {"memory": (Decimal(64 << 20), "bytes", "64Mi", "Gi"), "cpu": (Decimal("0.01"), "cores", "10m", "")}
"""Least that a job may state for itself, below which a suffix is missing or wrong: the number, its unit, how it is written, and the likely
suffix.
"""
_OPERATOR_IMAGE = re.compile(r"((?:[^/@]+/)*)lockstep-operator:([\w.-]+)(?:@.+)?")
_ROOT = re.compile(r"(?:^-\w|(?<![\w./~$}*-])|(?<=file://))(?P<path>/(?:workspace|datasets))(?![\w-]|\.\w)")
"""The beginning of a path on the volumes."""
_OPTION = re.compile(r"^[-+~]{0,2}\w[\w.@/-]*=")
"""The part of `--option=value`, or of `key=value`, before the value."""
PATH_IN_TEXT = "PathInText"
DEPRECATED = "Deprecated"
_TRAINER_IMAGE = re.compile(r"(?:[^/@]+/)*lockstep-trainer(?:[:@].+)?")
_PROFILE_SECTIONS = ("platform", "nodes", "storage", "security", "resources", "shm_size", "pod")
_JOB_SECTIONS = (
    "type", "resources", "idle_seconds", "restart", "start_timeout_seconds", "hang_timeouts", "preflight", "suspend",
    "active_deadline_seconds", "ttl_seconds_after_finished", "queue_name", "training", "script", "env", "env_from", "image_pull_secrets",
    "pod_template",
)  # fmt: skip


def resolve(job: TrainingJob, profile: TrainingCluster, platform: PlatformDefaults = PlatformDefaults()) -> Resolved:  # noqa: B008 (frozen)
    """Decide every value: the job's, else the cluster's, else the API's default, else the platform's.

    Raises Refused with every reason why the job can't run under this cluster.
    """
    spec, cluster = _with_real_paths(job.spec, platform), _with_real_paths(profile.spec, platform)
    placed = job.model_copy(update={"spec": spec})
    name = profile.metadata.name
    nodes = _jobs_or(spec.nodes, cluster.gpus, "default_nodes")
    gpus = _jobs_or(spec.gpus_per_node, cluster.gpus, "per_node")
    image = _image(job, profile, platform)
    transport = choose_transport(spec.fabric, cluster.network, gpus.value)
    storage = _jobs_or(spec.storage.mode, cluster.storage, "mode")
    claim = _jobs_or(spec.storage.workspace_claim_name, cluster.storage, "workspace_claim")
    refusals = [
        *_size_refusals(nodes.value, ranks_a_node(gpus.value, spec.ranks_per_node)),
        *fabric_refusals(transport.value, cluster.network, name),
        *_amount_refusals(spec.resources, cluster.resources.limits, name),
        *_image_refusals(image, name),
        *_storage_refusals(job, storage, name),
        *scheduling_refusals(spec.pod_template, cluster.nodes, name, nodes.value),
        *_annotation_refusals(spec.pod_template, transport.value, cluster.network.rdma),
        *claim_refusals(cluster, name),
        *volume_refusals(spec.pod_template.volumes, cluster.pod.volumes),
    ]
    if refusals:
        raise Refused(refusals)
    nccl = nccl_environment(spec.env, cluster, transport, gpus.value)
    ranks = gpus if gpus.value else Layered(spec.ranks_per_node or 1, Layer.JOB if spec.ranks_per_node else Layer.DEFAULT)
    decided: dict[str, Layered[Any]] = {
        "nodes": nodes, "gpusPerNode": gpus, "ranksPerNode": ranks, "image": image, "fabric.transport": transport, "storage.mode": storage,
    }  # fmt: skip
    if storage.value is StorageMode.SHARED:
        decided["storage.workspaceClaimName"] = claim
    return Resolved(
        job=job,
        profile=profile,
        platform=platform,
        namespace=job.metadata.namespace or platform.namespace,
        uid=job.metadata.uid or platform.uid,
        nodes=nodes.value,
        gpus_per_node=gpus.value,
        ranks_per_node=ranks.value,
        image=image.value or "",
        transport=transport.value,
        nccl=nccl,
        storage_mode=storage.value,
        workspace_claim=claim.value,
        spec=spec,
        command=_command(placed, platform),
        folder=_folder(job, platform),
        training=spec.training,
        warnings=(
            *fabric_warnings(transport.value, cluster.network, name, gpus.value),
            *gpu_warnings(job, profile),
            *variable_warnings(job, profile),
            *_placeholder_warnings(job),
            *_text_warnings(job, platform),
            *(Notice(DEPRECATED, sentence) for sentence in deprecations(job.spec, "spec")),
        ),
        settings=explain_settings(placed, profile, decided, nccl),
    )


def _jobs_or(value: T | None, section: Model, field: str) -> Layered[T]:
    """The job's value, else the field of this section of the cluster."""
    if value is not None:
        return Layered(value, Layer.JOB)
    return Layered(getattr(section, field), written(section, field, Layer.CLUSTER).layer)


def trainer_image(operator_image: str) -> str | None:
    """The image of Lockstep's trainer beside the operator's: in its registry, with its tag. None: the operator's isn't called
    lockstep-operator:TAG.
    """
    match = _OPERATOR_IMAGE.fullmatch(operator_image)
    return None if match is None else f"{match[1]}lockstep-trainer:{match[2]}"


def why_unknown(image: str, *variables: PlainVariable | Variable) -> str:
    """Return why it isn't known that ranks find the trainer in this image; '' if its name says so, or a PYTHONPATH among the pods'
    variables.
    """
    if _TRAINER_IMAGE.fullmatch(image) or any(variable.name == "PYTHONPATH" for variable in variables):
        return ""
    return f"nothing says that {image} has Lockstep's trainer: it isn't called lockstep-trainer, as `lockstep build trainer` calls it"


def image_doubt(resolved: Resolved) -> str:
    """Return what isn't known of a job's image: which one it is, or that of a training job has the trainer; '' where both are."""
    if resolved.image == MADE_BY_OPERATOR:
        return f"{UNNAMED_IMAGE} (lockstep plan asks it)"
    if resolved.training is None:
        return ""
    return why_unknown(resolved.image, *resolved.profile.spec.pod.env, *resolved.job.spec.env)


def describe_default_image(operator_image: str) -> tuple[str, bool]:
    """Text about the image of jobs without one on a cluster that sets none either, and True if there is one."""
    image = trainer_image(operator_image)
    if image is not None:
        return f"the cluster sets none: jobs without an image run {image}, from the operator's registry", True
    return (
        (
            f"the cluster sets none, and jobs without an image are refused: the operator's image {operator_image} isn't called"
            " lockstep-operator:TAG, which would give the default"
        ),
        False,
    )


def gpu_warnings(job: TrainingJob, profile: TrainingCluster) -> list[Notice]:
    """More GPUs than the cluster says that its nodes have: the pods would wait for ever, unless some node has more. None at all:
    `refuse_missing_gpus`.
    """
    gpus, requested = profile.spec.gpus, job.spec.gpus_per_node
    if requested is None or not gpus.per_node or requested <= gpus.per_node:
        return []
    message = (
        f"spec.gpusPerNode is {requested}, but nodes of cluster {profile.metadata.name} have {gpus.per_node} (gpus.per_node): pods wait"
        f" until a node has {requested}"
    )
    return [Notice(MORE_GPUS, message)]


def _placeholder_warnings(job: TrainingJob) -> list[Notice]:
    """Warn of a job file that is as `lockstep init job` wrote it. Its data's path may well be somebody's own."""
    training = job.spec.training
    if training is None or training.model.name != PLACEHOLDER_MODEL:
        return []
    also = "" if training.data.path != PLACEHOLDER_DATA else f", and see that your data is at {PLACEHOLDER_DATA} (spec.training.data.path)"
    message = (
        f"spec.training.model.name is {PLACEHOLDER_MODEL}, as `lockstep init job` writes it: name your model's folder or one of the"
        f" hub{also}"
    )
    return [Notice("Placeholder", message)]


def _image(job: TrainingJob, profile: TrainingCluster, platform: PlatformDefaults) -> Layered[str | None]:
    stated = ((job.spec.image, Layer.JOB), (profile.spec.image, Layer.CLUSTER))
    return next((Layered(image, layer) for image, layer in stated if image), Layered(platform.image, Layer.PLATFORM))


def _image_refusals(image: Layered[str | None], profile_name: str) -> list[Notice]:
    if image.value:
        return []
    return [
        Notice(
            "NoImage",
            f"neither the job nor the cluster {profile_name} sets an image, and there is no default, because the operator's own image isn't"
            " called lockstep-operator:TAG: set spec.image, or image in the cluster file",
        )
    ]


def _annotation_refusals(template: PodTemplate, transport: Transport, rdma: Rdma) -> list[Notice]:
    """Annotations that Lockstep needs for itself."""
    taken = [ANNOTATION_RUN_HASH]
    if transport is Transport.RDMA and rdma.networks:
        taken.append(ANNOTATION_NETWORKS)
    return [
        Notice(
            "AnnotationReserved",
            f"podTemplate.annotations[{key}] is set by Lockstep itself (networks: from the cluster's rails): remove it",
        )
        for key in taken
        if key in template.annotations
    ]


def _size_refusals(nodes: int, ranks: int) -> list[Notice]:
    """Refusals of a gang that the cluster's values make larger than the job's own fields say."""
    if nodes * ranks <= RANKS_MAX:
        return []
    message = f"{nodes} nodes with {ranks} ranks each are {nodes * ranks} ranks, and a job may have at most {RANKS_MAX}: use fewer nodes"
    return [Notice("TooManyRanks", message)]


def _amount_refusals(own: OwnAmounts, limits: Amounts, profile_name: str) -> Iterator[Notice]:
    """Refuse more than the cluster's limits, what no rank starts with, and 0, which to the kubelet is no limit at all."""
    for field, wanted in own.to_dict().items():
        most, (least, unit, written_least, suffix) = getattr(limits, field), _LEAST_AMOUNTS[field]
        if not number(wanted):
            yield Notice(
                "ResourcesNotPossible", f"spec.resources.{field} is {wanted}: state more than 0, or leave it out to take the cluster's"
            )
        elif number(wanted) < least:
            meant = f"{wanted.rstrip('numkKMGTPEi')}{suffix}"
            message = (
                f"spec.resources.{field} is {wanted}, which is {number(wanted):f} {unit}: is {meant} meant? State {written_least} or more"
            )
            yield Notice("ResourcesNotPossible", message)
        elif 0 < number(most) < number(wanted):
            message = (
                f"spec.resources.{field} is {wanted}, and the cluster {profile_name} allows a pod {most} (resources.limits.{field} in its"
                " file): ask for less, or have that limit raised"
            )
            yield Notice("ResourcesNotPossible", message)


def _storage_refusals(job: TrainingJob, mode: Layered[StorageMode], profile_name: str) -> list[Notice]:
    if mode.value is StorageMode.SHARED or job.spec.storage.workspace_claim_name is None:
        return []
    message = (
        f"storage.workspaceClaimName is set, but the cluster {profile_name} gives every pod a volume of its own (PerPod):"
        " remove it or set storage.mode to Shared"
    )
    return [Notice("WorkspaceClaimPerPod", message)]


def _command(job: TrainingJob, platform: PlatformDefaults) -> tuple[str, ...]:
    script = job.spec.script
    if job.spec.type is JobType.INTERACTIVE:
        return ()
    if script is None:
        return (PYTHON, "-m", "lockstep_train")
    if script.path is not None:
        in_folder = script.path if isabs(script.path) or script.folder is not None else basename(script.path)
        return (PYTHON, _real_path(in_folder, platform), *script.args)
    return (*(script.command or (PYTHON, "-m", str(script.module))), *script.args)


def _folder(job: TrainingJob, platform: PlatformDefaults) -> str:
    """Return the folder in which ranks work; a relative path of the script starts there."""
    script = job.spec.script
    stated = "" if script is None else script.folder or dirname(script.path or "")
    return _real_path(normpath(join(WORKSPACE, stated)), platform)


def _with_real_paths(model: M, platform: PlatformDefaults) -> M:
    """The model, with every field in it that is marked as a path of the volumes, or as text that may name some, as this platform has it."""
    update: dict[str, Any] = {}
    for name, field in type(model).model_fields.items():
        match getattr(model, name):
            case str(path) if ON_VOLUMES in field.metadata:
                update[name] = _real_path(path, platform)
            case str(text) if MAY_NAME_PATHS in field.metadata:
                update[name] = real_text(text, platform)
            case [str(), *_] as texts if MAY_NAME_PATHS in field.metadata:
                update[name] = [real_text(text, platform) for text in texts]
            case Model() as inner:
                update[name] = _with_real_paths(inner, platform)
            case [Model(), *_] as items:
                update[name] = [_with_real_paths(item, platform) for item in items]
    return model.model_copy(update={name: value for name, value in update.items() if value != getattr(model, name)})


def real_text(text: str, platform: PlatformDefaults) -> str:
    """The argument or value with its paths on the volumes as this platform has them; as it is where `names_path_inside` says so.

    A path is the whole text, or a part of it between colons; of `--option=value` and `key=value`, the value is such a text.
    """
    if names_path_inside(text):
        return text
    option = "".join(_OPTION.findall(text))
    return option + ":".join(_real_path(part, platform) for part in text.removeprefix(option).split(":"))


def names_path_inside(text: str) -> bool:
    """Return True if a path on the volumes begins elsewhere in the text than where a path of its own does."""
    first = len("".join(_OPTION.findall(text)))
    return any(match.start("path") > first and text[match.start("path") - 1] != ":" for match in _ROOT.finditer(text))


def _text_warnings(job: TrainingJob, platform: PlatformDefaults) -> Iterator[Notice]:
    """Warn of paths on the volumes that this platform has elsewhere, and that stay as they are."""
    spec, script = job.spec, job.spec.script
    texts = {f"spec.env[{variable.name}]": variable.value or "" for variable in spec.env}
    for field, words in () if script is None else (("args", script.args), ("command", script.command or [])):
        texts |= {f"spec.script.{field}[{index}]": text for index, text in enumerate(words)}
    moves = (platform.workspace, platform.datasets) != (WORKSPACE, DATASETS)
    for field in (field for field, text in texts.items() if moves and names_path_inside(text)):
        message = (
            f"{field} names a path inside other text, which is passed as it is: where the job runs, /workspace is {platform.workspace} and"
            f" /datasets is {platform.datasets}; write the path as an argument or a variable of its own"
        )
        yield Notice(PATH_IN_TEXT, message)


def _real_path(path: str, platform: PlatformDefaults) -> str:
    for root, real in ((WORKSPACE, platform.workspace), (DATASETS, platform.datasets)):
        if path == root or path.startswith(f"{root}/"):
            return real.rstrip("/") + path.removeprefix(root)
    return path


def path_lines(resolved: Resolved) -> list[str]:
    """Return the warnings of paths that stay as they are, as a start prints them."""
    return [f"warning: {one.reason}: {one.message}" for one in resolved.warnings if one.reason == PATH_IN_TEXT]


def unkept_lines(resolved: Resolved, where: str, why: str, fields: Sequence[str] = tuple(_LEAST_AMOUNTS)) -> list[str]:
    """Return the warning that nothing keeps these of the job's own amounts there, as a start prints it; [] for a job that states none of
    them.
    """
    stated = ", ".join(f"{field} {value}" for field, value in resolved.spec.resources.to_dict().items() if field in fields)
    return [f"warning: ResourcesNotKept: spec.resources ({stated}) is not kept {where}: {why}"] if stated else []


def refuse_missing_gpus(resolved: Resolved) -> None:
    """Raise Refused for a job whose pods ask for GPUs on a cluster that states none: they would wait for ever. Not for runs on one's own
    machine.
    """
    gpus, name = resolved.profile.spec.gpus, resolved.profile.metadata.name
    if resolved.gpus_per_node and not gpus.per_node and "per_node" in gpus.model_fields_set:
        message = (
            f"gpusPerNode is {resolved.gpus_per_node}, but the cluster {name} has no GPUs (gpus.per_node is 0 in its file): leave"
            " gpusPerNode out, so that ranks run on CPUs, name another cluster, or state its GPUs"
        )
        raise Refused([Notice("NoGPUs", message)])


def refuse_missing_hosts(resolved: Resolved, cluster: HostsCluster) -> None:
    """Raise ConfigError for a job with more nodes than there are hosts that may offer its GPUs. A host that states none may have any
    number.
    """
    counts = {host.name: len(host.gpus) if isinstance(host.gpus, list) else host.gpus for host in cluster.hosts}
    fitting = [name for name, count in counts.items() if count is None or count >= resolved.gpus_per_node]
    if len(fitting) >= resolved.nodes:
        return
    name, gpus = resolved.profile.metadata.name, resolved.gpus_per_node
    number = f"{len(fitting)} of {len(counts)}" if len(fitting) < len(counts) else str(len(counts))
    offered = f" with {gpus} GPUs" if gpus else ""
    stated = ", ".join(f"{host} {'any' if count is None else count}" for host, count in counts.items())
    message = (
        f"the job has {resolved.nodes} nodes{offered}, and {number} hosts of {name} may take one{f' (GPUs: {stated})' if gpus else ''}: use"
        " fewer nodes or GPUs"
    )
    raise ConfigError(message)


def explain_settings(
    job: TrainingJob, profile: TrainingCluster, decided: Mapping[str, Layered[Any]], nccl: Variables
) -> tuple[Setting, ...]:
    """Rows in reading order: what two layers could have set, NCCL's variables, the rest of the job, the rest of the cluster."""
    rows = [Setting(field, _plain(layered.value), layered.layer) for field, layered in decided.items()]
    rows += [Setting(f"env.{name}", layered.value, layered.layer) for name, layered in nccl.items()]
    for field in _JOB_SECTIONS:
        rows += _rows(job.spec, field, Layer.JOB, "")
    for field in _PROFILE_SECTIONS:
        rows += _rows(profile.spec, field, Layer.CLUSTER, "cluster.")
    return tuple(rows)


def _rows(model: Model, field: str, layer: Layer, prefix: str) -> Iterator[Setting]:
    """One row for a plain value, one for each field of a model; nothing for what is unset or empty."""
    layered = written(model, field, layer)
    value = layered.value
    path = prefix + (type(model).model_fields[field].alias or field)
    if isinstance(value, Model):
        for inner in type(value).model_fields:
            yield from _rows(value, inner, layer, f"{path}.")
    elif value not in (None, [], {}):
        yield Setting(path, _plain(value), layered.layer)


def _plain(value: object) -> object:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Model):
        return value.to_dict()
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value
