"""Text in and out: tokenizer, detokenizer, chat templates, reasoning and tool-call parsers."""
