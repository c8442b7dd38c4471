"""Reports of a run: lines for people, JSONL files for tools, datagrams for the agent, and metrics for dashboards.

None of them can stop the training or make it wait: a full disk costs a record, a server that hangs costs its metrics.
"""

from lockstep_train.report.reporter import Reporter
from lockstep_train.report.terminal import print_error

__all__ = ["Reporter", "print_error"]
