"""Chat templates: a checkpoint's Jinja template, its files and its environment."""
