from __future__ import annotations

import torch

from ftopt.job.harm import corrupt


def _spoilt(how: str, size: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    clean = torch.randn(100_000)
    corrupted = clean.clone()
    corrupt([corrupted], how, size, torch.Generator().manual_seed(1))
    return clean, corrupted


def test_noise_has_the_variance_it_was_given() -> None:
    clean, corrupted = _spoilt("noise", 0.01)
    assert abs(float((corrupted - clean).var()) / 0.01 - 1) < 0.03


def test_one_bit_of_one_element_flips() -> None:
    clean, corrupted = _spoilt("bit")
    changed = (clean.view(torch.int32) ^ corrupted.view(torch.int32)).nonzero()
    assert len(changed) == 1
    difference = int((clean.view(torch.int32) ^ corrupted.view(torch.int32))[changed[0]]) & 0xFFFFFFFF
    assert difference.bit_count() == 1


def test_an_element_is_stuck_and_all_are_biased() -> None:
    clean, corrupted = _spoilt("stuck", 7.0)
    assert float(corrupted[0]) == 7.0 and torch.equal(clean[1:], corrupted[1:])
    clean, corrupted = _spoilt("bias", 0.5)
    torch.testing.assert_close(corrupted, clean + 0.5)
