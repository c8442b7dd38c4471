"""`lockstep hosts`: verbs about the machines of a cluster file with `platform: hosts`."""
