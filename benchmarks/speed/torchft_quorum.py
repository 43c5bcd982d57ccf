"""torchft's counterpart of a round with an empty payload: its quorum, and its vote on the commit."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from datetime import timedelta
from typing import Any

from benchmarks.speed.orders import obey


def main() -> None:
    """One replica group of one rank."""
    os.environ["RUST_LOG"] = "error"  # it tells of every message otherwise
    import torch.distributed as dist
    from torchft.manager import Manager
    from torchft.process_group import ProcessGroupGloo

    rank, size, house = json.loads(sys.argv[1])
    logging.disable(logging.INFO)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=60)),
        load_state_dict=lambda state: None,
        state_dict=dict,
        min_replica_size=size,
        use_async_quorum=False,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=house,
        replica_id=f"theirs-{rank}",
        init_sync=False,
    )

    def rounds(verb: str, count: int) -> dict[str, Any]:
        taken_s = []
        for _ in range(count):
            start = time.monotonic()
            manager.start_quorum(allow_heal=False)
            manager.should_commit()
            taken_s.append(time.monotonic() - start)
        return {"taken_s": taken_s}

    obey(rounds)


if __name__ == "__main__":
    main()
