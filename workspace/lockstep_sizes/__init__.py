"""How large a run is, before anything is loaded: parameters, memory, traffic, checkpoints.

Arithmetic on plain numbers, standard library only. The trainer and the command line import the same functions, so that what `lockstep plan`
says and what the trainer prints at its start can't differ.
"""
