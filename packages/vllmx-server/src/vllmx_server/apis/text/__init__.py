"""Tokens of texts, texts of tokens, and the tokenizer."""
