"""Several models behind one server: an engine core for each, there when it is needed."""
