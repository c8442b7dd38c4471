"""What people write in clusters/*.yaml, and what they are told when it can't be right."""

from __future__ import annotations

from textwrap import dedent
from typing import Any

import pytest
from pydantic.alias_generators import to_camel

from lockstep.api.cluster import Memlock, Platform, TrainingClusterSpec
from lockstep.api.errors import ConfigError
from lockstep.api.files.clusterfile import ClusterFile, parse_cluster_file
from lockstep.api.files.clusterkeys import CLUSTER, EXCEPTIONS, PROFILE_KEYS
from lockstep_spec.choices import StorageMode
from support.cluster_file_cases import given, left_out, written

HEAD = "cluster: {name: x, namespace: n}\n"

# The example that the guide for users gives.
MY_CLUSTER = """\
cluster:
  name: my-cluster
  api: api.my-cluster.example.com
  namespace: nccl-test

nodes:
  gpu_nodes:
    - gpu-node-1
    - gpu-node-2

storage:
  mode: rwx
  class_rwx: nfs-csi
  workspace_size: 100Gi

network:
  rdma:
    enabled: true
    devices: "mlx5_2,mlx5_3,mlx5_4,mlx5_5"
    interfaces: "net1,net2,net3,net4"

security:
  service_account: ml-dev-sa
  requires_privileged_scc: true
  ipc_lock: true

gpus:
  per_node: 4
  default_nodes: 2
"""


def load(text: str) -> ClusterFile:
    return parse_cluster_file(dedent(text), "c.yaml")


def spec(text: str) -> TrainingClusterSpec:
    return load(HEAD + dedent(text)).profile.spec


def told(text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(text)
    return str(caught.value).splitlines()


def test_the_example_of_the_guide_loads_as_it_stands() -> None:
    cluster, profile, *_ = load(MY_CLUSTER)
    assert (cluster.name, cluster.api, cluster.namespace) == ("my-cluster", "api.my-cluster.example.com", "nccl-test")
    assert profile.metadata.name == "my-cluster"
    assert profile.spec == TrainingClusterSpec.model_validate(
        {
            "nodes": {"gpuNodes": ["gpu-node-1", "gpu-node-2"]},
            "storage": {"mode": "Shared", "classRwx": "nfs-csi", "workspaceSize": "100Gi"},
            "network": {
                "rdma": {
                    "enabled": True,
                    "devices": ["mlx5_2", "mlx5_3", "mlx5_4", "mlx5_5"],
                    "interfaces": ["net1", "net2", "net3", "net4"],
                }
            },
            "security": {"serviceAccount": "ml-dev-sa", "ipcLock": True},
            "gpus": {"perNode": 4, "defaultNodes": 2},
        }
    )


def test_a_file_of_two_lines_has_the_defaults() -> None:
    assert spec("") == TrainingClusterSpec()


def test_numbers_may_stand_in_quotes_and_lists_have_commas() -> None:
    read = spec('network: {rdma: {gid_index: "3", gdr_level: 5, devices: "mlx5_2, mlx5_3"}}\nresources: {requests: {cpu: 32}}').network.rdma
    assert (read.gid_index, read.gdr_level, read.devices) == (3, "5", ["mlx5_2", "mlx5_3"])


def test_the_words_of_the_file_become_those_of_the_api() -> None:
    text = (
        "cluster: {name: x, namespace: n, platform: kubernetes}\nstorage: {mode: volumeClaimTemplates}\nnetwork: {rdma: {memlock:"
        " unlimited}}"
    )
    read = load(text).profile.spec
    assert (read.platform, read.storage.mode, read.network.rdma.memlock) == (Platform.KUBERNETES, StorageMode.PER_POD, Memlock.UNLIMITED)


@pytest.mark.parametrize(
    "text", ["nodes:", "nodes:\n  gpu_nodes:", "nodes: {gpu_nodes: []}", 'nodes: {gpu_nodes: ""}', "nodes: {selector: }"]
)
def test_a_section_or_list_without_a_value_is_left_out(text: str) -> None:
    assert spec(text) == TrainingClusterSpec()


def test_a_file_may_be_json() -> None:
    assert load('{"cluster": {"name": "x",\n\t"namespace": "n", "description": "\\ud83d\\ude00"}}').cluster.description == "😀"


def test_an_anchor_stands_for_its_value() -> None:
    read = spec("resources: {requests: &same {cpu: 2}, limits: *same}")
    assert read.resources.requests == read.resources.limits


RAILS = "network, resource"
RDMA_KEYS = ", ".join(sorted(CLUSTER.below("network.rdma")))
MISTAKES = {
    "network: {rdma: {gid_idx: 3}}": f"network.rdma.gid_idx: unknown key; did you mean gid_index? (valid here: {RDMA_KEYS})",
    "network: {rdma: {gidIndex: 3}}": f"network.rdma.gidIndex: unknown key; did you mean gid_index? (valid here: {RDMA_KEYS})",
    "security: {zzz: 1}": "security.zzz: unknown key (valid here: ipc_lock, service_account)",
    "gid_index: 3": "gid_index: unknown key here; it belongs to network.rdma.gid_index",
    "nodes: {platform: kubernetes}": "nodes.platform: unknown key here; it belongs to cluster.platform",
    "gpus: {per_node: 4, per_node: 8}": "gpus.per_node: duplicate key: it is on line 2 already",
    "gpus: {per_node: four}": "gpus.per_node: 'four' is not valid: must be a whole number such as 4",
    "gpus: {per_node: 010}": "gpus.per_node: '010' is not valid: must be a whole number such as 4",
    "gpus: {per_node: 4.0}": "gpus.per_node: '4.0' is not valid: must be a whole number such as 4",
    "gpus: {per_node: -1}": "gpus.per_node: must be greater than or equal to 0",
    "gpus: {per_node: 65}": "gpus.per_node: must be less than or equal to 64",
    "gpus: {per_node: }": "gpus.per_node: has no value: must be a whole number; leave the key out for its default",
    "gpus: 4": "gpus: must be a mapping with the keys per_node, type, default_nodes",
    "image: ": "image: has no value: must be text; leave the key out for its default",
    "image: 'a b'": "image: 'a b' is not valid: must be an image reference, without spaces",
    "image: [a]": "image: must be text",
    "storage: {class_rwx: no}": "storage.class_rwx: must be text, but YAML reads no as a truth value: write it in quotes",
    "storage: {class_rwx: on}": "storage.class_rwx: must be text, but YAML reads on as a truth value: write it in quotes",
    "storage: {mode: RWX}": "storage.mode: 'RWX' is not valid; did you mean rwx? (valid: rwx, volumeClaimTemplates)",
    "storage: {mode: off}": "storage.mode: must be one of rwx, volumeClaimTemplates, but YAML reads off as a truth value: write it in"
                            " quotes",
    "storage: {workspace_size: 100 GB}": "storage.workspace_size: '100 GB' is not valid: must be a quantity such as 100Gi, 32 or 500m",
    "security: {ipc_lock: maybe}": "security.ipc_lock: 'maybe' is not valid: must be true or false",
    "nodes: {gpu_nodes: {a: b}}": 'nodes.gpu_nodes: must be a list, or names divided by commas such as "net1,net2"',
    "nodes: {gpu_nodes: [a, yes]}": "nodes.gpu_nodes: must be a list of names, but YAML reads yes as a truth value: write it in quotes",
    "nodes: {gpu_nodes: [a, A_B]}": "nodes.gpu_nodes[1]: 'A_B' is not valid: must be lower-case letters, digits, '-' and '.', beginning and"
                                    " ending with a letter or digit",
    "nodes: {gpu_nodes: [a, a]}": "nodes.gpu_nodes: gpu_nodes holds 'a' twice",
    "nodes: {selector: {a: true}}": "nodes.selector: must be text for a, but YAML reads true as a truth value: write it in quotes",
    "nodes: {selector: {a: b, a: c}}": "nodes.selector: a: duplicate key: it is on line 2 already",
    "nodes: {selector: {a b: c}}": "nodes.selector.a b: 'a b' is not valid: must be a label key such as rack or example.com/rack",
    "nodes: {selector: [a]}": "nodes.selector: must be a mapping of labels to values",
    "network: {rdma: {rails: {network: a}}}": f"network.rdma.rails: must be a list of mappings with the keys {RAILS}",
    "network: {rdma: {rails: [a]}}": f"network.rdma.rails[0]: must be a mapping with the keys {RAILS}",
    "network: {rdma: {rails: [{resource: a/b}]}}": "network.rdma.rails: rails may not be set when enabled is false",
    "network: {rdma: {rails: [{network: a, resource: b}]}}": "network.rdma.rails[0].resource: 'b' is not valid: must be an extended"
        " resource such as openshift.io/eno5np0rdma",
    "network: {rdma: {rails: [{net: a}]}}": "network.rdma.rails[0].net: unknown key; did you mean network? (valid here: network, resource)",
    "nccl: {debug: info}": "nccl.debug: 'info' is not valid; did you mean INFO? (valid: INFO, TRACE, VERSION, WARN)",
    "pod: {volumes: [{name: v, claim: c, mount_path: opt}]}": "pod.volumes[0].mount_path: 'opt' is not valid: must be an absolute path,"
        " beginning with /",
    "pod: {volumes: [{name: v, claim: c, mount_path: /o, class: A}]}": "pod.volumes[0].class: 'A' is not valid: must be lower-case letters,"
        " digits, '-' and '.', beginning and ending with a letter or digit",
    "pod: {env: [{name: 1A}]}": "pod.env[0].name: '1A' is not valid: must be the name of a variable: letters, digits and '_', not beginning"
                                " with a digit",
    "pod: {tolerations: [{key: a, operator: exists}]}": "pod.tolerations[0].operator: 'exists' is not valid; did you mean Exists? (valid:"
                                                        " Equal, Exists)",
    "pod: {tolerations: [{key: a, value: true}]}": "pod.tolerations[0].value: must be text, but YAML reads true as a truth value: write it"
                                                   " in quotes",
    "pod: {image_pull_secrets: [a, a]}": "pod.image_pull_secrets: image_pull_secrets holds 'a' twice",
    "notes: {<<: {a: b}}": "notes: must be text",
    "1: 2": "1: YAML does not read this key as text: write it in quotes",
    "on: 2": "on: YAML does not read this key as text: write it in quotes",
    "? [a]\n: 2": "a key must be text",
    "<<: {image: a}": "<<: merging with << is not supported: write the keys out",
}  # fmt: skip

COMBINATIONS = {
    "pod: {tolerations: [{key: a}, {value: b}]}": "pod.tolerations[1].key: key must be set unless operator is Exists",
    "pod: {tolerations: [{key: a, operator: Exists, value: b}]}": "pod.tolerations[0].value: value may not be set when operator is Exists",
    "pod: {tolerations: [{key: a, effect: NoSchedule, toleration_seconds: 3}]}": "pod.tolerations[0].toleration_seconds: toleration_seconds"
        " may only be set when effect is NoExecute",
    "network: {rdma: {enabled: true, rails: [{}]}}\nsecurity: {ipc_lock: true}": "network.rdma.rails[0].network: must have a network, a"
        " resource or both",
    "network: {rdma: {rails: [{network: a}]}}": "network.rdma.rails: rails may not be set when enabled is false",
    "network: {rdma: {enabled: true}}": "security.ipc_lock: security.ipc_lock must be true when network.rdma.enabled is true and"
                                        " network.rdma.memlock is capability: a NIC can't use memory that a pod can't lock",
    "network: {rdma: {memlock: unlimited}}\nsecurity: {ipc_lock: true}": "security.ipc_lock: security.ipc_lock may not be true when"
        " network.rdma.memlock is unlimited: the capability would not be used",
    "nodes: {gpu_nodes: [a]}": "nodes.gpu_nodes: nodes.gpu_nodes must be empty or list at least gpus.default_nodes nodes",
    "resources: {requests: {cpu: 2}, limits: {cpu: 1500m}}": "resources.limits.cpu: limits.cpu must be greater than or equal to"
        " requests.cpu",
    "storage: {mode: volumeClaimTemplates, workspace_claim: w}": "storage.mode: workspace_claim and datasets_claim may not be set when mode"
        " is volumeClaimTemplates: every pod has claims of its own",
}  # fmt: skip


@pytest.mark.parametrize(("text", "message"), (MISTAKES | COMBINATIONS).items(), ids=(MISTAKES | COMBINATIONS).keys())
def test_a_mistake_is_told_with_its_line_its_key_and_what_is_valid(text: str, message: str) -> None:
    line, separator, rest = told(HEAD + text)[0].removeprefix("c.yaml:").partition(": ")
    assert separator + rest == f": {message}"
    assert int(line) in (2, 3)


def test_the_line_is_that_of_the_key() -> None:
    assert told("cluster:\n  name: x\n  namespace: n\n\ngpus:\n  # comment\n  per_node: many\n") == [
        "c.yaml:7: gpus.per_node: 'many' is not valid: must be a whole number such as 4"
    ]


def test_all_mistakes_of_a_file_are_told_in_its_order() -> None:
    mistakes = told("""\
        cluster:
          name: no
          namspace: x
        storage:
          mode: RWX
        gpus: {per_node: four, per_nod: 1}
        """)
    assert [line.split(": ")[:2] for line in mistakes] == [
        ["c.yaml:1", "cluster.namespace"],
        ["c.yaml:2", "cluster.name"],
        ["c.yaml:3", "cluster.namspace"],
        ["c.yaml:5", "storage.mode"],
        ["c.yaml:6", "gpus.per_nod"],
        ["c.yaml:6", "gpus.per_node"],
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", f"c.yaml: is empty; must be one mapping with the keys {', '.join(CLUSTER.below(''))}"),
        ("- a", f"c.yaml: is not a mapping; must be one mapping with the keys {', '.join(CLUSTER.below(''))}"),
        (f"{HEAD}---\n{HEAD}", f"c.yaml: holds 2 documents; must be one mapping with the keys {', '.join(CLUSTER.below(''))}"),
        ("a: [", "c.yaml:1: is not valid YAML: expected the node content, but found '<stream end>'"),
        (
            "cluster:\n\tname: x",
            "c.yaml:2: is not valid YAML: found character '\\t' that cannot start any token; indent with spaces, not tabs",
        ),
        (
            "image: !!python/name:os.system a",
            "c.yaml:1: YAML tags such as 'tag:yaml.org,2002:python/name:os.system' are not supported: write plain values",
        ),
        ("[" * 40, "c.yaml:1: is nested more than 32 levels deep"),
        ("a: &a {b: *a}", "c.yaml:1: an alias refers to a value that contains it"),
        ("x" * 300_000, "c.yaml: is 300000 characters long; at most 262144 are read"),
    ],
)
def test_what_is_no_mapping_is_told_as_such(text: str, message: str) -> None:
    assert told(text) == [message]


def test_text_that_multiplies_by_its_aliases_is_refused_at_once() -> None:
    layers = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    layers += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 25)]
    assert told("\n".join(layers)) == ["c.yaml:5: has more than 20000 values with its aliases written out"]


def profile_of(values: dict[str, Any]) -> TrainingClusterSpec:
    from lockstep.api.files.yamltext import dump_yaml

    return load(dump_yaml(written(values))).profile.spec


@pytest.mark.parametrize("key", [key.file for key in PROFILE_KEYS])
def test_every_key_changes_the_profile(key: str) -> None:
    assert profile_of(given(key)) != profile_of(left_out(key))


def test_every_exception_is_a_field_that_would_be_called_otherwise() -> None:
    fields = {key.model for key in PROFILE_KEYS} | {"network.mode"}
    assert {".".join(map(to_camel, name.split("."))) for name in EXCEPTIONS} <= fields
    assert {key.file for key in PROFILE_KEYS} >= {file for file in EXCEPTIONS.values() if file}


@pytest.mark.parametrize(("text", "field", "value"), [
    ("cluster: {name: y, namespace: n}", "name", "y"),
    ("cluster: {name: x, namespace: m}", "namespace", "m"),
    ("cluster: {name: x, namespace: n, api: a.example.com}", "api", "a.example.com"),
    ("cluster: {name: x, namespace: n, description: d}", "description", "d"),
])  # fmt: skip
def test_the_cluster_section_is_read(text: str, field: str, value: str) -> None:
    assert getattr(load(text).cluster, field) == value


def test_what_was_measured_is_read_and_kept_out_of_the_profile() -> None:
    sweep = 'calibration:\n  - {transport: TCP, nodes: 2, ranks: 8, day: "2026-11-21", sweep: [{bytes: 1048576, busbw: "0.31"}]}\n'
    found = load(f"cluster: {{name: x, namespace: n}}\n{sweep}")
    assert [(one.transport.value, one.ranks, one.sweep[0].bytes, one.sweep[0].busbw) for one in found.calibration] == [
        ("TCP", 8, 1048576, "0.31")
    ]
    assert "calibration" not in found.profile.spec.to_dict()


def test_a_mistake_in_what_was_measured_is_told_with_its_line() -> None:
    with pytest.raises(ConfigError, match=r":3: calibration\[0\]\.transport: 'IB' is not valid"):
        load(
            "cluster: {name: x, namespace: n}\ncalibration:\n  - {transport: IB, nodes: 2, ranks: 2, day: '2026-11-21', sweep: [{bytes: 1,"
            " busbw: '1'}]}"
        )
