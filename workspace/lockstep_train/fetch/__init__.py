"""Models and datasets by name: fetched once a volume from a hub or an object store, checked, pinned, and read from a folder ever after."""
