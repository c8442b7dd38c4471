"""The job end to end: control plane and command line of Lockstep."""
