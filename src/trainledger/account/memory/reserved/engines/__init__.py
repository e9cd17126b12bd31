"""Engines in a run: when each asks the allocator for what it passes (memory/engines), and when it lets go."""
