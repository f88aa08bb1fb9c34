"""Decides what runs next: requests, schedules, chunks of prompts, numbers of drafts. No torch."""
