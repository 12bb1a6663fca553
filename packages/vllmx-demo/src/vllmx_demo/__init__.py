"""The small trained model that vllmx serves when none is named."""
