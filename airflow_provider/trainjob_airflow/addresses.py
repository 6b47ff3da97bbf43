"""Where the pages of trainings are served. Every Airflow process imports this module, so it imports nothing."""

from __future__ import annotations

from urllib.parse import urlsplit

from airflow.providers.common.compat.sdk import conf

PREFIX = "/trainjob"
"""Prefix of the pages in Airflow's API server."""


def root() -> str:
    """Path of the pages, for an Airflow that is not at the root of its host."""
    return urlsplit(conf.get("api", "base_url", fallback="") or "").path.rstrip("/") + PREFIX
