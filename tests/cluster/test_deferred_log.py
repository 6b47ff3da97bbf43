"""The log of a training on the real node that draws a progress bar, while it is drawn."""

from __future__ import annotations

import re
from contextlib import aclosing

import anyio
import pytest
from tests.testcluster import images

from trainjob import Phase, TrainJobSpec
from trainjob._backends.kubernetes.backend import KubernetesBackend
from trainjob._jobs.cancellation import cancel
from trainjob._jobs.launching import launch
from trainjob.status import observe

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

# A progress bar as tqdm draws it, which never ends its line. containerd passes such a line on in parts of 16 KiB, which
# this bar fills in 3 s. SIGTERM ends the process: the first process of a container would otherwise ignore it for 30 s.
TRAINING = r"""
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
for step in range(100_000):
    sys.stdout.write(f"\r  7%|{'#' * 40}{' ' * 60}| step {step:06}/100000 [00:12<02:31,  6.61it/s, loss=0.25]")
    sys.stdout.flush()
    time.sleep(0.02)
"""
STATE = re.compile(r".* step (\d{6})/100000 \[.*loss=0\.25\]")


async def test_a_progress_bar_is_in_the_log_while_it_is_drawn(backend: KubernetesBackend, real_namespace: str) -> None:
    spec = {"runtime": "torch-distributed", "image": images.PYTHON, "command": ["python3", "-c", TRAINING]}
    ref = await launch(backend, TrainJobSpec.parse(spec), "bar", namespace=real_namespace)
    shown: list[int] = []
    with anyio.fail_after(200):
        async with aclosing(backend.logs(ref, follow=True)) as lines:
            async for line in lines:
                assert "\r" not in line.text
                shown += [int(step) for step in STATE.findall(line.text)]
                if len(shown) == 3:
                    break
    assert shown == sorted(set(shown)), "each state is newer than the one before"
    assert observe(await backend.get(ref.namespace, ref.name)).phase is Phase.RUNNING
    await cancel(backend, ref)
