"""Anthropic's Messages, answered as chats."""
