"""Embedded clusters and beds of hosts that belong to the tests: which numbers are theirs, and that nobody else's is touched."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from lockstep.devcluster.certificates import Authority
from lockstep.devcluster.host.layout import NUMBER, Layout, default_layout
from lockstep.devcluster.hosts.layout import BedLayout
from lockstep.environments import cache_root

GIVEN = "LOCKSTEP_TEST_KUBECONFIG"
"""Names the kubeconfig of a cluster that tests may use as they like, instead of clusters of their own."""
NOBODYS = 9
"""The number that tests/cluster/test_devcluster.py has to itself. Tests without a cluster have it, too: no embedded cluster is up under it.
"""
NUMBERS = range(8, 0, -1)
"""Never 0: that one is a person's."""
GO = {"GOGC": "400", "GOMAXPROCS": "1"}
"""Variables of a cluster's daemons, which are Go programs: they collect their garbage less often, and don't wake a second thread for what
one does in time. Memory for a third of their processor time, and a little waiting for an eighth of it.
"""
KEPT = {"lock", "starting", "nodes"}
"""Entries of a cluster's state that its removal leaves: the images in its nodes, which take longer to import than the rest of a start."""


@contextmanager
def own_number(numbers: Sequence[int] = NUMBERS) -> Iterator[None]:
    """Make one of these embedded clusters' numbers this process's own for as long as the block lasts: $LOCKSTEP_DEVCLUSTER.

    A cluster that an earlier run was killed beside is removed; one that tests haven't made is left alone, and so is its number. Only the
    images in its nodes stay, for the next run.
    """
    before = os.environ.get(NUMBER)
    try:
        for number in numbers:
            os.environ[NUMBER] = str(number)
            with claimed(default_layout().state, str(number), _remove, KEPT) as ours:
                if ours:
                    yield
                    return
        pytest.exit(f"embedded clusters {numbers[-1]} to {numbers[0]} are all in use: LOCKSTEP_DEVCLUSTER=N lockstep devcluster down", 2)
    finally:
        os.environ.pop(NUMBER) if before is None else os.environ.update({NUMBER: before})


@contextmanager
def own_bed(numbers: Sequence[int] = NUMBERS) -> Iterator[BedLayout]:
    """Make one of these beds of hosts this process's own for as long as the block lasts. Others' are left alone, as in `own_number`."""
    from lockstep.devcluster.hosts.bed import down

    for number in numbers:
        bed = BedLayout(number, cache_root())
        with claimed(bed.state, f"hosts-{number}", partial(down, bed, print, purge=True)) as ours:
            if ours:
                yield bed
                return
    pytest.exit(f"beds of hosts {numbers[-1]} to {numbers[0]} are all in use: LOCKSTEP_DEVCLUSTER=N lockstep devcluster down", 2)


@contextmanager
def claimed(state: Path, name: str, remove: Callable[[], None], kept: Container[str] = ()) -> Iterator[bool]:
    """Return True if what has its state in this folder is ours now. A lock tells runs apart; the file's content outlives a run that is
    killed.

    `kept`: entries of the folder that stay after `remove`, and that belong to nothing that is there.
    """

    def is_there() -> bool:
        return state.exists() and (not kept or any(path.name not in kept for path in state.iterdir()))

    state.parent.mkdir(parents=True, exist_ok=True)
    with (state.parent / f"tests-{name}").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        file.seek(0)
        if not file.read() and is_there():
            yield False
            return
        file.write("made by tests\n")
        file.flush()
        if is_there():
            remove()
        try:
            yield True
        finally:
            if is_there():
                remove()
            file.truncate(0)


def _remove() -> None:
    from lockstep.devcluster.cluster import down

    layout = default_layout()
    down(layout, lambda text: None)
    if layout.volumes.exists():  # a start that was killed early has made none
        shutil.rmtree(layout.volumes)


def client_kubeconfig(user: str, groups: Sequence[str] = (), layout: Layout | None = None) -> Path:
    """A kubeconfig for `user` as a member of `groups`, by a certificate of the cluster's authority. RBAC says what that user may do.

    Made again each time, so a user's groups can change. The file holds a key: only its owner can read it, and `down` removes it.

    Raises:
        FileNotFoundError: the cluster is not up, so there is no authority.
    """
    layout = layout or default_layout()
    if not (layout.pki / "ca.crt").exists():
        raise FileNotFoundError(f"{layout.pki / 'ca.crt'}: the cluster {layout.name} is not up (lockstep devcluster up)")
    file = layout.state / "kubeconfigs" / f"client-{re.sub(r'[^A-Za-z0-9.-]', '-', user)}"
    Authority(layout.pki).kubeconfig(file, layout.server, user, *groups, context=layout.name, renew=True)
    return file
