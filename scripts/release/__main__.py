"""Make everything that a release has into dist/: PYTHONPATH=scripts python -m release [--registry R] [--base B] [--no-trainer] [--key K]

The same commit, base images and Python give the same bytes, but for the trainer's image, signatures, and the times in the provenance.
Nothing is sent anywhere: the last lines are the commands that do.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from lockstep.plan.ship.imagebuild import Image
from release import airgap, bundle, chart, installyaml
from release.layouts import lay_image
from release.notes import notes
from release.parts import DIST, Images, version
from release.provenance import Source, digests, source, statement, sums
from release.sign import MARKS, SIGNATURES, password_of, sign
from setup import ROOT, exit_with
from supply import sbom, sdist, wheel

REGISTRY = "registry.example.com/lockstep"
FORMS: tuple[Callable[[Path, Images], list[Path]], ...] = (chart.write, installyaml.write, bundle.write, airgap.write)
"""Ways to install the operator, in the order in which they are written; a form may use those before it."""
NEXT = """
Nothing was published. With accounts of yours (docs/releases.md), in this folder:
  cosign sign-blob --bundle dist/SHA256SUMS.sigstore.json dist/SHA256SUMS    # without a key, by your login
  skopeo copy --preserve-digests oci:dist/images/operator:{version} docker://{registry}/lockstep-operator:{version}
  helm push dist/lockstep-{version}.tgz oci://{registry}
  uv publish dist/lockstep_trainer-{version}*
  git tag --sign v{version} {commit} && git push origin v{version}"""


def release(registry: str, base: str, trainer: bool, made_of: Source) -> list[Path]:
    """Write everything but signatures, and return the paths. Raises Failed."""
    began = datetime.now(UTC)
    text = notes((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), version(), made_of.commit)
    shutil.rmtree(DIST / "images", ignore_errors=True)
    for name in (*MARKS, *SIGNATURES):  # else a build that fails would leave those of another one
        (DIST / name).unlink(missing_ok=True)
    kinds = [Image.OPERATOR, *([Image.TRAINER] if trainer else [])]
    layouts = {image: lay_image(image, base, registry, made_of.epoch, DIST / "images" / image) for image in kinds}
    images = Images(**{str(image): layouts[image].reference if image in layouts else "" for image in (Image.OPERATOR, Image.TRAINER)})
    written = [wheel(DIST), sdist(DIST), *(layout.folder for layout in layouts.values()), *sbom(DIST / "sbom")]
    for write in FORMS:
        written += write(DIST, images)
    written.append(DIST / "RELEASE_NOTES.md")
    written[-1].write_text(text, encoding="utf-8")
    files = digests(DIST, written)
    (DIST / MARKS[0]).write_text(sums(files), encoding="utf-8")
    parameters = {"registry": registry, "trainer": trainer}
    line = statement(files, made_of.commit, layouts.values(), parameters, (began, datetime.now(UTC)))
    (DIST / MARKS[1]).write_text(line, encoding="utf-8")
    return [*written, *(DIST / name for name in MARKS)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--registry", default=REGISTRY)
    parser.add_argument("--base", default="")
    parser.add_argument("--no-trainer", dest="trainer", action="store_false")
    parser.add_argument("--key", type=Path)
    options = parser.parse_args()
    made_of = source()
    password = password_of(options.key) if options.key else ""
    written = release(options.registry, options.base, options.trainer, made_of)
    if options.key:
        written += sign(DIST, options.key, password)
    for path in written:
        print(path.relative_to(ROOT))
    print(NEXT.format(version=version(), registry=options.registry, commit=made_of.commit))
    return 0


if __name__ == "__main__":
    exit_with(main)
