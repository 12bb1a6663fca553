"""Code that APIs share: the served model, bodies of chats, and the text that comes back."""
