"""Imports whose place differs between versions of Airflow, and that `airflow.providers.common.compat` lacks."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from airflow.sdk.exceptions import TaskDeferralError, TaskDeferralTimeout
else:
    try:
        from airflow.sdk.exceptions import TaskDeferralError, TaskDeferralTimeout
    except ImportError:  # before 3.2
        from airflow.exceptions import TaskDeferralError, TaskDeferralTimeout

__all__ = ["TaskDeferralError", "TaskDeferralTimeout"]
