"""What holds for every test."""

from __future__ import annotations

import os

from hypothesis import settings

# A busy machine makes any example slow once; how long a test may take is pytest's to say.
settings.register_profile("house", deadline=None)
settings.load_profile("house")

# No test asks the Hub: what a hub id leads to is the same on a machine without a network.
os.environ["HF_HUB_OFFLINE"] = "1"
