"""Tools of MCP servers that the operator names, for models to call."""
