"""The side that asks: makes messages of what a user wants, and text of updates."""
