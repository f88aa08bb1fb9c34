"""Layers: parameters, their op's backend, and what they need from the cache."""
