"""Frozen run that the present pods were made from, and what may be done with it (pure).

A ConfigMap can be written, with any ownerReference, by everybody who may write ConfigMaps, and that can be somebody who may make no pods.
So what stands in `x-run-<hash>` is believed only as far as something else proves it:

- its pod template is applied only when the operator signed it, or this process wrote or proved it earlier, or freezing the job now gives
  the same;
- text that has the hash in the StatefulSet's annotation, and no proof (an older operator's, or signed with a key that was lost), says how
  many nodes there are. Its StatefulSet is scaled as it stands, and never changed otherwise;
- any other text counts as none.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass

from lockstep.api.names import ANNOTATION_RUN_HASH, ANNOTATION_RUN_PROOF, RUN_KEY, run_name
from lockstep.api.objects import Object
from lockstep.plan.layers import Notice
from lockstep.plan.observed import Observed, owner_uid, start_anew
from lockstep.plan.reasons import Reason
from lockstep.plan.render.objects import TEMPLATE_KEY, Frozen, GangRun, RenderContext, has_lost_key, run_proof
from lockstep.plan.times import timestamp
from lockstep_gang.contract.run import parse_run
from lockstep_spec.codec import ContractError


@dataclass(frozen=True)
class Gang:
    """The pods that are there. `run` is None when nobody knows any more what they were made from: they are left alone."""

    run: Frozen | None = None
    proven: bool = False
    trouble: Notice | None = None

    @property
    def memory(self) -> GangRun | None:
        """Run to remember of this gang."""
        return None if self.run is None else GangRun(self.run, self.proven)


def gang(observed: Observed, fresh: Frozen | None, context: RenderContext) -> Gang:
    """`fresh`: what the job would be frozen to now."""
    if observed.at_zero or observed.stateful_set is not observed.own_stateful_set:
        return Gang()  # no gang, or somebody else's
    remembered = context.remembered
    if remembered is not None and remembered.proven:  # pods have been there since, so they still run it, whatever annotations say
        return _gang_of(observed, remembered.run, proven=True)
    hashes = list(dict.fromkeys(_hashes(observed)))
    for run_hash in hashes:
        if fresh is not None and fresh.hash == run_hash:
            return _gang_of(observed, fresh, proven=True)
        config_map = observed.objects.get(("ConfigMap", run_name(observed.name, run_hash)))
        run = None if config_map is None else read_run(observed, config_map, run_hash)
        if config_map is not None and run is not None:
            return _gang_of(observed, run, proven=_is_signed(config_map, run, context))
    if remembered is not None:
        return _gang_of(observed, remembered.run, proven=remembered.proven)
    return Gang(trouble=_unknown(observed, hashes))


def made_anew(observed: Observed, run: Frozen | None, context: RenderContext) -> str:
    """Return which key of the operator was made anew since the pods were started, so that reports can't be checked; '' if none."""
    reports_to = None if run is None or observed.at_zero else run.parsed.report
    if run is None or reports_to is None or context.report is None:
        return ""
    if reports_to.ca_pem != context.report.ca_pem:
        when = f" at {timestamp(context.authority_made)}" if context.authority_made else ""
        text = (
            f"the operator's certificate authority was replaced{when}, and these pods trust only the earlier one, so their reports don't"
            " arrive"
        )
        return f"{text}: {start_anew(observed)}"
    if has_lost_key(run, context):
        text = "the operator's key was replaced after these pods started, so only the token of their node 0 proves their reports"
        return f"{text}: {start_anew(observed)}"
    if context.is_unverified:
        text = f"node 0 signs its reports with another key than the one in Secret {run.key_secret}, so they are refused"
        where = f"-n {observed.namespace}"
        return (
            f"{text}: `lockstep stop {observed.name} {where}`, `kubectl delete secret {run.key_secret} {where}`, `lockstep resume"
            f" {observed.name} {where}`"
        )
    return ""


def _hashes(observed: Observed) -> list[str]:
    """Run hashes of the StatefulSet, then of the pods; the one in status first. Anybody may write annotations, which may name an earlier
    run of this job, which was signed as well.
    """
    items = [item for item in (observed.stateful_set, *observed.pods) if item is not None]
    stated = [(item["metadata"].get("annotations") or {}).get(ANNOTATION_RUN_HASH) for item in items]
    started = observed.status_part("run").get("name")
    return sorted((str(run_hash) for run_hash in stated if run_hash), key=lambda run_hash: run_name(observed.name, run_hash) != started)


def read_run(observed: Observed, config_map: Object, run_hash: str) -> Frozen | None:
    """Return the run in this ConfigMap; None if it is not what the pods were started with."""
    data = config_map.get("data") or {}
    if owner_uid(config_map) != observed.uid or RUN_KEY not in data or TEMPLATE_KEY not in data:
        return None
    candidate = Frozen(observed.name, observed.namespace, 0, data[RUN_KEY], data[TEMPLATE_KEY])
    if candidate.hash != run_hash:
        return None
    try:
        nodes = parse_run(candidate.run).nodes
    except ContractError:
        return None
    return Frozen(observed.name, observed.namespace, nodes, candidate.run, candidate.template)


def _is_signed(config_map: Object, run: Frozen, context: RenderContext) -> bool:
    stated = str((config_map["metadata"].get("annotations") or {}).get(ANNOTATION_RUN_PROOF, ""))
    return bool(context.run_key) and hmac.compare_digest(stated.encode("utf-8", "replace"), run_proof(run, context.run_key).encode())


def _gang_of(observed: Observed, run: Frozen, *, proven: bool) -> Gang:
    if proven or observed.stateful_set is not None:
        return Gang(run, proven)
    text = (
        f"StatefulSet {observed.name} is gone or has lost its labels, and this operator did not sign what its pods run, so it does not"
        " create the StatefulSet again"
    )
    return Gang(run, proven, Notice(Reason.FROZEN_RUN_LOST, f"{text}: {start_anew(observed)}"))


def _unknown(observed: Observed, hashes: list[str]) -> Notice:
    if not hashes:
        text = f"StatefulSet {observed.name} and its pods have lost their annotation {ANNOTATION_RUN_HASH}, which names what they run"
        return Notice(Reason.FROZEN_RUN_LOST, f"{text}: the pods are left alone; {start_anew(observed)}")
    name = run_name(observed.name, hashes[0])
    exists = ("ConfigMap", name) in observed.objects
    what = "was changed after the pods started, and not by Lockstep" if exists else "was deleted, or has lost its labels"
    text = (
        f"ConfigMap {name}, which holds what the pods run, {what}. Lockstep leaves the pods alone, but a pod that is created again may not"
        " start"
    )
    return Notice(Reason.FROZEN_RUN_LOST, f"{text}; {start_anew(observed)}")
