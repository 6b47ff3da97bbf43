"""``wait``: wait for a TrainJob that something else has launched."""

from trainjob_kfp.wait.component import wait

__all__ = ["wait"]
