"""Settings of all tests: the same examples in every run, and no deadline per example on a machine that others use too."""

from hypothesis import settings

settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")
