"""The JSON documents that pages show: of a training, a list of jobs, a workflow, a study. `VERSION` is their version.

A page, `trainjob report`, `trainjob ui`, the Airflow tab and the KFP artifact show nothing else. All texts are masked
and free of control sequences. Every key is present in every document; what is unknown is null or empty. Keys are only
added within a version.
"""

VERSION = 1
MAX_POINTS = 20_000
"""Points in one document, of all metrics, attempts and compared trainings together: 700 KB."""
