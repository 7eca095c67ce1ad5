"""Settings of every test run."""

from hypothesis import settings

# Examples differ in cost, and a busy machine makes any of them late.
settings.register_profile("hal", deadline=None)
settings.load_profile("hal")
