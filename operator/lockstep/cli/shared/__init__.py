"""What several verbs use: options, the cluster that is meant, output."""
