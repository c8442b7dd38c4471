"""The embedded cluster with OpenShift's own control plane: its API server with SCC admission, controllers and scheduler, and
cluster-policy-controller.

`make test-openshift SOURCE=… OC=…` names the sources: openshift/microshift, which vendors all of these, and openshift/oc. Nodes, etcd and
DNS are the embedded cluster's.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from lockstep.api.errors import ConfigError
from lockstep.cli.clusters.devcluster import bring_up
from lockstep.devcluster import binary, cluster, controlplane
from lockstep.devcluster.host import processes
from lockstep.devcluster.host.layout import Layout, default_layout
from lockstep.environments import cache_root
from support.clusters.cluster_jobs import until

Commands = Callable[[Layout, Path], dict[str, list[str]]]
MAIN = Path(__file__).with_suffix(".go")
COMMAND = "cmd/openshift-kube"
"""Where the build of openshift/microshift sees MAIN."""
COMPONENTS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler")
POLICY = "cluster-policy-controller"
CONFIG = "controllers/kube-apiserver/defaultconfig.yaml"
SCCS = "controllers/openshift-default-scc-manager"
OBJECTS = (
    "crd/0000_03_config-operator_01_securitycontextconstraints.crd.yaml", "crd/0000_03_config-operator_02_rangeallocations.crd.yaml",
    "crd/route.crd.yaml", "core/namespace-openshift-infra.yaml", "core/securityv1-local-apiservice.yaml",
    "controllers/kube-controller-manager/namespace-openshift-kube-controller-manager.yaml", f"controllers/{POLICY}",
)  # fmt: skip
WITHOUT_API = re.compile(r"(config|image|quota)\.openshift\.io/")
OFF = [f"authorization.openshift.io/{name}" for name in ("RestrictSubjectBindings", "ValidateRoleBindingRestriction")]
"""Admission plugins that MicroShift leaves out, too: the objects that they read are kept by OpenShift's other API servers."""
GATES = "UserNamespacesSupport=true,UserNamespacesPodSecurityStandards=true"
TAGS = "include_gcs,include_oss,containers_image_openpgp,exclude_graphdriver_btrfs,exclude_graphdriver_devicemapper"
LACKS = "Projects, OAuth, image streams, builds, a router, service-ca's certificates, Multus, SELinux, CRI-O"
UID_RANGE = "openshift.io/sa.scc.uid-range"


@dataclass(frozen=True)
class Source:
    """A repository of OpenShift's on this machine: a git work tree or an unpacked archive, which is only read."""

    repository: str
    variable: str
    """As `make test-openshift` takes it. The tests read it from the environment, with LOCKSTEP_OPENSHIFT_ before it."""
    needs: tuple[str, ...]
    """Files that the build reads. Where there is no `.git`, their content is the source's state."""

    @property
    def folder(self) -> Path:
        """The folder that was named. Raises ConfigError: none was, or it isn't this repository."""
        named = os.environ.get(f"LOCKSTEP_OPENSHIFT_{self.variable}", "")
        what = f"{self.variable}= must name a clone or an unpacked archive of {self.repository}"
        if not named:
            raise ConfigError(f"{what}: make test-openshift SOURCE=… OC=…")
        lacking = [name for name in self.needs if not (Path(named) / name).exists()]
        if lacking:
            raise ConfigError(f"{what}, and {named} has no {', '.join(lacking)}: clone it whole, and not bare")
        return Path(named).resolve()

    def state(self) -> str:
        """Commit of a work tree, else a digest of the files that the build needs."""
        folder = self.folder
        if (folder / ".git").exists():
            head = subprocess.run(["git", "-C", str(folder), "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
            return f"commit-{head.stdout.strip()}"
        digest = hashlib.sha256()
        for path in (folder / name for name in self.needs):
            digest.update(path.read_bytes() if path.is_file() else b"")
        return f"content-{digest.hexdigest()[:12]}"

    def kubernetes(self) -> str:
        """Release of Kubernetes that the repository's makefiles name."""
        texts = [path.read_text() for path in self.folder.glob("Makefile*") if path.is_file()]
        found = re.search(r"^KUBE_GIT_VERSION *:?= *\"?(v\d+\.\d+\.\d+)", "\n".join(texts), re.MULTILINE)
        if found is None:
            raise ConfigError(f"{self.folder}: no Makefile states KUBE_GIT_VERSION, as {self.repository}'s does")
        return found[1]

    def build(self, name: str, package: str, *options: str) -> Path:
        """Build a program of it, and keep it by the source's state: minutes when cold, nothing when cached. Raises BuildError,
        ConfigError.
        """
        version = self.kubernetes()
        major, minor, _ = version.removeprefix("v").split(".")
        values = {"gitVersion": version, "gitMajor": major, "gitMinor": minor, "gitCommit": self.state(), "gitTreeState": "clean"}
        names = [f"-X {place}.{key}={value}" for place in binary.VERSION_PACKAGES for key, value in values.items()]
        flags = ["-mod=vendor", "-trimpath", "-buildvcs=false", *options, "-ldflags", " ".join(["-s -w", *names])]
        digest = hashlib.sha256(" ".join(flags).encode()).hexdigest()[:8]
        target = cache_root() / "openshift" / f"{self.state()}-{digest}" / name
        with processes.locked(target.parent / "lock"):
            if not target.exists():
                binary.go_build(target, package, flags, self.folder, {"CGO_ENABLED": "0"})
        return target


MICROSHIFT = Source(
    "openshift/microshift", "SOURCE",
    ("go.mod", "go.sum", "vendor/modules.txt", f"vendor/github.com/openshift/{POLICY}", "Makefile.kube_git.var",
        *(f"assets/{name}" for name in (CONFIG, SCCS, *OBJECTS))),
)  # fmt: skip
OC = Source("openshift/oc", "OC", ("go.mod", "go.sum", "vendor/modules.txt", "cmd/oc/oc.go", "Makefile"))


def oc_program() -> Path:
    """`oc`, built without its parts for containers' storage and Kerberos, which need C."""
    return OC.build("oc", "./cmd/oc", f"-tags={TAGS}")


def control_plane_program() -> Path:
    """The program of MAIN, built as a command of openshift/microshift, so that it finds what that vendors."""
    overlay = cache_root() / "openshift" / f"overlay-{hashlib.sha256(MAIN.read_bytes()).hexdigest()[:12]}.json"
    overlay.parent.mkdir(parents=True, exist_ok=True)
    overlay.write_text(json.dumps({"Replace": {str(MICROSHIFT.folder / COMMAND / "main.go"): str(MAIN)}}))
    return MICROSHIFT.build("openshift-kube", f"./{COMMAND}", "-overlay", str(overlay))


def settings(flags: list[str]) -> dict[str, Any]:
    """KubeAPIServerConfig of MicroShift with the embedded cluster's flags. Pod Security is enforced by the labels of namespaces alone, as
    outside of MicroShift.
    """
    config: dict[str, Any] = yaml.safe_load((MICROSHIFT.folder / "assets" / CONFIG).read_text())
    plugins = config["apiServerArguments"]["enable-admission-plugins"]
    stated = dict(flag.removeprefix("--").split("=", 1) for flag in flags)
    config["admission"]["pluginConfig"]["PodSecurity"]["configuration"]["defaults"]["enforce"] = "privileged"
    config["servingInfo"]["bindAddress"] = f"{stated['bind-address']}:{stated['secure-port']}"
    config["servicesSubnet"] = stated["service-cluster-ip-range"]
    config["apiServerArguments"] = {name: [value] for name, value in stated.items()} | {
        "authorization-mode": config["apiServerArguments"]["authorization-mode"],
        "enable-admission-plugins": [name for name in plugins if not WITHOUT_API.match(name)],
        "disable-admission-plugins": [*filter(WITHOUT_API.match, plugins), *OFF, "autoscaling.openshift.io/ManagementCPUsOverride"],
        "feature-gates": [GATES],
    }
    return config


def _commands(plain: Commands, program: Path) -> Commands:
    def commands(layout: Layout, kube: Path) -> dict[str, list[str]]:
        lines = plain(layout, kube)
        for name in COMPONENTS:
            lines[name][0] = str(program)
        file = layout.state / "openshift.json"
        file.write_text(json.dumps(settings(lines["kube-apiserver"][2:])))
        lines["kube-apiserver"][2:] = [f"--openshift-config={file}"]
        return lines

    return commands


def _kubectl(layout: Layout, *arguments: str) -> str:
    done = cluster.kubectl(layout, *arguments)
    if done.returncode != 0:
        raise cluster.ClusterError(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def _install(layout: Layout, program: Path) -> None:
    """Send what MicroShift sends at its start, and wait until namespaces get their ranges."""
    assets = MICROSHIFT.folder / "assets"
    _kubectl(layout, "apply", *(word for name in OBJECTS for word in ("-f", str(assets / name))))
    _kubectl(layout, "wait", "--for=condition=Established", "crd/securitycontextconstraints.security.openshift.io")
    _kubectl(layout, "wait", "--for=condition=Available", "apiservice/v1.security.openshift.io")
    until("an answer to SCCs", lambda: cluster.kubectl(layout, "apply", "-f", str(assets / SCCS)).returncode == 0)
    if processes.running(layout.daemons, POLICY) is None:
        command = [str(program), POLICY, f"--kubeconfig={layout.kubeconfig}"]
        processes.start(layout.daemons, POLICY, command, layout.log(POLICY), f"{layout.cgroup}/{POLICY}", layout.starting)
    until("a range of user ids", lambda: UID_RANGE in _kubectl(layout, "get", "namespace", "default", "-o", "yaml"))


@contextmanager
def openshift(**goal: Any) -> Iterator[Path]:
    """The administrator's kubeconfig of the embedded cluster, up as OpenShift. `goal`: as `bring_up` takes it.

    Within this block `bring_up` brings up or repairs it as OpenShift.
    """
    program = control_plane_program()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(controlplane, "commands", _commands(controlplane.commands, program))
        kubeconfig = bring_up(**goal)
        _install(default_layout(), program)
        yield kubeconfig


def versions() -> list[str]:
    """Lines that say what runs, and what of OpenShift is not there."""
    nodes = _kubectl(default_layout(), "get", "nodes", "-o", "jsonpath={.items[*].status.nodeInfo.kubeletVersion}").split()
    server = json.loads(_kubectl(default_layout(), "version", "-o", "json"))["serverVersion"]
    return [
        f"{', '.join(COMPONENTS)}, {POLICY}: openshift/microshift at {MICROSHIFT.state()}, Kubernetes {server['gitVersion']}",
        f"oc: openshift/oc at {OC.state()}, Kubernetes {OC.kubernetes()}",
        f"nodes: {', '.join(nodes)}; not there: {LACKS}",
    ]
