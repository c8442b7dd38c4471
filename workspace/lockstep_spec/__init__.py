"""The ground that the control plane, the gang and the trainer share: choices among settings, and the sizes of a run before anything is loaded.

Standard library only. Both sides import the same functions, so that `lockstep plan` and the trainer's first lines can't differ.
"""
