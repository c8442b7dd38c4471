"""Every label, annotation, object name and path that Lockstep puts on a cluster."""

from __future__ import annotations

GROUP = "lockstep.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KUBERNETES, HOSTS = "kubernetes", "hosts"
"""Backends of cluster files. The second is the value of `cluster.platform` that makes a file one of hosts, and also stands for the
namespace, which they don't have.
"""
FIXED_FIELDS = ("type", "cluster", "storage", "training.model.name", "training.model.quantization", "training.model.revision")
"""Fields of a job's spec that the API server lets nobody change after creation (RULES of api.job and api.training); an unset cluster may
be set.
"""

# Labels on every child of a job.
LABEL_NAME = "app.kubernetes.io/name"
LABEL_MANAGED_BY = "app.kubernetes.io/managed-by"
LABEL_JOB = f"{GROUP}/job"
LABEL_RUN = f"{GROUP}/run"  # on the ConfigMap that owns a run of --in-namespace: its job's name
LABEL_APP = "app"  # on pods and claims of a dev environment: `kubectl get pods -l app=ml-dev-env-multi`
LABEL_POD_INDEX = "apps.kubernetes.io/pod-index"
LABEL_HOSTNAME = "kubernetes.io/hostname"
LABEL_QUEUE = "kueue.x-k8s.io/queue-name"  # read by Kueue on the StatefulSet
APP = "lockstep"

# Volumes of a pod.
WORKSPACE_VOLUME = "workspace"
DATASETS_VOLUME = "datasets"
AGENT_VOLUME = "lockstep-agent"
RUN_VOLUME = "lockstep-run"
KEY_VOLUME = "lockstep-key"
TOKEN_VOLUME = "lockstep-token"  # noqa: S105 (a volume's name)
SHM_VOLUME = "lockstep-shm"
TMP_VOLUME = "lockstep-tmp"

# Annotations.
ANNOTATION_DEFAULT_CLUSTER = f"{GROUP}/is-default-cluster"
ANNOTATION_RELEASE = "meta.helm.sh/release-name"  # written by helm on what is of a release
ANNOTATION_NETWORKS = "k8s.v1.cni.cncf.io/networks"  # read by Multus
ANNOTATION_DEFAULT_CONTAINER = "kubectl.kubernetes.io/default-container"
ANNOTATION_TYPED = f"{GROUP}/typed"  # on a job without an API server: the command that starts it again, as a person typed it
ANNOTATION_PLACE = f"{GROUP}/place"  # on a job that `lockstep get --everywhere` prints, and nowhere else: its cluster, or this machine
ANNOTATION_RUN_HASH = f"{GROUP}/run-hash"  # on the StatefulSet: which frozen run its pods use
ANNOTATION_ATTEMPTS_BEFORE = (  # on the StatefulSet: the attempts that there had been when it last went up from zero pods
    f"{GROUP}/attempts-before"
)
ANNOTATION_RUN_PROOF = f"{GROUP}/run-proof"  # on the ConfigMap of a frozen run: that this operator wrote it
ANNOTATION_CLUSTER = f"{GROUP}/cluster-hash"  # on the operator's pods: which TrainingCluster they have read
ANNOTATION_TROUBLE = f"{GROUP}/trouble"  # on the operator's Lease: since when it lacks which right
ANNOTATION_LEADER = f"{GROUP}/leader"  # on the operator's Lease: where the replica that leads takes reports

# The operator.
OPERATOR_NAMESPACE = "lockstep-system"
OPERATOR_NAME = "lockstep-operator"
KEY_SECRET = f"{OPERATOR_NAME}-key"
TLS_SECRET = f"{OPERATOR_NAME}-tls"
REPORT_AUDIENCE = f"{GROUP}/report"


def report_url(namespace: str) -> str:
    """URL at which the operator in `namespace` takes reports."""
    return f"https://{OPERATOR_NAME}.{namespace}.svc/v1/report"


REPORT_URL = report_url(OPERATOR_NAMESPACE)

# The dev environment that `lockstep deploy` makes in a cluster's namespace: an Interactive TrainingJob.
DEV_ENVIRONMENT = "ml-dev-env"

# Inside a pod of a job.
CONTAINER = "trainer"
AGENT_CONTAINER = "agent"
AGENT_FOLDER = "/lockstep"
AGENT_PATH = f"{AGENT_FOLDER}/agent.pyz"
AGENT_SOCKET = f"{AGENT_FOLDER}/agent.sock"
RUN_FOLDER = "/etc/lockstep/run"
RUN_KEY = "run.json"
KEY_FOLDER = "/etc/lockstep/agents"
KEY_KEY = "key"
TOKEN_FOLDER = "/var/run/secrets/lockstep"  # noqa: S105 (a path)
TOKEN_KEY = "token"  # noqa: S105 (a file name)
WORKSPACE = "/workspace"
DATASETS = "/datasets"
CODE_MOUNT = "/opt/lockstep"
"""A cluster's volume that is mounted here has Lockstep's own packages, and the operator runs from it, too: the embedded cluster's."""
COORDINATOR_PORT = 29400
MASTER_PORT = 29500

# Claims of a namespace, shared by all its jobs (Shared storage).
WORKSPACE_CLAIM = "ml-dev-workspace"
DATASETS_CLAIM = "ml-datasets"

# StatefulSet puts `<name>-<10 characters>` into a pod label of at most 63 characters.
JOB_NAME_MAX = 52
NODES_MAX = 1024
"""Largest number of nodes of a job. Anybody may have written what is read as such a number elsewhere."""
JOB_NAME_PATTERN = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"


def service_name(job: str) -> str:
    return f"{job}-headless"


def key_secret_name(job: str, mark: str = "") -> str:
    """Name of the Secret with the key of a job's agents. `mark`: a part of the name that only the job's operator can compute; empty without
    an operator.
    """
    return f"{job}-agents" + (f"-{mark}" if mark else "")


def run_name(job: str, run_hash: str) -> str:
    return f"{job}-run-{run_hash}"


def log_name(job: str) -> str:
    return f"{job}-log"


def pod_name(job: str, node: int) -> str:
    return f"{job}-{node}"


def node_index(pod: str) -> int:
    """The pod's number in its StatefulSet; -1 if its name has none."""
    number = pod.rpartition("-")[2]
    return int(number) if number.isdecimal() else -1


def node_address(job: str, node: int) -> str:
    """The pod's DNS name within its namespace, resolvable before it is Ready (the Service publishes not-ready addresses).

    The pod's search domain appends the namespace: a name that has it already becomes longer than the 253 characters of a DNS name.
    """
    return f"{pod_name(job, node)}.{service_name(job)}"


def app_label(job: str) -> str:
    return f"{job}-multi"


def job_labels(job: str) -> dict[str, str]:
    return {LABEL_NAME: APP, LABEL_MANAGED_BY: APP, LABEL_JOB: job}


FRESH = "training.checkpoint.resumeFrom=None"
"""Change of a job (--set) that --fresh stands for."""
DELETED = "deleted"
"""A file in the folder of a run of this machine that a person has deleted: its checkpoints and logs stay."""
