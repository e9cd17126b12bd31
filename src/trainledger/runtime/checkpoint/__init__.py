"""Checkpoints of a run, by PyTorch's distributed checkpoint: saved while training goes on, loaded in any layout.

A checkpoint is a folder `step-00000120`:

    __0_0.distcp ...   the parts of weights and optimizer states that each rank wrote, as PyTorch writes them
    .metadata          PyTorch's index of them
    state.json         what is not a tensor: the caller's own state, the random generators, config.json
    manifest.json      sizes and SHA-256 of all of these, and what the checkpoint is of

It is written as `.step-00000120.partial` and renamed once every rank is done and all of it is on disk, so that a folder
of the first name is whole or damaged from outside. Tensors have the names of the Hugging Face state dict, and each says
which box of the whole tensor it is: ranks of another layout read the boxes that meet theirs.

`manifest`, `folders` and `identity` need no torch.
"""
