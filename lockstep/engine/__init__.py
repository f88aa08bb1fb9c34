"""The engine: requests, the scheduler, the loop, the client. Knows no text."""
