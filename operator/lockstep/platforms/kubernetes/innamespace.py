"""Jobs in a namespace of a cluster where no operator works: `lockstep run --in-namespace`. Other verbs are as elsewhere there."""

from __future__ import annotations

import asyncio
import contextlib
import shlex

from lockstep.api.errors import ConfigError
from lockstep.api.objects import Object
from lockstep.kube.jobs import runs_without_operator
from lockstep.plan.ahead.submission import refuse_ended
from lockstep.plan.reconcile.clocks import Earlier
from lockstep.platforms.kubernetes.alone import run_in_namespace
from lockstep.platforms.kubernetes.backend import KubernetesBackend
from lockstep.platforms.kubernetes.job import seen_runs
from lockstep.platforms.places.orders import IN_NAMESPACE, Order
from lockstep_spec.exits import INTERRUPTED


class InNamespace(KubernetesBackend):
    """A namespace of a cluster, where jobs run without the operator."""

    kind = IN_NAMESPACE
    has_operator = False

    def run(self, order: Order) -> int:
        """Return the exit code: 0 complete, 1 failed, 130 detached by Ctrl-C, which leaves it running. Raises ConfigError."""
        client, namespace, name = self.target.client, self.target.namespace, order.job.metadata.name
        found = next(iter(runs_without_operator(client, namespace, name)), None)
        earlier = None
        if order.retry:
            if found is None:
                raise ConfigError(
                    f"there is no run {name} without an operator in namespace {namespace}: start it with lockstep run -f FILE"
                    " --in-namespace"
                )
            earlier = Earlier(found["metadata"]["uid"], found["spec"]["restart"]["retry"])
        elif found is not None and not order.typed.is_fresh:
            self._refuse_ended(order, found)
        with contextlib.suppress(KeyboardInterrupt):
            return asyncio.run(run_in_namespace(order, self.target, earlier))
        return INTERRUPTED

    def _refuse_ended(self, order: Order, run: Object) -> None:
        """Raise ConfigError where the run of this name has ended, by the record on its volume."""
        (job,) = seen_runs(self.target, [run], read=True)
        retry = f"lockstep retry -f {shlex.quote(order.typed.file)} --in-namespace {self.words.again}"
        refuse_ended(order.job, job, f"{job['metadata']['name']} {self.words.again}", retry, order.typed)
