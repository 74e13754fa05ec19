"""How fast blocks move between two processes: `python -m tests.transfer.bench_transfer [BLOCK_BYTES]`

Scattered ids, digests verified, from `fetch` to `held`. Prints the best and the median of the rounds.
"""

import statistics
import subprocess
import sys
import time

import anyio
import msgspec

from services.transfer import Region
from shared.ids import RequestId
from shared.messages import Endpoint
from tests.transfer.source_process import block_ids
from tests.transfer.test_two_processes import make_reader, make_ref
from tests.transfer.world import ATTEMPT

NUM_BLOCKS = 320
SIZES = (16, 64, 256)
ROUNDS = 9


async def measure(transport: str, endpoint: Endpoint, region: Region) -> None:
    reader = make_reader(region, transport)
    async with anyio.create_task_group() as tg:
        await tg.start(reader.serve)
        number = 0
        for size in SIZES:
            seconds = []
            for round_ in range(ROUNDS + 1):
                request = RequestId(f"r{number}")
                dest = block_ids(size, NUM_BLOCKS, seed=1000 + number)
                start = time.perf_counter()
                fetched = await reader.fetch(make_ref(endpoint, request), request, 1, ATTEMPT, dest)
                if round_:  # the first touches the pages
                    seconds.append(time.perf_counter() - start)
                assert fetched.num_blocks_read == size
                number += 1
            num_bytes = size * region.block_bytes
            best, median = min(seconds), statistics.median(seconds)
            print(
                f"{transport} {size:4d} blocks {num_bytes / 1e6:7.1f} MB: best {best * 1e3:7.2f} ms "
                f"{num_bytes / best / 1e9:5.2f} GB/s, median {median * 1e3:7.2f} ms"
            )
        tg.cancel_scope.cancel()


def main() -> None:
    block_bytes = int(sys.argv[1]) if len(sys.argv) > 1 else 737_280
    counts = [size for size in SIZES for _ in range(ROUNDS + 1)]
    for transport in ("shm", "tcp"):
        region = Region.create(NUM_BLOCKS, block_bytes)
        region.buffer[:] = bytes(len(region.buffer))
        command = [sys.executable, "-m", "tests.transfer.source_process", str(NUM_BLOCKS), str(block_bytes)]
        with subprocess.Popen([*command, *map(str, counts)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            endpoint = msgspec.json.decode(process.stdout.readline(), type=Endpoint)
            anyio.run(measure, transport, endpoint, region)
        region.close()


if __name__ == "__main__":
    main()
