"""OpenAI's Responses over the chat that every route runs."""
