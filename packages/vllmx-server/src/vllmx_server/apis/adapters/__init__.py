"""LoRA adapters that come and go while a server runs."""
