"""A namespace of a cluster as a place where jobs run without the operator."""

from __future__ import annotations

import asyncio
import contextlib
import shlex

from lockstep.kube.jobs import runs_without_operator
from lockstep.plan.ahead.submission import refuse_ended
from lockstep.platforms.jobs.observe import JobObserver
from lockstep.platforms.kubernetes.alone import run_in_namespace
from lockstep.platforms.kubernetes.backend import KubernetesBackend
from lockstep.platforms.kubernetes.status import observe_run
from lockstep.platforms.places.orders import IN_NAMESPACE, Order
from lockstep_spec.exits import INTERRUPTED


class InNamespace(KubernetesBackend):
    """A namespace of a cluster, where jobs run without the operator."""

    kind = IN_NAMESPACE
    has_operator = False

    def run(self, order: Order) -> int:
        """Return the exit code: 0 complete, 1 failed, 130 detached by Ctrl-C, which leaves it running. Raises ConfigError."""
        if not order.retry:
            self._refuse_ended(order)
        with contextlib.suppress(KeyboardInterrupt):
            return asyncio.run(run_in_namespace(order, self.target))
        return INTERRUPTED

    def _refuse_ended(self, order: Order) -> None:
        """Raise ConfigError where a run of this name has ended, by the record on its volume; unless it is to train anew."""
        client, name, namespace = self.target.client, order.job.metadata.name, self.target.namespace
        run = None if order.typed.is_fresh else next(iter(runs_without_operator(client, namespace, name)), None)
        if run is None:
            return
        job = client.run(lambda cluster: observe_run(JobObserver(cluster), cluster, run, read=True)).job
        retry = f"lockstep retry -f {shlex.quote(order.typed.file)} --in-namespace {self.again}"
        refuse_ended(order.job, job, f"{name} {self.again}", retry, order.typed)
