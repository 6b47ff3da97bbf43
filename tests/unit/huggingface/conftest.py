from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
from tests.fakes.hub import Hub
from tests.serving import serving

from trainjob._support import retrying


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub whose URL is in the environment, without pauses between retries and without the Xet protocol."""
    from huggingface_hub import close_session, constants

    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(retrying, "TRANSFER", partial(retrying.TRANSFER, first_pause=0.002))
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with serving(Hub()) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server
        close_session()
