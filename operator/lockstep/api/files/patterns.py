"""Words for each pattern of the API, for messages and for the reference."""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.api import cluster, hosts, job, model, names, shared, status, training

_LEVELS = "PIX, PXB, PHB, SYS or 0 to 5"

PATTERN_WORDS: Mapping[str, str] = {
    model.DECIMAL_PATTERN: model.DECIMAL_WORDS,
    model.SHARE_PATTERN: model.SHARE_WORDS,
    model.FRACTION_PATTERN: model.FRACTION_WORDS,
    model.QUANTITY_PATTERN: "a quantity such as 100Gi, 32 or 500m",
    model.DNS_LABEL_PATTERN: "lower-case letters, digits and '-', beginning and ending with a letter or digit",
    model.DNS_NAME_PATTERN: "lower-case letters, digits, '-' and '.', beginning and ending with a letter or digit",
    model.ENV_NAME_PATTERN: "the name of a variable: letters, digits and '_', not beginning with a digit",
    model.TEXT_PATTERN: "text without NUL characters, at which a program's arguments and variables end",
    model.ABSOLUTE_PATH_PATTERN: "an absolute path, beginning with /",
    model.IMAGE_PATTERN: "an image reference, without spaces",
    model.LABEL_KEY_PATTERN: "a label key such as rack or example.com/rack",
    model.LABEL_VALUE_PATTERN: "a label value: letters, digits, '-', '_' and '.', beginning and ending with a letter or digit",
    names.JOB_NAME_PATTERN: "lower-case letters, digits and '-', beginning with a letter and ending with a letter or digit",
    cluster.INTERFACE_PATTERN: "the name of a device or network interface",
    cluster.EXCLUSION_PATTERN: "network interfaces to leave out, such as ^lo,docker0",
    cluster.RESOURCE_PATTERN: "an extended resource such as openshift.io/eno5np0rdma",
    cluster.NETWORK_PATTERN: "a network attachment such as eno5np0-network or namespace/eno5np0-network",
    cluster.GDR_PATTERN: f"LOC, {_LEVELS}",
    cluster.P2P_PATTERN: f"LOC, NVL, {_LEVELS}",
    job.MODULE_PATTERN: "a Python module such as package.train",
    shared.NCCL_PATTERN: "an NCCL variable such as NCCL_ALGO",
    shared.KEY_PATTERN: "a key: letters, digits, '-', '_' and '.'",
    shared.FIELD_PATTERN: "a field of a pod, such as status.podIP",
    status.REASON_PATTERN: "one CamelCase word",
    model.DAY_PATTERN: "a day such as '2026-11-21', in quotes",
    model.SERVER_PATTERN: "a host such as api.example.com, or https://api.example.com:6443",
    hosts.HOST_NAME_PATTERN: "a name that ssh takes: letters, digits, '-', '_' and '.'; a user and a port have keys of their own",
    hosts.USER_PATTERN: "a login name",
    hosts.JUMP_PATTERN: "hosts as ssh's ProxyJump takes them, such as bastion or ada@bastion:2222",
    hosts.HOST_KEY_PATTERN: "a public host key: its type and base64, such as ssh-ed25519 AAAA…",
    hosts.HOST_PATH_PATTERN: "a path that begins with / or ~/",
    hosts.GPU_PATTERN: hosts.GPU_WORDS,
    hosts.PORTS_PATTERN: "first and last port, such as 29400-29499",
    hosts.PYTHON_PATTERN: "a version from 3.10 to 3.19",
    hosts.INDEX_PATTERN: "an https address without a login",
    training.DATA_PATH_PATTERN: "an absolute path, beginning with /, or an address such as s3://bucket/folder",
    training.MODEL_PATTERN: (
        "a folder such as /workspace/models/Qwen3-8B, a model of the hub such as org/name, or an address such as s3://bucket/folder"
    ),
    training.RESUME_PATTERN: "Auto, None or an absolute path",
}
