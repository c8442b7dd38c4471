"""The operator as files for `kubectl apply`, with its image by digest.

What `kubectl delete -f install.yaml` must not take away is a file of its own: CRDs, and with them every TrainingJob of the cluster; the
operator's namespace, and with it the keys by which the next operator hears jobs that run.
"""

from __future__ import annotations

from pathlib import Path

from release.parts import Images, crds, operator_objects, version, with_image, write_yaml

CRDS = "crds.yaml"
KUBECTL = {"kubernetes": "kubectl", "openshift": "oc"}
FILES = {"kubernetes": "install.yaml", "openshift": "install-openshift.yaml"}
CRDS_COMMENT = """CustomResourceDefinitions of Lockstep {version}, and the namespace with the operator's keys, which {install} needs.
Deleting them deletes every TrainingJob and TrainingCluster."""
COMMENT = """Lockstep {version}, the operator on {platform}:
{kubectl} apply -f crds.yaml -f {name}
{kubectl} delete -f {name}   # removes the operator; TrainingJobs and claims stay"""


def write(dist: Path, images: Images) -> list[Path]:
    """Write crds.yaml, install.yaml and install-openshift.yaml. Raises Failed if the image has no digest."""
    lasting = [*crds(), *(item for item in operator_objects() if item["kind"] == "Namespace")]
    operators = {platform: with_image(operator_objects(platform), images.operator) for platform in FILES}
    written = [write_yaml(dist / CRDS, lasting, CRDS_COMMENT.format(version=version(), install=" or ".join(FILES.values())))]
    for platform, name in FILES.items():
        comment = COMMENT.format(version=version(), platform=platform, kubectl=KUBECTL[platform], name=name)
        written.append(write_yaml(dist / name, [item for item in operators[platform] if item not in lasting], comment))
    return written
