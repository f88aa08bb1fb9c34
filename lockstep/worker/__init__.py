"""Worker: device side of an engine. Model startup, row table, step program, capture, copies."""
