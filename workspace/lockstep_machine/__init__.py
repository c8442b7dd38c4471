"""Facts of the machine where a program runs, and the wire between two programs, by the standard library alone: imported by agents, trainers
and the command line, and sent as text to where nothing is. `readings`, `commands`, `network`, `gpus`, `cards` and `wire` are read by Python
3.6, too.
"""
