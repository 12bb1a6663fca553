"""The conversation of `vllmx chat` and `vllmx run`: engine or server, tools, files, display."""
