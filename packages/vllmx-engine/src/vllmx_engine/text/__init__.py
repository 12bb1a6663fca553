"""Text of requests and answers: tokenizer, chat template, detokenizer, stop strings.

Usable without the rest of the engine.
"""
