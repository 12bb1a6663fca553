"""The own API of llama.cpp's server, answered as completions."""
