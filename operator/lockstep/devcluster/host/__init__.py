"""The host's part of the embedded cluster: processes, control groups, links, folders."""
