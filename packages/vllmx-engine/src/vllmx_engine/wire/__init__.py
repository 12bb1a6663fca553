"""What is said: messages between those who ask and the engine core, and how they travel."""
