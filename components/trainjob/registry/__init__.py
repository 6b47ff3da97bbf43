"""Model registries."""
