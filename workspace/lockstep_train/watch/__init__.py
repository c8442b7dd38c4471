"""A thread that sees when a rank hangs, has lost the others, or is asked to stop before it can save."""

from lockstep_train.watch.watchdog import Watchdog

__all__ = ["Watchdog"]
