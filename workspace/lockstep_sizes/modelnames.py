"""What a model's name says about where it is, and where a fetched one lies on a volume (pure).

/workspace/models/Qwen3-8B         a folder
zai-org/GLM-4.5-Air, gpt2          a repository of the Hugging Face hub
s3://bucket/models/Qwen3-8B        a folder of an object store
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from urllib.parse import quote, unquote

COMMIT = re.compile(r"[0-9a-f]{40}")
FETCHED = ".lockstep-fetched.json"
"""In a folder of fetched files: what they are. It is written last, so that a folder without it is never taken for whole."""
MODELS = "models"
"""In the workspace's cache: the folder of fetched models."""


def is_folder(name: str) -> bool:
    return name.startswith("/")


def is_address(name: str) -> bool:
    return "://" in name


def is_hub_name(name: str) -> bool:
    return not is_folder(name) and not is_address(name)


def folder_name(name: str) -> str:
    """What stands for a name in a folder: org--model, s3--bucket--models--Qwen3-8B."""
    return quote(name.replace("://", "/").strip("/").replace("/", "--"), safe="-._")


def fetched_folder(cache: PurePosixPath | str, name: str, pin: str, kind: str = MODELS) -> PurePosixPath:
    """Where the files of a name at a pin lie. `pin`: a hub's commit, or the digest of an object store's listing."""
    return PurePosixPath(cache) / kind / folder_name(name) / pin


def model_title(name: str) -> str:
    """A model as people call it: of a folder that was fetched from a hub the repository's name, else the name itself."""
    parts = PurePosixPath(name).parts
    if not is_folder(name) or len(parts) < 3 or parts[-3] != MODELS or COMMIT.fullmatch(parts[-1]) is None:
        return name
    return unquote(parts[-2]).replace("--", "/")
