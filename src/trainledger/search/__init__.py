"""Search over plans: enumerate, reject by rule, rank what fits, and name the smallest change that would."""
