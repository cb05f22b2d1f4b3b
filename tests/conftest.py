"""Settings of every test: hypothesis without deadlines (a first import is slow), the same examples on every run."""

from hypothesis import settings

settings.register_profile("suite", deadline=None, max_examples=50, derandomize=True)
settings.load_profile("suite")
