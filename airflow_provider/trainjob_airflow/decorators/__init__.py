"""Decorators."""
