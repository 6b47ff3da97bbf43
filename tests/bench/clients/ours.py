"""``trainjob wait NAME...`` with a ticker on its event loop. ``ours.py TICKS [OPTION]...``; reads the names from stdin.

Every 5 ms the ticker records its delay and the CPU time that the loop has used since the last tick. A blocked loop
delays the ticker; on a busy machine only the CPU time is caused by the loop. Values above 1 ms are written to the file
TICKS, as Unix time, seconds of delay and seconds of CPU time.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from trainjob.cli import main, run
from trainjob.cli.many import wait_for_many
from trainjob.cli.session import Session
from trainjob.wait_options import WaitOptions

TICK = 0.005
WORTH_NOTING = 0.001


async def tick(ticks: Path) -> None:
    loop = asyncio.get_running_loop()
    with ticks.open("w", buffering=1) as file:
        while True:
            due, busy = loop.time() + TICK, time.thread_time()
            await asyncio.sleep(TICK)
            late, used = loop.time() - due, time.thread_time() - busy
            if max(late, used) > WORTH_NOTING:
                file.write(f"{time.time():.6f}\t{late:.6f}\t{used:.6f}\n")


async def ticking(session: Session, given: Sequence[tuple[str, str]], options: WaitOptions) -> int:
    ticker = asyncio.create_task(tick(Path(sys.argv[1])))
    try:
        return await wait_for_many(session, given, options)
    finally:
        ticker.cancel()


if __name__ == "__main__":
    run.wait_for_many = ticking  # type: ignore[attr-defined]  # replaces a name that run imports
    names = sys.stdin.read().split()
    # The name of one job, twice, is waited for like many.
    main(["wait", *sys.argv[2:], *names, *names[:1]])
