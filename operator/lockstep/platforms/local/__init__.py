"""A job as processes of this machine: one agent a node over loopback, no cluster, no root."""
