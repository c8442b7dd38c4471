"""Options that say where a verb acts. The root command declares them once, and each verb takes them before and after its name."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand

from lockstep.kube.aim import Connections

if TYPE_CHECKING:
    from lockstep.plan.cluster.choice import Choice

    Command = TyperCommand
else:
    Command = object

PLACES = {"cluster": "--cluster", "namespace": "-n", "context": "--context", "local": "--local"}
"""Parameter of the root command → its option in messages."""
_VERB = "lockstep.verb"


@dataclass
class Verb:
    """One run of a verb: where it acts, as it is typed and as it turns out, and what it has said of that. All that it does gets it from the
    command line: several verbs may run in a process.
    """

    words: str = ""
    """For example `cluster lint`."""
    places: dict[str, Any] = field(default_factory=dict)
    """Values of the options of PLACES that are typed."""
    connections: Connections = field(default_factory=Connections)
    unnamed: str | None = None
    """The cluster that stands in where nothing names one; its name promises nothing."""
    forced: bool = False
    """The person has said that the kubeconfig's cluster is the one that is meant."""
    choice: Choice | None = None
    """The cluster that counts because no option names one."""
    place: str = ""
    """Place that was said, where the verb changes something."""
    told: str = ""
    """The cluster that counts though nothing names it, once the person has read so."""

    @classmethod
    def of(cls, context: typer.Context) -> Verb:
        """Return what all contexts of a command line share."""
        verb: Verb = context.meta.setdefault(_VERB, cls())
        return verb


def keep(context: typer.Context, parameter: typer.CallbackParam, value: Any) -> Any:
    """Keep the value of an option, wherever on the command line it stands. The last one counts."""
    if value:
        Verb.of(context).places[str(parameter.name).rpartition(" ")[2]] = value
    return value


def place_rows(root: Any) -> dict[str, str]:
    """Return the options of places as a person types them, and what each says."""
    return {f"{', '.join(one.opts)} {one.metavar or ''}".rstrip(): one.help for one in root.params if one.name in PLACES}


class TakesPlaces(Command):
    """A command that parses the root command's options, too. Its help doesn't repeat them."""

    def get_params(self, ctx: Any) -> list[Any]:
        own, root = super().get_params(ctx), ctx.find_root()
        names = {name for parameter in own for name in parameter.opts}
        inherited = () if root is ctx else root.command.params
        return [*own, *(_unseen(one) for one in inherited if one.name in PLACES and names.isdisjoint(one.opts))]


def _unseen(parameter: Any) -> Any:
    one = copy(parameter)
    one.name, one.hidden, one.expose_value = f"inherited {one.name}", True, False  # (an argument of a verb may have its name)
    one.is_eager = True  # an argument that may be left out asks for them
    return one


class VerbCommand(TakesPlaces, TyperCommand):
    """A command that does something. It refuses options of places that it has no use for."""

    def __init__(self, name: str | None, **settings: Any) -> None:
        super().__init__(name, **settings)
        self.takes: tuple[str, ...] = getattr(self.callback, "takes", ())
        if self.takes:
            self.epilog = f"Where: {', '.join(map(PLACES.__getitem__, self.takes))} (lockstep --help)"

    def invoke(self, ctx: Any) -> Any:
        if wrong := [PLACES[name] for name in Verb.of(ctx).places if name not in self.takes]:
            ctx.fail(f"{ctx.command_path.partition(' ')[2]} takes no {', '.join(wrong)}")
        return super().invoke(ctx)
