"""Grammars that answers follow: from what a user asks to masks of allowed tokens."""
