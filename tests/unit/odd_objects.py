"""Objects of an API server in which anything may be anywhere, for properties of code that must not fail on them."""

from __future__ import annotations

from hypothesis import strategies as st

from trainjob.status import QUEUE_LABEL


def one_of_words(text: str) -> st.SearchStrategy[str]:
    return st.sampled_from(text.split())


NAMES = one_of_words(
    f"""metadata status spec labels annotations name namespace phase reason message type value suspend startTime
    creationTimestamp deletionTimestamp deletionGracePeriodSeconds lastTransitionTime conditions jobsStatus active ready
    trainerStatus metrics progressPercentage containerStatuses initContainerStatuses initContainers containers state
    lastState waiting running terminated exitCode finishedAt restartCount restartPolicy podIP volumes claimName trainer
    persistentVolumeClaim involvedObject kind series lastObservedTime eventTime lastTimestamp admissionChecks env
    runtimeRef command initializer jobset.sigs.k8s.io/replicatedjob-name jobset.sigs.k8s.io/job-index {QUEUE_LABEL}"""
)
WORDS = one_of_words(
    """Error OOMKilled x Pod Job True False Pending Complete Failed Suspended Evicted DisruptionTarget PodScheduled
    Unschedulable FailedMount DeletionByPodGC QuotaReserved Preempted Always TrainJobResourcesCreationFailed node
    dataset-initializer ImagePullBackOff StartError 2026-11-21T10:00:00Z 2026-11-21 9999-12-31T23:59:59Z"""
)
LEAVES = st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats() | WORDS | st.text(max_size=5)
JSON = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner), max_leaves=30)
OBJECTS = st.dictionaries(NAMES, JSON)
