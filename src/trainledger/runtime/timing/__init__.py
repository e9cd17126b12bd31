"""Steps on the clock, each beside fixed work that tells how fast the machine is at the moment; `timed` has no torch."""
