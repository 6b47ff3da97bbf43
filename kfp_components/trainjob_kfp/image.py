"""The container image of all components."""

import os

from trainjob import __version__

STEP_IMAGE = os.environ.get("TRAINJOB_STEP_IMAGE") or f"trainjob-step:{__version__}"
"""Contains this package in the version that compiled the component: a compiled component is a shim, and the package in
the image does the work. Set ``TRAINJOB_STEP_IMAGE`` where pipelines are compiled, to the reference that the cluster
pulls."""
