"""Training: steps on tokens of files, with held-out losses, metrics, checkpoints and an end that is said.

`spec`, `result`, `schedule`, `metrics` and `stop` need no torch.
"""
