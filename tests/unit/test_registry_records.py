"""What a version in the Kubeflow Model Registry says, also after others have edited it."""

from __future__ import annotations

from trainjob.registry.records import METRIC, double, read, text


def test_what_others_have_edited_hides_nothing_else() -> None:
    properties = {
        f"{METRIC}a": text("edited by hand"),
        f"{METRIC}b": double(0.5),
        "recall": {"metadataType": "MetadataDoubleValue", "double_value": 0.25},
        "b": double(0.75),
        "stage": text("trial"),
    }
    version = read("digits", {"name": "1", "customProperties": properties, "createTimeSinceEpoch": "1000"}).version
    assert version.metrics == {"b": 0.5, "recall": 0.25}, "ours win"
    assert version.tags == {"stage": "trial"}
    assert version.created == 1.0
