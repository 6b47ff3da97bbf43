"""Use an official client as people do, and print the results as JSON. Runs in an environment that has the client.

python official_client.py http://127.0.0.1:PORT
"""

from __future__ import annotations

import json
import sys
import urllib.parse

from model_registry import ModelRegistry
from model_registry.types import ArtifactState


def main(url: str) -> None:
    parts = urllib.parse.urlsplit(url)
    client = ModelRegistry(f"http://{parts.hostname}", parts.port, author="ada", is_secure=False, user_token="t")
    result: dict[str, object] = {}
    for number, accuracy in (("1", 0.5), ("2", 0.75)):
        client.register_model(
            "digits",
            f"s3://models/digits/{number}",
            model_format_name="safetensors",
            model_format_version="1",
            version=number,
            storage_key="keys",
            model_source_kind="kfp",
            model_source_class="pipelinerun",
            model_source_group="team",
            model_source_id="run-1",
            model_source_name="nightly",
            version_description="a description",
            metadata={"accuracy": accuracy, "epochs": 3, "best": True, "note": "ä"},
        )
    version, artifact = client.get_model_version("digits", "2"), client.get_model_artifact("digits", "2")
    result["version"] = [version.name, version.author, version.description, version.custom_properties]
    result["artifact"] = [artifact.uri, artifact.state, artifact.model_source_kind, artifact.model_source_group]
    version.custom_properties = {"only": "this"}
    artifact.state = ArtifactState.LIVE
    result["updated"] = [client.update(version).custom_properties, client.update(artifact).state]
    result["versions"] = [each.name for each in client.get_model_versions("digits").page_size(1)]
    # A version that another program, this project, registered.
    if found := client.get_registered_model("ours"):
        theirs = client.get_model_version("ours", "1")
        there = client.get_model_artifact("ours", "1")
        kind = [there.model_source_kind, there.model_source_class, there.model_source_id, there.model_source_name]
        result["ours"] = [found.name, theirs.author, theirs.custom_properties, there.uri, there.state, kind]
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1])
