"""Pictures and films of docs/pictures, recorded from real runs."""
