"""Quantises float32 to GGUF's block types, and converts a checkpoint to a GGUF file.

`search` finds scales, `legacy` and `k` make blocks of them, and `encoders` chooses between them and
a plugin. `mixes` gives each tensor its type, `header` and `vocabulary` turn a checkpoint's config
and tokenizer into metadata, `writer` writes the file, and `convert` runs all of it.
"""
