"""Quantises float32 to GGUF's block types, and converts a checkpoint to a GGUF file.

`search` finds scales, `legacy` and `k` make blocks out of them, `encode` is the table of both;
`mixes` says which tensor gets which type, `header` and `vocabulary` state a checkpoint's config and
tokenizer in GGUF's terms, `writer` writes the file and `convert` leads through it all.
"""
