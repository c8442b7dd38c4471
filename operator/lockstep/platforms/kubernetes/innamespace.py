"""A namespace of a cluster as a place where jobs run without the operator."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
from functools import partial

from lockstep.api.errors import ConfigError
from lockstep.api.objects import Object
from lockstep.kube.cluster import Cluster
from lockstep.kube.jobs import runs_without_operator
from lockstep.plan.ahead.submission import ended
from lockstep.platforms.jobs.observe import JobObserver
from lockstep.platforms.kubernetes.alone import run_in_namespace
from lockstep.platforms.kubernetes.backend import KubernetesBackend
from lockstep.platforms.kubernetes.status import observe_run
from lockstep.platforms.places.backend import Order
from lockstep_spec.exits import INTERRUPTED


class InNamespace(KubernetesBackend):
    """A namespace of a cluster, where jobs run without the operator."""

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
        before = [] if order.typed.is_fresh else runs_without_operator(client, namespace, name)
        for run in before:
            job = client.run(partial(_with_end, run))
            retry = f"lockstep retry -f {shlex.quote(order.typed.file)} --in-namespace {self.again}"
            if words := ended(order.job, job, f"{name} {self.again}", retry, order.typed):
                raise ConfigError(*words)


async def _with_end(run: Object, cluster: Cluster) -> Object:
    """Return a run with its status, by its volume where its pods are gone."""
    return (await observe_run(JobObserver(cluster), cluster, run, read=True)).job
