"""Kubeconfigs of the embedded cluster: the administrator's kubeconfig, and files for other users (for tests of what those may do)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from lockstep.devcluster.certificates import Authority
from lockstep.devcluster.host.layout import Layout, default_layout


def path(layout: Layout | None = None) -> Path:
    """The administrator's kubeconfig; it exists while the cluster is up."""
    return (layout or default_layout()).kubeconfig


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
