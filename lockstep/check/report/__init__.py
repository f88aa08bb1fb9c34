"""Report of a check: its counters, its HTML page and what it did not exercise."""
