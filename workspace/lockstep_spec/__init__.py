"""The ground that the control plane, the gang and the trainer share: choices among settings, and the sizes of a run before anything is
loaded.

Standard library only. Both sides import the same functions, so that `lockstep plan` and the trainer's first lines can't differ.
"""

VERSION = "0.1.0"
"""Version of all four packages, which pyproject.toml states as well: the ranks' Python and the agent beside it may come from two images."""
