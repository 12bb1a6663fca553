"""Routes that change a running server, for operators."""
