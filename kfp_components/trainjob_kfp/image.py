"""The image that all components run in."""

import os

from trainjob import __version__

STEP_IMAGE = os.environ.get("TRAINJOB_STEP_IMAGE") or f"trainjob-step:{__version__}"
"""Carries this package in the version that the component was compiled with: a compiled component is a shim, its work is
done by the package in the image. Set ``TRAINJOB_STEP_IMAGE`` where pipelines are compiled, to say where the cluster
pulls it from."""
