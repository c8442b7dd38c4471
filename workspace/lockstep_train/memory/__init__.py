"""Memory that a rank needs of its device, estimated before anything is loaded."""
