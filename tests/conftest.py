"""What holds for all tests."""

from hypothesis import settings

# A busy machine is no failure: nothing here is timed.
settings.register_profile("vllmx", deadline=None)
settings.load_profile("vllmx")
