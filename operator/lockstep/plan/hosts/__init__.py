"""Jobs on hosts: decisions about where ranks go, what a host must have, and how a job does (pure)."""
