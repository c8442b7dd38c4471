"""Options of `lockstep run -f` that mean something only in some places."""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.api.errors import ConfigError
from lockstep.platforms.backends import HOSTS, IN_NAMESPACE, KUBERNETES, LOCAL
from lockstep_spec.words import listed

TAKEN_BY = {
    "--detach": (KUBERNETES, HOSTS),
    "--hosts": (HOSTS,),
    "--first": (HOSTS,),
    "--without": (HOSTS,),
    "--anyway": (HOSTS,),
    "--preview": (LOCAL,),
}
"""Option → places that take it."""
PLACES = {KUBERNETES: "on a cluster", HOSTS: "on hosts", LOCAL: "on this machine", IN_NAMESPACE: "without the operator"}
INSTEAD = {
    KUBERNETES: "name the cluster file of hosts with --cluster, or add --local",
    HOSTS: "leave it out",
    LOCAL: "leave out --local, and name a cluster with --cluster",
    IN_NAMESPACE: "leave out --in-namespace",
}


def refuse(place: str, options: Mapping[str, object]) -> None:
    """Raise ConfigError for options that are stated and mean nothing in this place, with the places where they do."""
    wrong = [name for name, value in options.items() if value and place not in TAKEN_BY[name]]
    if wrong:
        taken = [words for name, words in PLACES.items() if all(name in TAKEN_BY[option] for option in wrong)]
        where = f" {' or '.join(taken)}" if taken else ""
        raise ConfigError(
            f"{listed(wrong)} {'is' if len(wrong) == 1 else 'are'} for a job{where}, and this one runs {PLACES[place]}: {INSTEAD[place]}"
        )
