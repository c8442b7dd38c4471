"""spec.notify: who is told of a job's end."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from lockstep.api.model import DnsName, Model
from lockstep.api.shared import KEY_PATTERN


class SecretKey(Model):
    """One key of a Secret in the job's namespace."""

    name: DnsName
    """The Secret's name."""
    key: Annotated[str, Field(pattern=KEY_PATTERN, max_length=253)]
    """The key in it."""


class Notify(Model):
    """Receiver of a message when the job completes or fails."""

    webhook_secret_ref: SecretKey
    """Key that holds the URL to which the operator sends one POST with a small JSON object. https, or a Service of the cluster. The operator may read a Secret called lockstep-notify; one of another name needs a Role that lets it."""
