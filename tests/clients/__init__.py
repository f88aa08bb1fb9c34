"""Programs of other people's clients, run against a server of the bundled model."""
