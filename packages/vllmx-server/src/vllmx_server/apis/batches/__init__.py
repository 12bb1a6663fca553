"""Files, OpenAI's batches, and Anthropic's batches of Messages."""
