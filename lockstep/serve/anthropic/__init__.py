"""The Anthropic API: /v1/messages."""
