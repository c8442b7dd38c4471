"""Programs that run on hosts: sent there as text, for the Python (3.10 or newer) that is there, so they import only the standard
library.
"""
