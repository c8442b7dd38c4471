"""What Lockstep decides, as pure functions: no cluster, no clock, no files."""
