"""Where the product decodes by itself instead of by `trainjob._support.foreign`, and why."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PRODUCT = ("components/trainjob", "airflow_provider/trainjob_airflow", "kfp_components/trainjob_kfp")

_DECODERS = re.compile(
    r"json\.(loads?|JSONDecoder)|yaml\.(\w*load\w*|parse|scan|compose\w*)|tomllib\.\w+"
    r"|(pickle|marshal|plistlib)\.(loads?|_?Unpickler)|(bz2|lzma|gzip)\.(open|decompress|\w+File)|zlib\.decompress\w*"
    r"|(shelve|configparser|csv|xml[\w.]*)\.\w+"
    r"|binascii\.a2b_\w+|base64\.\w*decode\w*|ast\.literal_eval|zipfile\.ZipFile|tarfile\.(open|TarInfo\.frombuf)"
)
_METHODS = re.compile(r"json|model_validate_json|validate_json")  # of any object

OWN = "reads files of this package"
MODEL = "checks a file of a model as its loader reads it, with its own limits, and keeps nothing of it"
SERVER = "objects of the API server, which has checked them; an error counts as a failed request"
SCRIPTS = "components/trainjob/progress/"  # run in a training, with the standard library only, and have the same limits
STREAM = "decompresses piece by piece while it copies, and keeps nothing"

ALLOWED: dict[str, tuple[str, set[str]]] = {
    "components/trainjob/_support/foreign.py": ("the reader", {"json.loads"}),
    "components/trainjob/_support/foreign_yaml.py": ("the reader", {"yaml.load", "yaml.load_all", "yaml.parse"}),
    "components/trainjob/_backends/credentials.py": ("a field of the user's own file", {"base64.b64decode"}),
    "components/trainjob/_backends/tls.py": ("certificates of the user's own files", {"base64.b64decode"}),
    "components/trainjob/_manifest/node.py": ("runs in images without this package", {"json.loads"}),
    "components/trainjob/_spec/reading.py": (
        "a literal of Python that Jinja wrote, of limited length",
        {"ast.literal_eval"},
    ),
    "components/trainjob/_backends/kubernetes/client.py": (SERVER, {"json.loads"}),
    "components/trainjob/_backends/kubernetes/job_watch.py": ("copies what it has just written", {"json.loads"}),
    "components/trainjob/_backends/kubernetes/reflector.py": (SERVER, {"json.loads"}),
    "components/trainjob/_install/__init__.py": (OWN, {"yaml.safe_load_all"}),
    "components/trainjob/_spec/torchtune.py": ("asks how torchtune reads a value of the author", {"yaml.safe_load"}),
    "components/trainjob/data/formats/pickled.py": (MODEL, {"pickle._Unpickler"}),
    "components/trainjob/data/formats/tables.py": (MODEL, {"base64.b64decode"}),
    "components/trainjob/data/formats/tensors.py": (MODEL, {"ast.literal_eval", "zipfile.ZipFile"}),
    "components/trainjob/data/formats/texts.py": (MODEL, {"json.loads", "yaml.parse"}),
    "components/trainjob/data/gzips.py": (STREAM, {"zlib.decompressobj"}),
    "components/trainjob/data/signing.py": (
        "its text is limited, and what it decodes is read by the reader",
        {"base64.b64decode"},
    ),
    "components/trainjob/data/stores/oci/credentials.py": ("a field of the user's own file", {"base64.b64decode"}),
    "components/trainjob/data/stores/oci/gzips.py": (STREAM, {"zlib.decompressobj"}),
    "components/trainjob/data/stores/oci/tars.py": ("one block of 512 bytes at a time", {"tarfile.TarInfo.frombuf"}),
    "airflow_provider/trainjob_airflow/sample.py": ("renders the author's own template", {"json.loads"}),
    "kfp_components/trainjob_kfp/node.py": ("runs in images without this package", {"json.loads"}),
    "kfp_components/trainjob_kfp/readme.py": (OWN, {"yaml.safe_load"}),
}
"""Module -> the reason, and its decoders."""


def decoders_in(source: str) -> Iterator[str]:
    """The decoders that a module names; without ``json.loads(json.dumps(…))``, which reads what it has just written."""
    tree = ast.parse(source)
    own = {id(call.func) for call in ast.walk(tree) if isinstance(call, ast.Call) and _is_copy(call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [f"{node.module}.{each.name}" for each in node.names]
            yield from filter(_DECODERS.fullmatch, names)
        elif isinstance(node, ast.Attribute) and id(node) not in own:
            name = ast.unparse(node)
            if _DECODERS.fullmatch(name):
                yield name
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _METHODS.fullmatch(node.func.attr):
            yield f".{node.func.attr}()"


def _is_copy(call: ast.Call) -> bool:
    return ast.unparse(call.func) == "json.loads" and ast.unparse(call.args[0]).startswith("json.dumps(")


def found() -> dict[str, set[str]]:
    """Module -> its decoders."""
    files = [file for folder in PRODUCT for file in sorted((ROOT / folder).rglob("*.py"))]
    named = {str(file.relative_to(ROOT)): set(decoders_in(file.read_text(encoding="utf-8"))) for file in files}
    return {file: names for file, names in named.items() if names and not file.startswith(SCRIPTS)}
