"""OpenAI's Responses and conversations, answered as chats."""
