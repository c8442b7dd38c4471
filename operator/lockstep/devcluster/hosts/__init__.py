"""Hosts on one machine: namespaces with a systemd, an sshd and users each, to try `platform: hosts` on without a second machine."""
