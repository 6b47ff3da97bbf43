"""What somebody else wrote is read by one reader; every other decoder of the product has a reason."""

from __future__ import annotations

import pytest
from tests.unit.decoders import ALLOWED, decoders_in, found


def test_decoders_are_named_with_a_reason() -> None:
    """Use `trainjob._support.foreign`, or add the module to `ALLOWED` with the reason why it need not."""
    assert found() == {file: names for file, (_, names) in ALLOWED.items()}


@pytest.mark.parametrize(
    "source",
    [
        "import json\njson.loads(text)",
        "import json\nread = json.load",
        "from json import loads",
        "import yaml\nyaml.safe_load_all(text)",
        "import yaml\nyaml.load(text, Loader=yaml.CSafeLoader)",
        "import pickle\npickle.loads(data)",
        "answer.json()",
        "from xml.etree.ElementTree import fromstring",
        "import zlib\nzlib.decompress(data)",
    ],
)
def test_a_new_decoder_is_found(source: str) -> None:
    assert [*decoders_in(source)]


@pytest.mark.parametrize("source", ["json.loads(json.dumps(value))", "json.dumps(value)", "yaml.safe_dump(value)"])
def test_what_decodes_nothing_foreign_is_allowed(source: str) -> None:
    assert not [*decoders_in(f"import json, yaml\n{source}")]
