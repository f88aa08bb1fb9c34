"""Replicas: several engines behind one client, with routing by prefix and migration of answers."""
