"""What a message may hold. Beyond it a connection is closed, and nothing else happens."""

from __future__ import annotations

MAX_MESSAGE_BYTES = 4 << 20
"""Bytes of a message: a hello of 1024 fragments whose roster and gone incarnations are full has 3 MiB."""
MAX_NAME = 128
"""Characters of a job's name and of a replica's id. A host name has 64 at most, and a process id follows it."""
MAX_WORD = 256
"""Characters of a digest, a chain, an address, a state."""
MAX_TEXT = 4096
"""Characters of a reason, or of a line that must agree among the replicas."""
MAX_LINES = 256
"""Lines that must agree; a method has about ten settings."""
MAX_FRAGMENTS = 1024
"""Fragments of a job. Each costs the coordinator a few KiB, and a look at each message; papers use up to 50."""
MAX_REPLICAS = 4096
"""Replicas of a job that are known at a time. A job of ten thousand nodes has islands of several."""
MAX_GONE = 1 << 15
"""Gone incarnations in a message; each is an id that was used once."""
MAX_RANKS = 4096
"""Ranks of a replica."""
MAX_RANGES = 1 << 10
"""Sample ranges of a contribution, and of all that a replica holds: it has a few."""
MAX_DONE = 1 << 14
"""Ranges of the units that are done: holes are what a job of 4096 replicas holds."""
MAX_UNIT = 1 << 52
"""Units of a job: what is granted stays below `MAX_INT`."""
MAX_BATCH = 1 << 14
"""Units of a global batch: sharing them out among replicas of unlike speed takes 10 ms."""
MAX_WANTS = 1 << 30
"""Units that a replica asks for."""
MAX_VALUES = 8
"""Numbers in a reading."""
MAX_READING = 1e150
"""Size of such a number: that of a sum of squares of fp32 parameters, and sums of 4096 of them are finite."""
MAX_KEY = 512
"""Characters of a rendezvous key: job, fragment, attempt and rank."""
MAX_VALUE = 1 << 20
"""Characters of a rendezvous value: 200 bytes for each of 4096 members, in base64."""
MAX_INT = (1 << 53) - 1
"""Any integer: what JSON carries exactly everywhere, and SQLite stores."""
MAX_STEPS = 1 << 40
"""Inner steps, versions, incarnations: 35 years of a thousand a second."""
MAX_EPOCH = 1 << 33
"""Epochs count from the seconds since 1970: good until 2242. A million attempt numbers each stay below `MAX_INT`."""
MAX_WEIGHT = 1e24
"""A weight: a trillion tokens times a trillion tokens a step."""
MAX_STEP_S = 3600.0
"""Seconds of an inner step: a call-in waits two of them."""
MAX_OVERLAP_S = 1e9
"""Seconds that a replica trains on without a result; the grace is bounded apart from that."""
MAX_GRACE = 1e6
"""Gamma of the adaptive grace."""

HISTORY = 1000
"""Decisions of a fragment that are kept: enough to tell a fork from lateness."""


def wrong_name(name: str) -> str:
    """Why ``name`` can be no job's or replica's, "" when it can."""
    if not name:
        return "it is empty"
    if len(name) > MAX_NAME:
        return f"it has {len(name)} characters; at most {MAX_NAME} are allowed"
    if not name.isprintable():
        return "it holds characters that cannot be printed"
    return ""
