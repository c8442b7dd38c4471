"""moto's S3 server on loopback, in an environment of its own: the package that s3fs and boto are tested against."""

from __future__ import annotations

import fcntl
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PREPARE = "from lockstep.environments import cache_root, packages; print(packages('s3server', cache_root(), str))"


def environment() -> Path:
    """Made once for all workers and checkouts with this lock."""
    import tempfile

    with (Path(tempfile.gettempdir()) / "lockstep-s3server.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = subprocess.run([sys.executable, "-c", PREPARE], cwd=ROOT, capture_output=True, text=True, check=True)
    return Path(made.stdout.splitlines()[-1])


@contextmanager
def bucket(address: str, name: str, objects: Mapping[str, bytes], patch: pytest.MonkeyPatch) -> Iterator[Any]:
    """pyarrow's file system on the server, with a bucket and its objects until the end of the block; the environment says how to get
    there.
    """
    from pyarrow import fs

    variables = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "secret-of-a-test", "AWS_REGION": "us-east-1"}
    for variable, value in {**variables, "AWS_ENDPOINT_URL": address, "AWS_EC2_METADATA_DISABLED": "true"}.items():
        patch.setenv(variable, value)
    store = fs.S3FileSystem(endpoint_override=address, allow_bucket_creation=True, allow_bucket_deletion=True)
    store.create_dir(name)
    for path, content in objects.items():
        with store.open_output_stream(f"{name}/{path}") as file:
            file.write(content)
    yield store
    store.delete_dir(name)


@contextmanager
def running_s3() -> Iterator[str]:
    """The server's address, until the end of the block."""
    command = [str(environment() / "bin" / "python"), "-W", "ignore", "-u", "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        try:
            lines = []
            for line in server.stdout:
                lines.append(line)
                found = re.search(r"Running on (http://127\.0\.0\.1:\d+)", line)
                if found:
                    break
            else:
                raise AssertionError("".join(lines))
            yield found[1]
        finally:
            server.kill()
