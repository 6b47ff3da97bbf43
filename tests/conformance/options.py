"""Calls with the SDK's options."""

from __future__ import annotations

from tests.conformance.row import Row

_POD = (
    "PodTemplatePatch(spec=PodSpecPatch("
    'service_account_name="trainer", node_selector={"pool": "gpu"}, '
    'tolerations=[{"key": "gpu", "operator": "Exists"}], image_pull_secrets=[{"name": "registry"}], '
    'security_context={"runAsUser": 1000}, scheduling_gates=[{"name": "example.com/gate"}], '
    'affinity={"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": '
    '[{"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}]}}}, '
    'volumes=[{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]))'
)


def patch(job: str, *, name: str = "node", jobset: str = "") -> str:
    """The SDK's nested patch of one replicated job."""
    jobs = f'spec=JobSetSpecPatch(replicated_jobs=[ReplicatedJobPatch(name="{name}", template={job})])'
    template = f"template=JobSetTemplatePatch({jobset}{jobs})"
    return f"RuntimePatch(training_runtime_spec=TrainingRuntimeSpecPatch({template}))"


def ours(job: str, *, name: str = "node", jobset: str = "") -> str:
    jobs = f'"spec": {{"replicated_jobs": [{{"name": "{name}", "template": {job}}}]}}'
    return f'runtime_patches=[{{"training_runtime_spec": {{"template": {{{jobset}{jobs}}}}}}}]'


ROWS = (
    Row(
        "name-labels-annotations",
        'runtime="torch-distributed", trainer=CustomTrainerContainer(image="registry.example/train:1"), '
        'options=[Name("my-job"), Labels({"team": "vision"}), Annotations({"example.com/ticket": "42"})]',
        'runtime="torch-distributed", image="registry.example/train:1", labels={"team": "vision"}, '
        'annotations={"example.com/ticket": "42"}',
    ),
    Row(
        "deadline",
        'runtime="torch-distributed", trainer=CustomTrainerContainer(image="registry.example/train:1"), '
        "options=[ActiveDeadlineSeconds(3600)]",
        'runtime="torch-distributed", image="registry.example/train:1", active_deadline_seconds=3600',
    ),
    Row(
        "patched-pods",
        'runtime="torch-distributed", trainer=CustomTrainerContainer(image="registry.example/train:1"), '
        f"options=[{patch(f'JobTemplatePatch(spec=JobSpecPatch(template={_POD}))')}]",
        'runtime="torch-distributed", image="registry.example/train:1", '
        + ours(
            '{"spec": {"template": {"spec": {"service_account_name": "trainer", "node_selector": {"pool": "gpu"}, '
            '"tolerations": [{"key": "gpu", "operator": "Exists"}], "image_pull_secrets": ["registry"], '
            '"security_context": {"runAsUser": 1000}, "scheduling_gates": [{"name": "example.com/gate"}], '
            '"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": '
            '[{"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}]}}}, '
            '"volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]}}}}'
        ),
    ),
    Row(
        "patched-containers",
        'runtime="conformance-two-nodes", trainer=CustomTrainerContainer(image="registry.example/train:1"), options=['
        + patch(
            "JobTemplatePatch(spec=JobSpecPatch(template=PodTemplatePatch(spec=PodSpecPatch("
            'volumes=[{"name": "logs", "emptyDir": {}}], '
            'init_containers=[ContainerPatch(name="prepare", env=[{"name": "STEP", "value": "1"}])], '
            'containers=[ContainerPatch(name="node", volume_mounts=[{"name": "logs", "mountPath": "/logs"}], '
            'security_context={"privileged": True}), '
            'ContainerPatch(name="shipper", env=[{"name": "POD", "valueFrom": {"fieldRef": '
            '{"fieldPath": "metadata.name"}}}], volume_mounts=[{"name": "logs", "mountPath": "/logs"}])]))))'
        )
        + "]",
        'runtime="conformance-two-nodes", image="registry.example/train:1", '
        + ours(
            '{"spec": {"template": {"spec": {"volumes": [{"name": "logs", "emptyDir": {}}], '
            '"init_containers": [{"name": "prepare", "env": {"STEP": "1"}}], '
            '"containers": [{"name": "node", "volume_mounts": [{"name": "logs", "mountPath": "/logs"}], '
            '"security_context": {"privileged": True}}, {"name": "shipper", '
            '"env": {"POD": {"fieldRef": {"fieldPath": "metadata.name"}}}, '
            '"volume_mounts": [{"name": "logs", "mountPath": "/logs"}]}]}}}}'
        ),
    ),
    Row(
        "patched-metadata",
        'runtime="torch-distributed", trainer=CustomTrainerContainer(image="registry.example/train:1"), options=['
        + patch(
            'JobTemplatePatch(metadata={"labels": {"level": "job"}}, spec=JobSpecPatch(template=PodTemplatePatch('
            'metadata={"labels": {"level": "pod"}, "annotations": {"example.com/scrape": "true"}})))',
            jobset='metadata={"labels": {"level": "jobset"}}, ',
        )
        + "]",
        'runtime="torch-distributed", image="registry.example/train:1", '
        + ours(
            '{"metadata": {"labels": {"level": "job"}}, "spec": {"template": {"metadata": {"labels": '
            '{"level": "pod"}, "annotations": {"example.com/scrape": "true"}}}}}',
            jobset='"metadata": {"labels": {"level": "jobset"}}, ',
        ),
    ),
    Row(
        "patched-launcher",
        'runtime="deepspeed-distributed", trainer=CustomTrainerContainer(image="registry.example/train:1"), options=['
        + patch(
            "JobTemplatePatch(spec=JobSpecPatch(template=PodTemplatePatch(spec=PodSpecPatch("
            'service_account_name="launcher"))))',
            name="launcher",
        )
        + "]",
        'runtime="deepspeed-distributed", image="registry.example/train:1", '
        + ours('{"spec": {"template": {"spec": {"service_account_name": "launcher"}}}}', name="launcher"),
    ),
)
