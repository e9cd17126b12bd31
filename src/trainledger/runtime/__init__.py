"""The training program on PyTorch: every layout of the ledger, run for real and watched.

torch is imported in this package and nowhere else, and only by the modules that need it: `spec` and
`observe.observation` describe a run and what was seen of it, and stay importable without torch.
"""
