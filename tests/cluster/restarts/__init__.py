"""Tests that stop, restart or reconfigure a part of the cluster: one at a time, while no other test uses it."""
