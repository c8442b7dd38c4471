"""List what would be sent of an adapter's folder to the hub, or send it, by the hub's own client:

python -m lockstep_train.push my-adapter my-org/my-adapter            # list
python -m lockstep_train.push my-adapter my-org/my-adapter --send     # into a private repository
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from lockstep_spec.words import decimal_size, listed, number_of, printable_line
from lockstep_train.base.errors import ConfigError, TrainerError, print_problem
from lockstep_train.base.imports import replaced
from lockstep_train.card import CARD
from lockstep_train.checkpoint.format.layout import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from lockstep_train.data.tokens.tokenizer import FILES
from lockstep_train.fetch.hub import (
    FORBIDDEN,
    SERVER,
    THROTTLED,
    UNAUTHORIZED,
    endpoint,
    prepared_session,
    shown_endpoint,
    status_of,
    words_of,
)
from lockstep_train.merge import is_adapter, read_adapter
from lockstep_train.model.base_files import RECORD

OWN = (ADAPTER_CONFIG, ADAPTER_WEIGHTS, CARD, RECORD, "logprobs.json")
TOKENIZER_ENDINGS = (".json", ".txt", ".model", ".jinja", ".tiktoken")
REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
CONFLICT = 409


def adapter_files(folder: Path) -> list[Path]:
    """Return the files that are sent: the adapter, its card and its tokenizer. A link is none of them: it may lead anywhere.

    Raises ConfigError for a folder that holds no whole adapter.
    """
    if not is_adapter(folder):
        raise ConfigError(f"{folder} holds no PEFT adapter ({ADAPTER_CONFIG}); lockstep adapter get or export makes one")
    read_adapter(folder)
    regular = sorted(path for path in folder.iterdir() if path.is_file() and not path.is_symlink())
    files = [path for path in regular if path.name in OWN or (FILES.fullmatch(path.name) and path.suffix in TOKENIZER_ENDINGS)]
    if lacking := {ADAPTER_CONFIG, ADAPTER_WEIGHTS} - {path.name for path in files}:
        raise ConfigError(f"{folder / min(lacking)} is a link: copy the file itself there")
    return files


def listing(folder: Path, files: Sequence[Path], repository: str, *, public: bool) -> list[str]:
    """Return what would be sent where, a line for each file, and what a person should know before."""
    sizes = {path.name: path.stat().st_size for path in files}
    others = sorted({path.name for path in folder.iterdir()} - sizes.keys())
    base = str(read_adapter(folder)[0].get("base_model_name_or_path"))
    width = max(map(len, sizes))
    return [
        f"To {repository} at {shown_endpoint()}, {'PUBLIC: everyone can read it' if public else 'private'}:",
        *(f"  {name:{width}}  {decimal_size(size)}" for name, size in sizes.items()),
        f"{number_of(len(files), 'file')}, {decimal_size(sum(sizes.values()))}",
        *([f"Not sent: {printable_line(listed(others))}"] if others else []),
        *([f"Note: {ADAPTER_CONFIG} names the base model by its folder, {printable_line(base)}"] if base.startswith("/") else []),
    ]


def send(files: Sequence[Path], repository: str, *, public: bool) -> str:
    """Send the files in one commit; what was done, in words. Raises ConfigError where the same again would fail, else TrainerError."""
    from huggingface_hub import CommitOperationAdd, HfApi, constants
    from huggingface_hub.utils.tqdm import disable_progress_bars

    prepared_session()
    disable_progress_bars()
    api = HfApi(endpoint=endpoint())
    try:
        api.create_repo(repository, private=not public, exist_ok=True)
        is_private = bool(api.repo_info(repository).private)
        if not (public or is_private):
            raise ConfigError(f"{repository} at {shown_endpoint()} is public already: add --public, or name another repository")
        operations = [CommitOperationAdd(path.name, path) for path in files]
        with replaced(constants, "HF_HUB_DISABLE_XET", True):  # which needs a second server that mirrors don't have
            commit = api.create_commit(repository, operations, commit_message="Upload adapter")
    except TrainerError:
        raise
    except Exception as error:  # the client raises a dozen kinds, and those of its HTTP library
        cause = error.__cause__  # of the client's own error about a file
        raise problem(cause if isinstance(error, RuntimeError) and isinstance(cause, Exception) else error, repository) from error
    return f"Sent {number_of(len(files), 'file')} to {repository}, which is {'private' if is_private else 'public'}: {commit.commit_url}"


def problem(error: Exception, repository: str) -> TrainerError:
    """Return the error to raise for what the client has raised."""
    host, status = shown_endpoint(), status_of(error)
    if status == UNAUTHORIZED:
        return ConfigError(f"{host} does not accept the token (401): give one that may write as HF_TOKEN, or log in by hf auth login")
    if status == FORBIDDEN:
        return ConfigError(f"{host} does not let this token write to {repository} (403): give a token with that right as HF_TOKEN")
    if status == CONFLICT:
        return TrainerError(f"{host} refuses the commit to {repository} (409), since something else changes it: run the same command again")
    if isinstance(error, ValueError) or (status is not None and status < SERVER and status != THROTTLED):
        return ConfigError(f"{host} refuses these files for {repository}: {words_of(error)}")
    return TrainerError(
        f"the files did not get to {host} ({type(error).__name__}: {words_of(error)}): nothing is known to be in {repository}, so run the"
        " same command again"
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m lockstep_train.push", description="List or send an adapter's files to the hub.")
    parser.add_argument("folder", type=Path, help="the adapter's folder")
    parser.add_argument("repository", help="the repository of the hub, org/name")
    parser.add_argument("--public", action="store_true", help="let everyone read the repository")
    parser.add_argument("--send", action="store_true", help="send the files, and do not only list them")
    options = parser.parse_args(arguments)
    try:
        if REPOSITORY.fullmatch(options.repository) is None:
            raise ConfigError(f"{options.repository} is not a valid repository of the hub; write ORG/NAME")
        files = adapter_files(options.folder)
        if options.send:
            print(send(files, options.repository, public=options.public))
        else:
            print("\n".join(listing(options.folder, files, options.repository, public=options.public)))
    except (TrainerError, OSError) as error:
        return print_problem(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
