"""Names of models: the place that each stands for, and the folder of a fetched one on a volume (pure).

/workspace/models/Qwen3-8B         a folder
zai-org/GLM-4.5-Air, gpt2          a repository of the Hugging Face hub
s3://bucket/models/Qwen3-8B        a folder of an object store
"""

from __future__ import annotations

import hashlib
import re
from pathlib import PurePosixPath
from urllib.parse import quote, unquote

LOGIN_PATTERN = "^[^/]*://[^/]*[:@]"
"""A bucket's name has neither. What follows the first `/` may have both, and the secret key of `s3://key:secret@bucket` may have a `/`."""
NO_LOGIN_PATTERN = "^(gc?s://anonymous|abfss?://[^/:@]+)@[^/:@]+(/|$)"
"""Pattern of what is no password there: no key at all, or an account's container."""
SIGNATURE_PATTERN = "^[^/]*://.*[?&]sig="
COMMIT = re.compile(r"[0-9a-f]{40}")
FETCHED = ".lockstep-fetched.json"
"""Name of the file that says what a folder of fetched files holds. It is written last, so that a folder without it is never taken for
whole.
"""
MODELS = "models"
"""Folder of fetched models in the workspace's cache."""
FOLDER_CHARACTERS = 200
"""Volumes take names of 255 bytes."""
DIGEST_CHARACTERS = 16


def is_folder(name: str) -> bool:
    return name.startswith("/")


def is_address(name: str) -> bool:
    return "://" in name


def holds_password(name: str) -> bool:
    """Return True if an address has something where a password or a signature may be: messages, logs and folders name addresses."""
    login = re.search(LOGIN_PATTERN, name) and not re.search(NO_LOGIN_PATTERN, name)
    return bool(login or re.search(SIGNATURE_PATTERN, name))


def is_hub_name(name: str) -> bool:
    return not is_folder(name) and not is_address(name)


def folder_name(name: str) -> str:
    """Return the folder's name for a model's name: org--model, s3--bucket--models--Qwen3-8B; for a long one its beginning and a digest."""
    folder = quote(name.replace("://", "/").strip("/").replace("/", "--"), safe="-._")
    if len(folder) <= FOLDER_CHARACTERS:
        return folder
    digest = hashlib.sha256(name.strip("/").encode()).hexdigest()[:DIGEST_CHARACTERS]
    return f"{folder[: FOLDER_CHARACTERS - DIGEST_CHARACTERS - 1]}-{digest}"


def fetched_folder(cache: PurePosixPath | str, name: str, pin: str, kind: str = MODELS) -> PurePosixPath:
    """Folder of the files of a name at a pin. `pin`: a hub's commit, or the digest of an object store's listing."""
    return PurePosixPath(cache) / kind / folder_name(name) / pin


def model_title(name: str) -> str:
    """A model as people call it: of a folder that was fetched from a hub the repository's name, else the name itself."""
    parts = PurePosixPath(name).parts
    if not is_folder(name) or len(parts) < 3 or parts[-3] != MODELS or COMMIT.fullmatch(parts[-1]) is None:
        return name
    return unquote(parts[-2]).replace("--", "/")
