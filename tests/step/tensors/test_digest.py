from __future__ import annotations

import pytest
import torch

from ftopt.step.tensors.digest import BLOCK_BYTES, block_sums, damage, digest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
@pytest.mark.parametrize("elements", [0, 1, 7, 16_384, 40_003])
def test_any_flipped_bit_changes_the_digest_and_its_block_is_named(dtype: torch.dtype, elements: int) -> None:
    tensor = torch.arange(elements).to(dtype)
    good = digest({"a": tensor, "b": torch.ones(3)})
    size = elements * tensor.element_size()
    assert block_sums(tensor).numel() == -(-size // BLOCK_BYTES)
    for place in {0, size // 2, size - 1} if size else ():
        damaged = tensor.clone()
        damaged.view(torch.uint8)[place] ^= 1 << (place % 8)
        assert digest({"a": damaged, "b": torch.ones(3)}) != good
        block = BLOCK_BYTES // tensor.element_size()
        start = place // BLOCK_BYTES * block
        assert damage(damaged, block_sums(tensor)) == [slice(start, start + block)]


def test_the_order_of_names_does_not_matter_and_names_shapes_and_dtypes_do() -> None:
    a, b = torch.ones(6), torch.zeros(6)
    assert digest({"a": a, "b": b}) == digest({"b": b, "a": a})
    others = [{"a": b, "b": a}, {"a": a.view(2, 3), "b": b}, {"a": a.view(torch.int32), "b": b}, {"a": a}]
    assert len({digest({"a": a, "b": b}), *(digest(other) for other in others)}) == 5


def test_views_and_transposes_have_the_digest_of_their_values() -> None:
    base = torch.randn(101, 7)
    for view in (base[:, 1:], base.t(), base.reshape(-1)[3:500]):
        assert digest({"a": view}) == digest({"a": view.clone().contiguous()})
