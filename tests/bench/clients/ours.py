"""``trainjob wait --stdin`` with a ticker on its event loop. ``ours.py TICKS [OPTION]...``

Every 5 ms the ticker records its delay and the CPU time that the loop has used since the last tick. A blocked loop
delays the ticker; on a busy machine only the CPU time is caused by the loop. Values above 1 ms are written to the file
TICKS, as Unix time, seconds of delay and seconds of CPU time.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

from trainjob.cli import main
from trainjob.cli.many import ManyWaits

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


class Ticking(ManyWaits):
    async def run(self) -> int:
        ticker = asyncio.create_task(tick(Path(sys.argv[1])))
        try:
            return await super().run()
        finally:
            ticker.cancel()


if __name__ == "__main__":
    sys.modules[ManyWaits.__module__].ManyWaits = Ticking  # type: ignore[attr-defined]
    main(["wait", "--stdin", *sys.argv[2:]])
