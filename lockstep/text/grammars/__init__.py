"""Grammars of answers: structured output, tool calls, thinking budgets (by llguidance)."""
