"""The weight format "gguf": llama.cpp's single-file models.

`cursor` and `metadata` read the header, `file` one file, `source` a set of shards as weights under
Hugging Face names; `blocks`, `legacy_blocks` and `k_blocks` decode the block types; `architecture`
describes an architecture's GGUF form, `hyperparameters` and `rope` turn metadata into config.json's
terms.
"""
