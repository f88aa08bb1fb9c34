"""Replicas: several engines of one client, with routing by prefix and migration of answers."""
