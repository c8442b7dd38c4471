"""`lockstep`: the command line. Verbs have modules of their own; this one puts them together and explains the errors that end them.

Exit codes: 0 done, 1 it failed (the job, the cluster, a check), 2 what was written or asked can't be used, 130 interrupted (129 by a
terminal that was closed, 143 by SIGTERM).
"""

from __future__ import annotations

import errno
import gc
import json
import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from inspect import signature
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.exceptions import Abort, TyperException

from lockstep.api.errors import ConfigError, Failed
from lockstep.cli.shared.clusterfiles import cluster_names
from lockstep.cli.shared.inputs import TakesFiles
from lockstep.cli.shared.ownversion import own_version
from lockstep.cli.shared.places import TakesPlaces, Verb, VerbCommand, keep, place_rows
from lockstep.cli.shared.signals import ending_like_ctrl_c
from lockstep.cli.shared.terminal import is_plain, with_advice
from lockstep.cli.verbs import DAY, HINTS, MODULES, REMOVED, SENTENCE, front_page
from lockstep.platforms.output import flush_output, open_streams, put, put_text, tell
from lockstep_spec.exits import FAILED, USAGE
from lockstep_spec.words import printable_line

CLIENT_LIBRARIES = ("aiohttp", "kubernetes", "urllib3")
"""Packages whose errors are explained. They are not imported here: `lockstep --help` is fast. Only the embedded cluster and legacy logins
use the last two.
"""
NO_ANSWER = "is the cluster up, and is --context, or KUBECONFIG, the right one? (kubectl cluster-info)"
GARBAGE_OBJECTS = 50_000
"""New objects after which Python looks for unreachable ones. It looks after 700 by default, which is a seventh of a verb's start: imports
leave none.
"""
FILE_FAULTS = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE})
"""Errors of a file system, and of the rights there, at which no code is wrong."""
BY_SIGNAL = 128
"""An exit code above is the signal that ended the process, as shells say it."""


class Verbs(TakesPlaces, TyperGroup):
    """Verbs that know the words of other tools, tell mistakes in one line, and show no type beside what is only there or not."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
        try:
            code = super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
        except Abort:
            tell("Aborted.")
            sys.exit(FAILED)
        except TyperException as error:
            if type(error).__name__ == "NoArgsIsHelpError":
                put_text(f"{error}\n", error=True)
            else:
                tell(f"lockstep: {mistake(error)}")
            sys.exit(USAGE)
        flush_output()
        sys.exit(code if isinstance(code, int) else 0)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        words = [*ctx.command_path.removeprefix(ctx.find_root().command_path).split(), *args[:1]]
        Verb.of(ctx).words = " ".join(words)
        if self.get_command(ctx, args[0]) is None:
            from lockstep.api.files.problems import nearest

            before = " ".join([*words[:-1], ""])
            hints = {name.removeprefix(before): hint for name, hint in HINTS.items() if name.startswith(before)}
            hint = hints.get(nearest(args[0], [*hints, *self.list_commands(ctx)]) or "")
            if hint is not None:
                ctx.fail(f"No such command {args[0]!r}: {hint}.")
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: Any) -> list[str]:
        return [*self.commands]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            _without_types_of_flags([*command.params, command.get_help_option(ctx)])
        return command

    def get_params(self, ctx: Any) -> Any:
        return _without_types_of_flags(super().get_params(ctx))


def mistake(error: Any) -> str:
    """Return what is wrong with a command line, and where its words are explained."""
    message = error.format_message().replace(": Value error, ", ": ").rstrip(".")
    context = getattr(error, "ctx", None)
    where = context.command_path if context is not None else "lockstep"
    option = getattr(error, "option_name", "")
    if instead := REMOVED.get(f"{where.partition(' ')[2]} {option}", REMOVED.get(option)):
        return f"No such option: {option}: {instead}"
    answers = message.endswith("?") or (message.startswith("No such command ") and ": " in message)
    return message if answers else f"{message}; {where} --help shows what it takes"


def _without_types_of_flags(parameters: list[Any]) -> list[Any]:
    for parameter in parameters:
        if getattr(parameter, "is_flag", False) and parameter.metavar is None:
            parameter.metavar = ""
    return parameters


class Commands(Mapping[str, Any]):
    """Commands of verbs, by their names. The module of a verb is imported when the verb is asked for: all take as long as many verbs do."""

    def __init__(self, modules: Mapping[str, str | tuple[str, Mapping[str, str]]]) -> None:
        self._modules, self._made = modules, dict[str, Any]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __len__(self) -> int:
        return len(self._modules)

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            where = self._modules[name]
            self._made[name] = _command(name, where) if isinstance(where, str) else _group(name, *where)
        return self._made[name]


def _group(name: str, text: str, modules: Mapping[str, str]) -> Verbs:
    settings: dict[str, Any] = {"name": name, "commands": Commands(modules), "help": text, "no_args_is_help": True}
    return Verbs(**settings)


def _command(name: str, where: str) -> Any:
    module, _, function = where.rpartition(".")
    verb = getattr(import_module(f"lockstep.cli.{module}"), function)
    words = {"allow_interspersed_args": False} if name == "run" else None  # (what follows its script is the script's)
    alone = typer.Typer(add_completion=False)
    alone.command(name, context_settings=words, cls=_kind_of(verb))(verb)
    return typer.main.get_command(alone)


class Root(Verbs):
    """The verb `lockstep` itself: its help is the front page."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings | {"commands": Commands(MODULES)})

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(front_page({verb: self.commands[verb].help or "" for verb in DAY}, place_rows(self)))


def _kind_of(verb: Any) -> type[VerbCommand]:
    """Those that need job files take them as words, too."""
    return TakesFiles if "file" in signature(verb).parameters else VerbCommand


def print_version(wants_version: bool) -> None:
    if wants_version:
        put(own_version())
        raise typer.Exit


def cluster_words(incomplete: str) -> list[str]:
    """Return what a shell completes a cluster's name to."""
    return [name for name in cluster_names() if name.startswith(incomplete)]


def options(
    ctx: typer.Context,
    show_version: Annotated[bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version.")] = False,
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster",
            metavar="NAME",
            callback=keep,
            autocompletion=cluster_words,
            help="a cluster of clusters/, its file, or a folder here",
        ),
    ] = None,
    namespace: Annotated[
        str | None, typer.Option("-n", "--namespace", metavar="NAME", callback=keep, help="a namespace; default: the cluster file's")
    ] = None,
    context: Annotated[str | None, typer.Option("--context", metavar="NAME", callback=keep, help="a context of your kubeconfig")] = None,
    local: Annotated[bool, typer.Option("--local", callback=keep, help="this machine, and no cluster")] = False,
) -> None:
    pass  # (`keep` keeps what is typed)


app = typer.Typer(
    name="lockstep",
    cls=Root,
    help=SENTENCE,
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # a traceback with local variables could show secrets
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.callback()(options)


def show_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print a traceback as Python does, with escapes for what a terminal would act on: errors quote what pods and clusters say."""
    put_text("".join(traceback.format_exception(kind, error, trace)), error=True)


def explanation(error: BaseException) -> tuple[int, str] | None:
    """Return the exit code and text that can be printed. None: nothing that a person could have caused; a traceback says more."""
    if isinstance(error, ConfigError) or (type(error) is Failed and len(error.args) > 1):
        return USAGE if isinstance(error, ConfigError) else FAILED, "\n".join(printable_line(str(line)) for line in error.args)
    sentence = _of_cluster(error) or _of_file(error)
    return None if sentence is None else (FAILED, printable_line(sentence))


def _of_cluster(error: BaseException) -> str | None:
    if isinstance(error, Failed):
        if isinstance(error, OSError):
            return f"the cluster can't be reached: {error}: {NO_ANSWER}"
        return with_advice(error)
    if type(error).__module__.partition(".")[0] not in CLIENT_LIBRARIES:
        return None
    return f"the cluster can't be reached or refused: {_message(error)}"


def _of_file(error: BaseException) -> str | None:
    if not isinstance(error, OSError) or error.errno not in FILE_FAULTS or not isinstance(error.filename, str):
        return None
    from lockstep_spec.files import why_unwritten

    return f"can't use {error.filename}: {why_unwritten(error, Path(error.filename))}"


def _message(error: Any) -> str:
    """The API server's own words, out of the reply of the client library; else the error's."""
    try:
        return f"{json.loads(error.body)['message']} ({error.status} {error.reason})"
    except (AttributeError, KeyError, TypeError, ValueError):
        return str(error)


def _of_output(error: Exception) -> Exception:
    """The error of standard output, where it takes no more and others than `platforms.output` wrote to it: a help page, a table."""
    if isinstance(error, OSError):
        try:
            flush_output()
        except Failed as failure:
            return failure
    return error


def main() -> int:
    gc.set_threshold(GARBAGE_OBJECTS)
    open_streams()
    if is_plain():
        os.environ.setdefault("_TYPER_FORCE_DISABLE_TERMINAL", "1")  # (help pages, too: typer has no other way)
    with ending_like_ctrl_c() as received:
        try:
            app()
        except (SystemExit, KeyboardInterrupt):
            if received:
                return BY_SIGNAL + received[0]
            raise
        except Exception as error:
            explained = explanation(_of_output(error))
            if explained is None:
                sys.excepthook = show_traceback
                raise
            code, text = explained
            put_text(f"lockstep: {text}\n", error=True)
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
