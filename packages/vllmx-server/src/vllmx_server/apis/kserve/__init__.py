"""The Open Inference Protocol (v2) of KServe, and its extension for texts."""
