"""The engine: how it is built, its loop, its statistics, its asynchronous form. Knows no text."""
