"""What holds for every test."""

from __future__ import annotations

from hypothesis import settings

# A busy machine makes any example slow once; how long a test may take is pytest's to say.
settings.register_profile("house", deadline=None)
settings.load_profile("house")
