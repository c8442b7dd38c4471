"""Messages of the control plane, the coordinator, agents and ranks to each other. The only part of the gang that `lockstep` imports."""
