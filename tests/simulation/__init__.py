"""A deterministic simulation of launchers, waiters, cancels and reapers; see docs/development/simulation.md."""
