"""The OpenAI API: chat completions, completions, and responses."""
