"""The control plane: etcd, API server, controllers, scheduler, DNS and our provisioner, as daemons of the host."""

from __future__ import annotations

import sys
from pathlib import Path

from lockstep.devcluster.host.layout import Layout

CLUSTER_DOMAIN = "cluster.local"
ADMIN_GROUP = "system:masters"


def write_credentials(layout: Layout) -> None:
    """Key pairs and kubeconfig files of every component; what is there is kept."""
    from lockstep.devcluster.certificates import Authority  # (with a package that `down` and `status` do without)

    authority = Authority(layout.pki)
    authority.service_account_key()
    names = ("kubernetes", "kubernetes.default", "kubernetes.default.svc", f"kubernetes.default.svc.{CLUSTER_DOMAIN}", "localhost")
    authority.issue("apiserver", "kube-apiserver", addresses=("127.0.0.1", layout.gateway, layout.service_address), names=names)
    authority.issue("kubelet-client", "kube-apiserver-kubelet-client", ADMIN_GROUP)
    authority.kubeconfig(layout.kubeconfig, layout.server, "admin", ADMIN_GROUP, context=layout.name)
    for user in ("system:kube-controller-manager", "system:kube-scheduler", "system:kube-proxy"):
        authority.kubeconfig(component_kubeconfig(layout, user), layout.server, user, context=layout.name)
    # etcd believes every certificate of its authority, so it has one of its own: no user of the cluster gets past the API server.
    private = Authority(layout.pki / "etcd")
    private.issue("server", "etcd", addresses=("127.0.0.1",))
    private.issue("client", "kube-apiserver")


def component_kubeconfig(layout: Layout, user: str) -> Path:
    return layout.state / "kubeconfigs" / user.replace(":", "-")


def write_corefile(layout: Layout) -> Path:
    path = layout.state / "Corefile"
    path.write_text(
        f".:53 {{\n  bind {layout.gateway}\n  errors\n  kubernetes {CLUSTER_DOMAIN} in-addr.arpa {{\n    kubeconfig {layout.kubeconfig}\n"
        "    pods insecure\n    ttl 1\n  }\n  cache 1\n}\n"
    )
    return path


def commands(layout: Layout, kube: Path) -> dict[str, list[str]]:
    """The command line of every daemon, in the order of starting."""
    pki, binary = layout.pki, str(kube)
    etcd, peer = (f"https://127.0.0.1:{layout.etcd_port(peer)}" for peer in (False, True))
    own = pki / "etcd"
    return {
        "etcd": [
            binary, "etcd", f"--data-dir={layout.state / 'etcd'}", "--unsafe-no-fsync", "--log-level=warn",
            f"--listen-client-urls={etcd}", f"--advertise-client-urls={etcd}",
            f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}", f"--initial-cluster=default={peer}",
            f"--trusted-ca-file={own / 'ca.crt'}", f"--cert-file={own / 'server.crt'}", f"--key-file={own / 'server.key'}",
            "--client-cert-auth", "--peer-client-cert-auth", f"--peer-trusted-ca-file={own / 'ca.crt'}",
            f"--peer-cert-file={own / 'server.crt'}", f"--peer-key-file={own / 'server.key'}",
        ],
        "kube-apiserver": [
            binary, "kube-apiserver", f"--etcd-servers={etcd}", f"--etcd-cafile={own / 'ca.crt'}",
            f"--etcd-certfile={own / 'client.crt'}", f"--etcd-keyfile={own / 'client.key'}",
            f"--bind-address={layout.gateway}", f"--advertise-address={layout.gateway}", "--secure-port=6443",
            f"--cert-dir={layout.state / 'apiserver'}", f"--service-cluster-ip-range={layout.service_network}",
            f"--tls-cert-file={pki / 'apiserver.crt'}", f"--tls-private-key-file={pki / 'apiserver.key'}",
            f"--client-ca-file={pki / 'ca.crt'}", f"--service-account-key-file={pki / 'service-accounts.key'}",
            f"--service-account-signing-key-file={pki / 'service-accounts.key'}",
            "--service-account-issuer=https://kubernetes.default.svc", "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            f"--kubelet-client-certificate={pki / 'kubelet-client.crt'}", f"--kubelet-client-key={pki / 'kubelet-client.key'}",
            "--kubelet-preferred-address-types=InternalIP",  # the nodes' names are in no DNS
            "--allow-privileged=true", "--profiling=false",
        ],
        "kube-controller-manager": [
            binary, "kube-controller-manager", f"--kubeconfig={component_kubeconfig(layout, 'system:kube-controller-manager')}",
            f"--service-account-private-key-file={pki / 'service-accounts.key'}", f"--root-ca-file={pki / 'ca.crt'}",
            "--use-service-account-credentials=true", "--leader-elect=false", "--allocate-node-cidrs=false", "--profiling=false",
            "--kube-api-qps=200", "--kube-api-burst=400",  # 20 by default: a thousand StatefulSets would take ten minutes
            f"--bind-address={layout.gateway}", f"--cert-dir={layout.state / 'controller-manager'}",
        ],
        "kube-scheduler": [
            binary, "kube-scheduler", f"--kubeconfig={component_kubeconfig(layout, 'system:kube-scheduler')}", "--leader-elect=false",
            "--profiling=false", f"--bind-address={layout.gateway}", f"--cert-dir={layout.state / 'scheduler'}",
            # Rarely (seen: 1 pod of 229) the scheduler misses that a claim was bound, and would look at the pod again only after five
            # minutes.
            "--pod-max-in-unschedulable-pods-duration=5s",
        ],
        "coredns": [binary, "coredns", "-conf", str(write_corefile(layout))],
        "provisioner": [sys.executable, "-m", "lockstep.devcluster.provisioner", str(layout.root), layout.name, str(layout.index)],
    }  # fmt: skip
