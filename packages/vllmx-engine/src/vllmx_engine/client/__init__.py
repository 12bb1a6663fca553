"""Who asks: from what a user wants to messages, and from updates to text."""
