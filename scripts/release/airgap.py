"""The list of images that an installation and its jobs pull, and the script that copies them into another registry."""

from __future__ import annotations

import shutil
from pathlib import Path

from release.parts import Images

LIST = "images.txt"
MIRROR = "mirror.sh"


def write(dist: Path, images: Images) -> list[Path]:
    """Write images.txt, a line for each image layout in dist/images with the name by which the other files call it, and mirror.sh."""
    named = {"images/operator": images.operator, "images/trainer": images.trainer}
    (dist / LIST).write_text("".join(f"{layout} {image}\n" for layout, image in named.items() if image), encoding="utf-8")
    return [dist / LIST, Path(shutil.copy(Path(__file__).parent / MIRROR, dist))]
