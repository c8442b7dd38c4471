"""Other tools' files and command lines as Lockstep's own: hostfiles, ssh's configuration, a config.yaml, a launcher's line."""
