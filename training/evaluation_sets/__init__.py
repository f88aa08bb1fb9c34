"""Requests written by hand, for evaluation only."""
