"""What holds for all tests."""

from hypothesis import settings

# A busy machine is no failure: nothing here is timed.
settings.register_profile("vllmx")
settings.load_profile("vllmx")
