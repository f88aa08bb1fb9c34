"""Scheduling: requests, schedules, prompt chunks and draft lengths. No torch."""
