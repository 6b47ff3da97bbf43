"""Fakes of remote servers. Each passes the contract tests that the real one passes."""
