"""What a plan holds and moves, from its inventory: states, activations, traffic, and the ledger of one plan."""
