"""The guide for multi-node training, followed on OpenShift with its own `oc`: every test of the embedded cluster, but for what is different
there.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cluster import test_seed_004 as guide
from cluster.test_seed_004 import deployed, page, person  # noqa: F401

pytestmark = pytest.mark.long
DIFFERENT = ("test_clusters_are_listed", "test_what_needs_openshift_says_so")
"""A file outside of the checkout is in no list; below is what OpenShift answers."""
globals().update({name: test for name, test in vars(guide).items() if name.startswith("test_") and name not in DIFFERENT})


@pytest.fixture(scope="module")
def path(cluster: Path) -> str:
    """A PATH on which `oc` is OpenShift's."""
    return os.environ["PATH"]


@pytest.fixture(scope="module")
def typed_cluster(cluster_file: Path) -> str:
    return str(cluster_file)


def test_sccs_are_for_administrators_of_the_cluster(page: guide.Page, person: guide.Person) -> None:  # noqa: F811
    done = page(guide.SCC)
    assert ("Users:" in done.stdout) is person.is_administrator
    assert ("is forbidden" in done.stderr) is not person.is_administrator
