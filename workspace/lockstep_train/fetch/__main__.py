"""Fetch a model by its name into a folder, ahead of time: in a pod, or here.

python -m lockstep_train.fetch zai-org/GLM-4.5-Air --cache /workspace/cache
python -m lockstep_train.fetch zai-org/GLM-4.5-Air --to /workspace/models/GLM-4.5-Air
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from lockstep_spec.exits import INTERRUPTED
from lockstep_train.base.errors import ConfigError, TrainerError, print_problem
from lockstep_train.fetch.fetch import pin_of
from lockstep_train.fetch.model import fetch_model, model_remote


def parse_fetch_options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m lockstep_train.fetch", description="Fetch a model by its name.")
    parser.add_argument("name", help="a model of the hub (org/name), or an address (s3://bucket/folder)")
    parser.add_argument("--revision", help="a branch, a tag or a commit of the hub; default: the main branch")
    parser.add_argument("--cache", type=Path, required=True, help="the workspace's cache, in which jobs look for models")
    parser.add_argument("--to", type=Path, help="a folder of its own instead")
    return parser.parse_args(arguments)


def run(arguments: list[str] | None = None) -> None:
    options = parse_fetch_options(arguments)
    if options.name.startswith("/"):
        raise ConfigError(f"{options.name} is a folder: there is nothing to fetch; name a model of the hub (org/name), or an address")
    pin = pin_of(model_remote(options.name), options.revision, options.cache, _say)
    folder = fetch_model(options.name, pin, options.cache, _say, revision=options.revision, to=options.to)
    _say(f"{options.name} at {pin} is in {folder}")


def _say(line: str) -> None:
    print(line, flush=True)


def main(arguments: list[str] | None = None) -> int:
    try:
        run(arguments)
    except (TrainerError, OSError) as error:
        return print_problem(error)
    except KeyboardInterrupt:
        print("lockstep: interrupted: what has arrived is kept, and the same command goes on from there", file=sys.stderr)
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
