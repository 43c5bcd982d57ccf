"""The one fork server of all tests. It has loaded what the processes need: four start in 35 ms instead of seconds.

One for all: whoever sets the list of what is loaded last decides it for everybody.
"""

from __future__ import annotations

import multiprocessing

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "torch",
        "torch._dynamo",  # an inner optimizer imports it: seconds for each process
        "torch.distributed",
        "tests.sync.processes",
        "tests.transport.helpers",
        "ftopt.transport.gloo",
        "ftopt.sync.client",
        "aiohttp",
    ]
)
