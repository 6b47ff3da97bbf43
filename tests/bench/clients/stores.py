"""One transfer of one client in a separate process; prints its seconds and memory.

::

    python -m tests.bench.clients.stores CLIENT up|down FOLDER s3://BUCKET/PREFIX
    python -m tests.bench.clients.stores CLIENT down FOLDER hf://OWNER/NAME

The environment has the address and credentials of the S3 server, or ``HF_ENDPOINT``. All clients except trainjob are in
``.venv-stores``. Each is used in its fastest way on two cores; code here only fills in functions that a client lacks.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from tests.bench.clients.usage import measure

MIB = 1024 * 1024
LARGE = 8 * MIB


def trainjob(verb: str, folder: str, uri: str) -> Callable[[], object]:
    from importlib import import_module

    from trainjob.data import copy

    s3 = ("trainjob.data.stores.object_stores", "obstore.store")
    for each in s3 if uri.startswith("s3:") else ("trainjob.data.stores.huggingface",):
        import_module(each)  # otherwise `copy` imports it
    return lambda: copy(folder, uri) if verb == "up" else copy(uri, folder)


def obstore_and_sha256(verb: str, folder: str, uri: str) -> Callable[[], object]:
    """obstore plus the SHA-256 of every file, which it does not compute by itself."""
    return obstore(verb, folder, uri, hashed=True)


def obstore_sha256_and_fsync(verb: str, folder: str, uri: str) -> Callable[[], object]:
    """obstore plus SHA-256 and fsync of every file, which it does not do by itself."""
    return obstore(verb, folder, uri, hashed=True, synced=True)


def obstore(verb: str, folder: str, uri: str, *, hashed: bool = False, synced: bool = False) -> Callable[[], object]:
    """One call for a large file; threads for small ones, which take less time than its asynchronous functions do."""
    import obstore as library
    from obstore.store import S3Store

    bucket, prefix = _bucket(uri)
    made: set[str] = set()
    written: list[str] = []

    def put(store: S3Store, path: Path) -> None:
        key = f"{prefix}{str(path)[len(folder) :]}"
        if hashed and path.stat().st_size < LARGE:
            data = path.read_bytes()
            library.put(store, key, data, use_multipart=False)
            hashlib.sha256(data).hexdigest()
            return
        library.put(store, key, path, chunk_size=5 * MIB, max_concurrency=12)
        if hashed:
            _sha256(path)

    def get(store: S3Store, key: str, size: int) -> None:
        path = f"{folder}{key.removeprefix(prefix)}"
        if (parent := path.rpartition("/")[0]) not in made:
            os.makedirs(parent, exist_ok=True)  # noqa: PTH103 - pathlib is measurably slower for small files
            made.add(parent)
        total = hashlib.sha256()
        with open(path, "wb", buffering=0) as file:  # noqa: PTH123 - pathlib, as above
            result = library.get(store, key)
            for chunk in [result.bytes()] if size < LARGE else result.stream(min_chunk_size=MIB // 4):
                file.write(chunk)
                if hashed:
                    total.update(chunk)
        total.hexdigest()
        written.append(path)

    def sync(path: str) -> None:
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.close(file)

    def run() -> None:
        store = S3Store(bucket, client_options={"allow_http": True, "timeout": "10m"})
        if verb == "up":
            _all(partial(put, store), _files(folder), 32)
        else:
            found = [(meta["path"], meta["size"]) for batch in library.list(store, prefix=prefix) for meta in batch]
            _all(lambda each: get(store, *each), found, 32)
        if synced:
            _all(sync, written, 16)  # all at the end: a disk syncs several files in the time of one

    return run


def boto3(verb: str, folder: str, uri: str) -> Callable[[], object]:
    """Its transfer manager for large files; for small ones threads, since the manager takes twice as long for them."""
    import boto3 as library
    from boto3.s3.transfer import TransferConfig
    from botocore.config import Config

    bucket, prefix = _bucket(uri)
    settings = TransferConfig(multipart_threshold=LARGE, multipart_chunksize=16 * MIB, max_concurrency=8)

    def run() -> None:
        client = library.client("s3", config=Config(max_pool_connections=16))

        def put(path: Path) -> None:
            key = f"{prefix}/{path.relative_to(folder)}"
            if path.stat().st_size < LARGE:
                client.put_object(Bucket=bucket, Key=key, Body=path.read_bytes())
            else:
                client.upload_file(str(path), bucket, key, Config=settings)

        def get(key: str, size: int) -> None:
            path = _made(folder, key.removeprefix(f"{prefix}/"))
            if size < LARGE:
                path.write_bytes(client.get_object(Bucket=bucket, Key=key)["Body"].read())
            else:
                client.download_file(bucket, key, str(path), Config=settings)

        with ThreadPoolExecutor(16) as pool:
            if verb == "up":
                done = [pool.submit(put, path) for path in _files(folder)]
            else:
                pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=f"{prefix}/")
                found = [each for page in pages for each in page["Contents"]]
                done = [pool.submit(get, each["Key"], each["Size"]) for each in found]
        for each in done:
            each.result()

    return run


def s3fs(verb: str, folder: str, uri: str) -> Callable[[], object]:
    import s3fs as library  # type: ignore[import-not-found,import-untyped,unused-ignore]

    path = uri.removeprefix("s3://").rstrip("/")
    move, arguments = ("put", (f"{folder}/", f"{path}/")) if verb == "up" else ("get", (f"{path}/", f"{folder}/"))
    return lambda: getattr(library.S3FileSystem(), move)(*arguments, recursive=True)


def opendal(verb: str, folder: str, uri: str) -> Callable[[], object]:
    """The method of Kubeflow Trainer's initializers (``pkg/initializers/utils/opendal.py``), which only read."""
    import opendal as library  # type: ignore[import-not-found,import-untyped,unused-ignore]

    assert verb == "down"
    bucket, prefix = _bucket(uri)

    def run() -> None:
        operator = library.Operator(
            "s3",
            root="/",
            bucket=bucket,
            endpoint=os.environ["AWS_ENDPOINT_URL"],
            access_key_id=os.environ["AWS_ACCESS_KEY_ID"],
            secret_access_key=os.environ["AWS_SECRET_ACCESS_KEY"],
            region=os.environ["AWS_REGION"],
        ).layer(library.layers.RetryLayer(max_times=3, factor=2.0, jitter=True))
        for entry in operator.list(f"{prefix}/", recursive=True):
            if not entry.metadata.is_dir:
                data = operator.read(entry.path)
                with _made(folder, entry.path.removeprefix(f"{prefix}/")).open("wb") as file:
                    file.write(data)

    return run


def huggingface(verb: str, folder: str, uri: str) -> Callable[[], object]:
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    assert verb == "down"
    disable_progress_bars()
    return partial(snapshot_download, uri.removeprefix("hf://"), local_dir=folder)


def _all(work: Callable[[Any], object], items: Iterable[Any], threads: int) -> None:
    """Do ``work`` for each in threads that share one iterator: a future for each takes more time and memory."""
    waiting = iter(items)

    def take(_: int) -> None:
        for item in waiting:
            work(item)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(take, range(threads)))


def _bucket(uri: str) -> tuple[str, str]:
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    return bucket, prefix


def _files(folder: str) -> list[Path]:
    return [path for path in Path(folder).rglob("*") if path.is_file()]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _made(folder: str, relative: str) -> Path:
    """The path of a file; creates its directory."""
    path = Path(folder, relative)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


CLIENTS = {
    "trainjob": trainjob,
    "obstore": obstore,
    "obstore, SHA-256": obstore_and_sha256,
    "obstore, SHA-256, fsync": obstore_sha256_and_fsync,
    "boto3": boto3,
    "s3fs": s3fs,
    "opendal": opendal,
    "huggingface-hub": huggingface,
}


if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    measure(CLIENTS[name](*arguments))
