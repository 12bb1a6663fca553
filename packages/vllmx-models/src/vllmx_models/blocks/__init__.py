"""The blocks of decoder layers: mixers, feed-forwards and norms, each a file of its own."""
