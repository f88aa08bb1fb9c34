"""Trainer of the bundled model and of the test models, with its corpus and evaluation."""
