"""The run book: what was measured of a plan, kept in one SQLite file, and what two records say of each other."""
