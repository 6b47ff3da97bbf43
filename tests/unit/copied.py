"""What the tests of copies between folders copy."""

from trainjob.data import file_manifest

LEFT = {".trainjob/lock", file_manifest.MARK}
"""What a refused copy leaves in its target."""
FILES = {"a.txt": b"one", "sub/b.bin": bytes(range(256)) * 9000, "sub/deep/c": b"", "ünï cödé %20": b"x"}
SIZE = sum(map(len, FILES.values()))
