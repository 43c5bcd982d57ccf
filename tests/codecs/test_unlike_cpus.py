from __future__ import annotations

import os
import subprocess
import sys

import pytest

_PROGRAM = """
import hashlib, torch
from ftopt.codecs import codec_named
chance = torch.Generator().manual_seed(0)
anything = torch.randint(-2**31, 2**31, (50_001,), generator=chance).int().view(torch.float32)
anything[~anything.isfinite()] = 0
whole = torch.randint(-9999, 9999, (50_001,), generator=chance).float()
bits = hashlib.sha256()
for spec in ("bf16", "int8", "fp4", "top_k:0.01:4", "top_k:0.03:2", "top_k:0.2:8"):
    for x in (anything, whole):
        encoded = codec_named(spec).encode(x)
        bits.update(encoded.numpy().tobytes())
        bits.update(codec_named(spec).decode(encoded, torch.empty_like(x)).numpy().tobytes())
print(torch.backends.cpu.get_cpu_capability(), bits.hexdigest())
"""


@pytest.mark.long
def test_unlike_cpus_encode_and_decode_to_the_same_bits() -> None:
    lines = []
    for capability in ("default", "avx2"):
        environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability, "OMP_NUM_THREADS": "1"}
        run = subprocess.run(
            [sys.executable, "-c", _PROGRAM], env=environment, capture_output=True, text=True, check=True, timeout=110
        )
        lines.append(run.stdout.split())
    if len({line[0] for line in lines}) == 1:
        pytest.skip(f"this machine has one CPU capability only: {lines[0][0]}")
    assert len({line[-1] for line in lines}) == 1, lines
