"""Any cluster that a file can state comes back from its file."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.api.cluster import Rdma, TrainingClusterSpec
from lockstep.api.files.clusterfile import parse_cluster_file
from lockstep.api.files.clusterkeys import PROFILE_KEYS
from lockstep.api.files.yamltext import dump_yaml
from support.cluster_file_cases import bounds

NAMES = st.from_regex(r"[a-z0-9]([-a-z0-9]{0,8}[a-z0-9])?", fullmatch=True)
TEXTS = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\x00"), max_size=40)
QUANTITIES = st.builds("{}{}".format, st.integers(1, 9999), st.sampled_from(["", "m", "k", "Mi", "Gi", "T"]))
SWITCHES = st.booleans()


def numbers(low: int, high: int) -> st.SearchStrategy[int]:
    return st.integers(low, high)


def some(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=fields)


def unique(items: st.SearchStrategy[dict[str, Any]], key: str) -> st.SearchStrategy[list[dict[str, Any]]]:
    return st.lists(items, max_size=3, unique_by=lambda item: item[key])


RESOURCES = st.builds("{}/{}".format, NAMES, NAMES)
RAIL = st.one_of(
    st.fixed_dictionaries({"network": NAMES}, optional={"resource": RESOURCES}), st.fixed_dictionaries({"resource": RESOURCES})
)
RAILS = st.lists(RAIL, max_size=3)
RDMA_KNOBS: dict[str, st.SearchStrategy[Any]] = {
    "devices": st.lists(NAMES, max_size=4),
    "interfaces": st.lists(NAMES, max_size=4),
    "gdrLevel": st.sampled_from(["SYS", "5"]),
}
for field, info in ((info.alias or name, info) for name, info in Rdma.model_fields.items()):
    if ends := bounds(info):
        RDMA_KNOBS[field] = numbers(*ends)
    elif info.annotation in (bool, bool | None):
        RDMA_KNOBS[field] = SWITCHES
RDMA = some(**RDMA_KNOBS)
FABRICS = st.one_of(
    st.builds(lambda rdma, rails: ({**rdma, "enabled": True, "memlock": "Unlimited", "rails": rails}, {"ipcLock": False}), RDMA, RAILS),
    st.builds(lambda rdma, rails: ({**rdma, "enabled": True, "rails": rails}, {"ipcLock": True}), RDMA, RAILS),
    st.builds(lambda rdma, lock: ({**rdma, "enabled": False}, {"ipcLock": lock}), RDMA, SWITCHES),
)
STORAGE = some(classRwx=NAMES, classRwo=NAMES, workspaceSize=QUANTITIES, datasetsSize=QUANTITIES)
VOLUMES = st.fixed_dictionaries(
    {"name": NAMES, "claim": NAMES, "mountPath": st.builds("/{}".format, NAMES)}, optional={"storageClass": NAMES, "size": QUANTITIES}
)
KEYED = {"key": NAMES}
TOLERATIONS = st.one_of(
    st.fixed_dictionaries(
        {"operator": st.just("Exists")}, optional={**KEYED, "effect": st.sampled_from(["NoSchedule", "PreferNoSchedule"])}
    ),
    st.fixed_dictionaries({**KEYED, "effect": st.just("NoExecute")}, optional={"value": NAMES, "tolerationSeconds": numbers(0, 9999)}),
    st.fixed_dictionaries({**KEYED, "operator": st.just("Equal"), "value": NAMES}),
)
PROFILES = st.builds(
    lambda rest, fabric, storage, nodes: (
        rest
        | {"network": rest.get("network", {}) | {"rdma": fabric[0]}, "security": rest.get("security", {}) | fabric[1]}
        | {"storage": storage, "nodes": nodes}
    ),
    some(
        platform=st.sampled_from(["OpenShift", "Kubernetes"]),
        network=some(tcp=some(interfaceExclude=st.just("^lo"), p2pLevel=st.sampled_from(["NVL", "0"])), mtu=numbers(576, 65535)),
        security=some(serviceAccount=NAMES),
        gpus=some(perNode=numbers(0, 64), type=TEXTS, defaultNodes=numbers(1, 3)),
        resources=st.one_of(some(requests=some(cpu=QUANTITIES, memory=QUANTITIES)), some(limits=some(cpu=QUANTITIES, memory=QUANTITIES))),
        nccl=some(
            debug=st.sampled_from(["INFO", "WARN"]),
            env=unique(st.fixed_dictionaries({"name": st.from_regex(r"NCCL_[A-Z]{1,5}", fullmatch=True), "value": TEXTS}), "name"),
        ),
        image=NAMES,
        shmSize=QUANTITIES,
        pod=some(
            volumes=unique(VOLUMES, "name"),
            env=unique(st.fixed_dictionaries({"name": st.from_regex(r"[A-Z_]{1,6}", fullmatch=True)}, optional={"value": TEXTS}), "name"),
            tolerations=st.lists(TOLERATIONS, max_size=3),
            imagePullSecrets=st.lists(NAMES, max_size=3, unique=True),
            runtimeClassName=NAMES,
        ),
        notes=TEXTS,
    ),
    FABRICS,
    st.one_of(
        st.builds(lambda s: {**s, "mode": "PerPod"}, STORAGE),
        st.builds(lambda s, claims: {**s, **claims, "mode": "Shared"}, STORAGE, some(workspaceClaim=NAMES, datasetsClaim=NAMES)),
    ),
    some(
        gpuNodes=st.lists(NAMES, min_size=3, max_size=5, unique=True), selector=st.dictionaries(NAMES, NAMES, max_size=3), rackLabel=NAMES
    ),
)


def in_file(model: dict[str, Any]) -> dict[str, Any]:
    """The cluster's fields under the keys of the file: the table, read from right to left."""
    document: dict[str, Any] = {"cluster": {"name": "x", "namespace": "n"}}
    for key in PROFILE_KEYS:
        words = {value: word for word, value in key.choices.items()}
        _put(document, key.file.split("."), model, key.model.split("."), words)
    return document


def _put(document: dict[str, Any], file: list[str], model: dict[str, Any], fields: list[str], words: dict[str, str]) -> None:
    name = fields[0].removesuffix("[]")
    if name not in model:
        return
    if len(fields) == 1:
        place = document
        for section in file[:-1]:
            place = place.setdefault(section, {})
        value = model[name]
        place[file[-1]] = words.get(value, value) if isinstance(value, str) else value
    elif fields[0].endswith("[]"):
        items = document.setdefault(name, [{} for _ in model[name]])
        for item, inner in zip(items, model[name], strict=True):
            _put(item, file[1:], inner, fields[1:], words)
    else:
        _put(document.setdefault(file[0], {}), file[1:], model[name], fields[1:], words)


def test_every_field_of_rdma_is_generated() -> None:
    missing = {info.alias for info in Rdma.model_fields.values()} - {*RDMA_KNOBS, "rails", "memlock"}  # FABRICS has these two
    assert not missing, f"add a strategy for {', '.join(map(str, missing))} to RDMA_KNOBS in {__file__}"


@settings(max_examples=150)
@given(PROFILES)
def test_a_profile_comes_back_from_its_file(model: dict[str, Any]) -> None:
    found = parse_cluster_file(dump_yaml(in_file(model)), "c.yaml").profile
    assert found.spec == TrainingClusterSpec.model_validate(model)
