"""How the ranks of a job start, fail and restart together. Standard library only, Python 3.10 or newer."""
