from __future__ import annotations

import torch

from ftopt.codecs import FP32


def test_fp32_loses_nothing_not_even_the_sign_of_zero() -> None:
    piece = torch.tensor([1.5, -0.0, float("inf"), 1e-45, float("nan")])
    encoded = FP32().encode(piece)
    assert encoded.dtype == torch.uint8 and encoded.numel() == FP32().encoded_bytes(5) == 20
    decoded = FP32().decode(encoded, torch.empty(5))
    assert torch.equal(decoded.view(torch.int32), piece.view(torch.int32))
