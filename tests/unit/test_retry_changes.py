"""What the next attempt changes by `on_retry`: each rule, its bounds, what accumulates, and what is recorded."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from tests import objects

from trainjob import Diagnosis, Evidence, InvalidSpec, RetryVerdict, TrainJobSpec
from trainjob._diagnosis import ON_RETRY, with_change, with_node
from trainjob._manifest.render import render
from trainjob._manifest.retry_changes import Changes, applied, changed, recorded
from trainjob._manifest.retry_notice import RETRY_CHANGE, notice
from trainjob._spec.on_retry import PRIORITY_LABEL, OnRetry, memory_of
from trainjob._spec.quantities import quantity_value
from trainjob.errors import Category
from trainjob.job import SPEC_HASH, spec_hash
from trainjob.status import QUEUE_LABEL

RULES: dict[str, Any] = {
    "out_of_memory": {"max_memory": "40Gi"},
    "node_lost": {"max_excluded_nodes": 2},
    "quota": {"queue": "backfill", "priority_class": "low", "min_nodes": 2},
    "scheduling": {"min_nodes": 3, "nodes_factor": 0.8},
}
FIELDS: dict[str, Any] = {
    "runtime": "torch-distributed",
    "num_nodes": 8,
    "resources_per_node": {"cpu": 4, "memory": "16Gi"},
    "labels": {QUEUE_LABEL: "main"},
}


def spec_of(rules: dict[str, Any] | None = None, **fields: Any) -> TrainJobSpec:
    return TrainJobSpec.parse({**FIELDS, **fields, "on_retry": RULES if rules is None else rules})


def failure(category: Category, **fields: Any) -> Diagnosis:
    return Diagnosis(category, RetryVerdict.UNKNOWN, "node-1 failed", rank="node-1", **fields)


OOM = failure(Category.OUT_OF_MEMORY, node_memory=True)
QUOTA = failure(Category.QUOTA)


def lost(node: str) -> Diagnosis:
    return failure(Category.NODE_LOST, node=node)


def after(spec: TrainJobSpec, *failures: Diagnosis | None) -> Changes:
    """The changes after these failures, as a chain of launches computes them: each reads what the last one recorded."""
    changes = Changes()
    for number, why in enumerate(failures, 1):
        changes = changed(spec, why, recorded(render(spec, "key", number, "ns", changes=changes)))
    return changes


def body_after(spec: TrainJobSpec, *failures: Diagnosis | None) -> dict[str, Any]:
    made: dict[str, Any] = render(spec, "key", len(failures) + 1, "ns", changes=after(spec, *failures))
    return made


# ---------------------------------------------------------------- each rule


def test_memory_grows_by_its_factor_up_to_the_bound() -> None:
    found = [after(spec_of(), *[OOM] * count).memory for count in range(5)]
    assert found == [None, "24Gi", "36Gi", "40Gi", "40Gi"]


def test_requests_and_limits_grow_and_other_resources_stay() -> None:
    spec = spec_of(resources_per_node={"requests": {"memory": "8Gi", "cpu": 4}, "limits": {"memory": "16Gi", "gpu": 1}})
    resources = body_after(spec, OOM)["spec"]["trainer"]["resourcesPerNode"]
    assert resources == {
        "requests": {"memory": "24Gi", "cpu": "4"},
        "limits": {"memory": "24Gi", "nvidia.com/gpu": "1"},
    }


@pytest.mark.parametrize(
    ("memory", "factor", "bound", "expected"),
    [
        ("100Mi", 1.1, "1Gi", "110Mi"),
        ("1Gi", 1.001, "2Gi", "1026Mi"),
        ("16G", 1.5, "1T", "24G"),
        ("100Mi", 10, "101Mi", "101Mi"),
        ("900M", 1.5, "1T", "1350M"),
    ],
)
def test_memory_is_rounded_up_within_the_bound(memory: str, factor: float, bound: str, expected: str) -> None:
    rule = {"out_of_memory": {"max_memory": bound, "memory_factor": factor}}
    assert after(spec_of(rule, resources_per_node={"memory": memory}), OOM).memory == expected


def test_memory_of_a_gpu_is_not_changed() -> None:
    gpu = failure(Category.OUT_OF_MEMORY)
    assert after(spec_of(), gpu) == Changes()
    trainjob = render(spec_of(), "key", 1, "ns")
    assert with_change(gpu, trainjob) == gpu


def test_lost_nodes_are_excluded_up_to_the_bound() -> None:
    changes = after(spec_of(), lost("a"), lost(""), lost("b"), lost("a"), lost("c"))
    assert changes.excluded_nodes == ("a", "b")
    (patch,) = body_after(spec_of(), lost("a"), lost("b"))["spec"]["runtimePatches"]
    (job,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    assert job["name"] == "node"
    assert job["template"]["spec"]["template"]["spec"]["affinity"] == {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [
                    {"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "NotIn", "values": ["a", "b"]}]}
                ]
            }
        }
    }


def test_the_affinity_of_the_author_stays() -> None:
    zone = {"key": "zone", "operator": "In", "values": ["x"]}
    terms = [
        {"matchExpressions": [zone]},
        {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n"]}]},
    ]
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}
    jobs = [{"name": "node", "template": {"spec": {"template": {"spec": {"affinity": affinity}}}}}]
    patch = {"manager": "example.com/team", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": jobs}}}}
    (found,) = body_after(spec_of(runtime_patches=[patch]), lost("a"))["spec"]["runtimePatches"]
    assert found["manager"] == "example.com/team"
    excluded = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": ["a"]}
    pod = found["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"] == [
        {"matchExpressions": [zone, excluded]},
        {**terms[1], "matchExpressions": [excluded]},
    ]


def test_a_launcher_that_trains_is_kept_away_too() -> None:
    spec = spec_of(runtime="deepspeed-distributed")
    (patch,) = body_after(spec, lost("a"))["spec"]["runtimePatches"]
    jobs = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    assert [job["name"] for job in jobs] == ["node", "launcher"]


def test_without_capacity_queue_priority_and_nodes_change() -> None:
    first = body_after(spec_of(), QUOTA)
    assert first["metadata"]["labels"][QUEUE_LABEL] == "backfill"
    assert first["metadata"]["labels"][PRIORITY_LABEL] == "low"
    assert [body_after(spec_of(), *[QUOTA] * n)["spec"]["trainer"]["numNodes"] for n in range(5)] == [8, 4, 2, 2, 2]
    late = failure(Category.SCHEDULING)
    assert [after(spec_of(), *[late] * n).num_nodes for n in (1, 2, 3, 4, 9)] == [6, 4, 3, 3, 3]


@pytest.mark.parametrize("why", [None, failure(Category.PREEMPTED, node="a"), failure(Category.USER_CODE, node="a")])
def test_other_failures_change_nothing_and_keep_the_changes(why: Diagnosis | None) -> None:
    assert after(spec_of(), why) == Changes()
    assert after(spec_of(), OOM, why) == after(spec_of(), OOM)


def test_changes_of_several_rules_accumulate() -> None:
    changes = after(spec_of(), OOM, lost("a"), QUOTA, None, OOM)
    assert changes == Changes(
        memory="36Gi",
        num_nodes=4,
        queue="backfill",
        priority_class="low",
        excluded_nodes=("a",),
        reason="out of memory: node-1 failed",
    )


def test_an_author_who_changes_the_spec_has_precedence() -> None:
    changes = after(spec_of(), OOM, OOM, QUOTA)
    more = spec_of({}, resources_per_node={"memory": "64Gi"}, num_nodes=1)
    assert changed(more, None, changes) == Changes(reason=changes.reason)
    fewer = {name: rule for name, rule in RULES.items() if name != "scheduling"}
    assert applied(spec_of(fewer, num_nodes=3), changes).num_nodes == 3
    assert memory_of(applied(spec_of(resources_per_node={"memory": "38Gi"}), changes).resources_per_node) == "38Gi"
    less = spec_of({"out_of_memory": {"max_memory": "30Gi"}, "quota": {"queue": "other"}})
    assert changed(less, None, changes) == Changes(memory="30Gi", reason=changes.reason)
    without = TrainJobSpec.parse(FIELDS)
    assert changed(without, OOM, changes) == Changes()


# ---------------------------------------------------------------- what is recorded


def test_an_attempt_records_its_change_and_the_next_one() -> None:
    spec = spec_of()
    trainjob = body_after(spec, OOM)
    annotations = trainjob["metadata"]["annotations"]
    found = json.loads(annotations[RETRY_CHANGE])
    plain = applied(spec, after(spec, OOM))
    assert found == {
        "reason": "out of memory: node-1 failed",
        "diff": {"memory": ["16Gi", "24Gi"]},
        "hash": spec_hash(render(plain, "key", 1, "ns")),
        "changes": {"memory": "24Gi"},
    }
    assert found["hash"] != annotations[SPEC_HASH] == spec_hash(render(spec, "other", 1, "ns"))
    assert json.loads(annotations[ON_RETRY]) == {
        "out of memory": "memory 24Gi -> 36Gi",
        "node lost": "excluded_nodes (none) -> that of the failed rank",
        "quota": "num_nodes 8 -> 4, queue main -> backfill, priority_class (none) -> low",
        "scheduling": "num_nodes 8 -> 6",
    }
    assert notice(trainjob) == (
        "on_retry changed this attempt: memory 16Gi -> 24Gi; because of out of memory: node-1 failed"
    )


def test_rules_do_not_change_the_identity() -> None:
    plain = TrainJobSpec.parse(FIELDS)
    assert spec_hash(render(plain, "key", 1, "ns")) == spec_hash(render(spec_of(), "key", 1, "ns"))
    made = render(plain, "key", 1, "ns")
    assert {RETRY_CHANGE, ON_RETRY}.isdisjoint(made["metadata"]["annotations"])
    assert notice(made) == ""


def test_a_failure_that_a_rule_changes_is_retried() -> None:
    trainjob = render(spec_of(), "key", 1, "ns")
    found = with_change(OOM, trainjob)
    assert (found.retry, found.change) == (RetryVerdict.INFRASTRUCTURE, "memory 16Gi -> 24Gi")
    assert found.outlook == "can be retried: the next attempt changes memory 16Gi -> 24Gi"
    assert with_change(OOM, body_after(spec_of(), *[OOM] * 3)) == OOM, "the bound is reached"
    assert with_change(lost(""), trainjob) == lost(""), "the node is unknown"
    assert with_change(OOM, None) == OOM


def test_a_diagnosis_names_the_node_of_its_pod_or_rank() -> None:
    pods = [objects.pod(1, node=""), objects.pod(1, node="x"), objects.pod(0, node="y")]
    evidence = Evidence(None, pods)
    why = failure(Category.NODE_LOST)
    assert with_node(why, evidence).node == "x", "the first pod of node-1 that had a node"
    assert with_node(replace(why, pod=pods[2]["metadata"]["name"]), evidence).node == "y"
    assert with_node(replace(why, rank=""), evidence).node == ""


@pytest.mark.parametrize("text", ["", "{", "[]", "7", '{"changes": 3}', '{"changes": {"num_nodes": 0}}', None, 5])
def test_an_unreadable_annotation_is_no_change(text: object) -> None:
    trainjob = {"metadata": {"annotations": {RETRY_CHANGE: text, ON_RETRY: text}}}
    assert recorded(trainjob) == Changes()
    assert notice(trainjob) == ""
    assert with_change(OOM, trainjob) == OOM


CATEGORIES = st.sampled_from([Category.OUT_OF_MEMORY, Category.NODE_LOST, Category.QUOTA, Category.SCHEDULING])
FAILURES = st.lists(
    st.builds(
        lambda category, node: failure(category, node=node, node_memory=True), CATEGORIES, st.sampled_from("abcd")
    ),
    max_size=8,
)


@settings(max_examples=50)
@given(
    FAILURES,
    st.integers(1, 4000),
    st.integers(1, 9000),
    st.floats(1.001, 10),
    st.integers(2, 200),
    st.floats(0.01, 0.99),
    st.data(),
)
def test_no_change_passes_its_bound(
    failures: list[Diagnosis], memory: int, more: int, factor: float, nodes: int, fewer: float, data: st.DataObject
) -> None:
    bound = f"{memory + more}Mi"
    smallest = data.draw(st.integers(1, nodes - 1))
    capacity = {"queue": "backfill", "min_nodes": smallest, "nodes_factor": fewer}
    rules = {
        "out_of_memory": {"max_memory": bound, "memory_factor": factor},
        "node_lost": {"max_excluded_nodes": 2},
        "quota": capacity,
        "scheduling": capacity,
    }
    spec = spec_of(rules, num_nodes=nodes, resources_per_node={"memory": f"{memory}Mi"})
    changes = after(spec, *failures)
    result = applied(spec, changes)
    result.model_copy(update={"on_retry": None}).check()
    assert changed(spec, failures[-1] if failures else None, after(spec, *failures[:-1])) == changes, "repeatable"
    found = quantity_value(memory_of(result.resources_per_node))
    limit = quantity_value(bound)
    assert found is not None
    assert limit is not None
    assert memory * 2**20 <= found <= limit
    assert result.num_nodes is not None
    assert smallest <= result.num_nodes <= nodes
    assert len(changes.excluded_nodes) <= 2
    assert len(set(changes.excluded_nodes)) == len(changes.excluded_nodes)


# ---------------------------------------------------------------- invalid rules


def problems(rules: dict[str, Any], **fields: Any) -> dict[str, str]:
    """Path below `on_retry` -> what is wrong."""
    with pytest.raises(InvalidSpec) as caught:
        spec_of(rules, **fields)
    found = caught.value.problems
    return {each.path.removeprefix("on_retry."): f"{each.message} ({each.instead})" for each in found}


TERABYTE = {"out_of_memory": {"max_memory": "1Ti"}}


@pytest.mark.parametrize(
    ("rules", "fields", "path", "words"),
    [
        ({"out_of_memry": {"max_memory": "1Ti"}}, {}, "out_of_memry", "did you mean out_of_memory?"),
        ({"out_of_memory": {"max_memry": "1Ti"}}, {}, "out_of_memory.max_memry", "did you mean max_memory?"),
        ({"out_of_memory": {"max_memory": "1e99999999"}}, {}, "out_of_memory.max_memory", "not an amount"),
        (TERABYTE, {"resources_per_node": {"cpu": 1}}, "out_of_memory", "needs the memory of a node"),
        ({"quota": {"min_nodes": 2}}, {"num_nodes": None}, "quota.min_nodes", "needs num_nodes"),
        ({"quota": {"queue": "main"}}, {}, "quota.queue", "which the job has already"),
        ({"node_lost": {"max_excluded_nodes": 0}}, {}, "node_lost.max_excluded_nodes", "greater than"),
        ({"node_lost": "exclude"}, {}, "node_lost", "must be a mapping"),
    ],
)
def test_an_invalid_rule_is_reported(rules: dict[str, Any], fields: dict[str, Any], path: str, words: str) -> None:
    found = problems(rules, **fields)
    assert found.keys() == {path}
    assert words in found[path]


def test_all_problems_of_a_field_and_of_rules_are_reported() -> None:
    found = problems({"out_of_memory": {"max_memory": "16Gi"}, "scheduling": {"min_nodes": 8}})
    words = {"out_of_memory.max_memory": "has 16Gi already", "scheduling.min_nodes": "the job has 8 nodes"}
    assert [path for path in found if words[path] in found[path]] == [*words]
    found = problems({"out_of_memory": {"max_memory": "16Gi", "memory_factor": 0}, "quota": {"queue": "a b"}})
    words = {"out_of_memory.memory_factor": "greater than 1", "quota.queue": "'a b' is not a name"}
    assert [path for path in found if words[path] in found[path]] == [*words]
    found = problems({"out_of_memory": {"max_memory": "lots", "memory_factor": True}}, num_nodes="many")
    assert "'lots' is not an amount of memory" in found["out_of_memory.max_memory"]
    assert "not a bool" in found["out_of_memory.memory_factor"]
    assert "must be a whole number" in found["num_nodes"]
    found = problems({"quota": {"nodes_factor": 0.5}})
    assert "changes nothing" in found["quota"]
    assert "no effect without min_nodes" in found["quota.nodes_factor"]


def test_rules_cannot_be_combined_with_a_manifest() -> None:
    manifest = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "spec": {"runtimeRef": {"name": "torch-distributed"}},
    }
    with pytest.raises(InvalidSpec, match="on_retry: cannot be combined with a whole manifest"):
        TrainJobSpec(manifest=manifest, on_retry=OnRetry.model_validate(RULES)).check()
