"""Generator of the synthetic training corpus: seeded samples of every task."""
