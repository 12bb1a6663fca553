"""Request bodies as msgspec structs: what is not declared here is refused by name."""
