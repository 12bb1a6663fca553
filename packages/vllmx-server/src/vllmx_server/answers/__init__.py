"""What the server sends, as msgspec structs: what the API's document says, and what is encoded."""
