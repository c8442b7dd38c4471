"""Whatever stands in a file, its reader ends: with a value, or with an error that names the file."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.api.errors import ConfigError
from lockstep.api.files.clusterfile import parse_cluster_file
from lockstep.api.files.clusterkeys import KEYS, ON_HOSTS
from lockstep.api.files.jobfile import parse_job_file
from lockstep.api.files.yamltext import dump_yaml
from support.checkout import ROOT

TEMPLATE = (ROOT / "clusters/template.yaml").read_text()
HOSTS = (ROOT / "clusters/template-hosts.yaml").read_text()
SAMPLE = (ROOT / "manifests/samples/trainingjob-glm-air.yaml").read_text()
SNIPPETS = [
    "\t",
    "\n",
    " ",
    ":",
    "- ",
    "[",
    "]",
    "{",
    "}",
    "&a ",
    "*a",
    "<<: ",
    "!!int ",
    "no",
    "1e5",
    "0x1",
    "0x_",
    ".nan",
    "null",
    "é",
    "\x00",
    "'",
    '"',
    "|",
    "#",
    "a.b[c",
    "? ",
]

NAMES = st.one_of(
    st.sampled_from(sorted({part.removesuffix("[]") for key in (*KEYS, *ON_HOSTS.keys) for part in key.split(".")})),
    st.text(st.sampled_from("ab.[]{}: "), max_size=4),
)
LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5))
DOCUMENTS = st.recursive(
    LEAVES, lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(NAMES, inner, max_size=4)), max_leaves=15
)


@st.composite
def damaged(draw: st.DrawFn, text: str) -> str:
    """A good file with up to three pieces cut out or put in."""
    for _ in range(draw(st.integers(1, 3))):
        at, length = draw(st.integers(0, len(text))), draw(st.integers(0, 30))
        text = text[:at] + draw(st.sampled_from(SNIPPETS)) + text[at + length :]
    return text


def read(parse: Callable[[str, str], object], text: str) -> None:
    try:
        parse(text, "f.yaml")
    except ConfigError as error:
        assert all(line.startswith("f.yaml") for line in str(error).split("\n"))


@settings(max_examples=60)
@given(damaged(TEMPLATE))
def test_a_damaged_cluster_file(text: str) -> None:
    read(parse_cluster_file, text)


@settings(max_examples=60)
@given(damaged(HOSTS))
def test_a_damaged_file_of_hosts(text: str) -> None:
    read(parse_cluster_file, text)


@settings(max_examples=150)
@given(DOCUMENTS, DOCUMENTS)
def test_any_document_as_a_file_of_hosts(document: object, hosts: object) -> None:
    if isinstance(document, dict):
        read(parse_cluster_file, dump_yaml(document | {"cluster": {"name": "x", "platform": "hosts"}, "hosts": hosts}))


@settings(max_examples=100)
@given(damaged(SAMPLE))
def test_a_damaged_job_file(text: str) -> None:
    read(parse_job_file, text)


@settings(max_examples=150)
@given(DOCUMENTS)
def test_any_document_as_a_cluster_file(document: object) -> None:
    read(parse_cluster_file, dump_yaml({"cluster": {"name": "x", "namespace": "n"}} | document if isinstance(document, dict) else document))


@settings(max_examples=150)
@given(DOCUMENTS)
def test_any_document_as_a_spec(document: object) -> None:
    read(
        parse_job_file,
        dump_yaml({"apiVersion": "lockstep.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "x"}, "spec": document}),
    )


@pytest.mark.parametrize("key", ["x[y", "x]", "[", ".", "a."])
def test_a_label_that_looks_like_a_path_is_told(key: str) -> None:
    text = dump_yaml({"cluster": {"name": "x", "namespace": "n"}, "nodes": {"selector": {key: "!"}}})
    with pytest.raises(ConfigError, match="must be a label key"):
        parse_cluster_file(text, "f.yaml")
