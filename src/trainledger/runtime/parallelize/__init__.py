"""How a decoder is cut over the ranks: one file for each axis, and one for what is computed again."""
