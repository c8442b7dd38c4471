"""A job on machines that somebody has a terminal on: one command launches, the same number of others join. No ssh, no cluster, no
daemon.
"""
