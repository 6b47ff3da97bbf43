"""Public names for authors of integrations, such as `trainjob_airflow` and `trainjob_kfp`. Users do not need them.

The names are listed in ``integration.pyi``. Each is imported on first use, except `preload`.
"""

from contextlib import suppress

from trainjob._support.lazy import lazy

__getattr__, __dir__ = lazy(__name__, __file__)


def preload() -> None:
    """Import the modules that waiting uses. The first wait would import them, and block its event loop for 0.5 s."""
    import trainjob._diagnosis.serialization  # noqa: PLC0415 - the same
    import trainjob._jobs.progress_log  # noqa: PLC0415 - what this function is for
    import trainjob._jobs.waiting  # noqa: PLC0415 - the same

    with suppress(ImportError):  # of the extra `kubernetes`, which the local backend does not need
        import trainjob._backends.kubernetes.backend  # noqa: F401, PLC0415 - the same
