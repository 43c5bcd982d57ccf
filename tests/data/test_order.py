"""The order of samples: a permutation an epoch, without a list, the same on every machine."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from ftopt.data.order import BLOCK, MAX_SAMPLES, Indices, Order

GOLDEN_10 = [8, 7, 9, 1, 6, 3, 4, 2, 5, 0]
GOLDEN_BIG = [953526726974, 365352836726, 374368906323, 104676273313]


def whole(samples: int, *, seed: int, epoch: int = 0) -> Indices:
    return Order(samples, seed=seed).indices(epoch, range(samples))


SOME = [*range(1, 1000), *range(1000, 5001, 13)]


@pytest.mark.parametrize("sizes", [SOME, pytest.param(range(1, 5001), marks=pytest.mark.slow)], ids=["some", "all"])
def test_each_epoch_is_a_permutation(sizes: Iterable[int]) -> None:
    for samples in sizes:
        found = Order(samples, seed=samples).at(samples % 3, np.arange(samples))
        assert np.array_equal(np.bincount(found, minlength=samples), np.ones(samples, np.int64)), samples


@pytest.mark.parametrize("samples", [10**9 + 7, 2**32, 2**32 + 1, 3**30, 2**53 + 1, MAX_SAMPLES])
def test_billions_of_samples_have_no_two_positions_in_common(samples: int) -> None:
    order = Order(samples, seed=3)
    positions = np.unique(
        np.concatenate(
            [np.arange(20_000), samples - 1 - np.arange(20_000), np.linspace(0, samples - 1, 20_000).astype(np.int64)]
        )
    )
    positions = positions[(positions >= 0) & (positions < samples)]
    found = order.at(7, positions)
    assert found.min() >= 0 and found.max() < samples
    assert len(np.unique(found)) == len(positions)
    assert abs(found.mean() / samples - 0.5) < 0.01  # of 60,000 uniform ones: a standard deviation of 0.0012


def test_the_order_is_the_same_on_every_machine() -> None:
    assert whole(10, seed=0).tolist() == GOLDEN_10
    assert Order(10**12, seed=7).indices(5, range(3_000_000_000, 3_000_000_004)).tolist() == GOLDEN_BIG


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = [whole(1000, seed=seed, epoch=epoch) for seed in (0, 1) for epoch in (0, 1, 2)]
    for i, one in enumerate(orders):
        for other in orders[:i]:
            assert np.mean(one == other) < 0.02


def test_all_orders_of_four_samples_are_equally_likely() -> None:
    seeds, orders = 4800, 24
    seen = np.zeros(256)
    for seed in range(seeds):
        seen[whole(4, seed=seed) @ (64, 16, 4, 1)] += 1
    expected = seeds / orders
    assert np.count_nonzero(seen) == orders
    assert np.sum((seen[seen > 0] - expected) ** 2) / expected < 49.7  # chi-square, 23 degrees of freedom, p = 0.001


def test_the_samples_at_two_positions_are_independent() -> None:
    """Over many seeds, 100 samples in ten bins: a table of 10 x 10 counts against what a fair shuffle gives."""
    seeds, samples, bins = 3000, 100, 10
    pairs = [(0, 1), (0, 11), (5, 6)]
    seen = np.zeros((len(pairs), bins, bins))
    for seed in range(seeds):
        found = whole(samples, seed=seed) // 10
        for table, (one, other) in zip(seen, pairs, strict=True):
            table[found[one], found[other]] += 1
    expected = np.full((bins, bins), 100.0) - np.diag(np.full(bins, 10.0))
    expected *= seeds / (samples * (samples - 1))
    for pair, table in zip(pairs, seen, strict=True):
        assert np.sum((table - expected) ** 2 / expected) < 149, pair  # 99 degrees of freedom, p = 0.001


def test_neighbours_in_the_data_are_no_neighbours_in_the_order() -> None:
    found = whole(100_000, seed=11)
    assert abs(np.corrcoef(found[:-1], found[1:])[0, 1]) < 0.015
    assert np.mean(np.abs(np.diff(found)) == 1) < 1e-4


def test_parts_of_the_order_are_the_whole_one_s() -> None:
    order, size = Order(5 * BLOCK + 17, seed=1), 5 * BLOCK + 17
    everything = order.at(2, np.arange(size))
    rng = np.random.default_rng(0)
    for start, stop in np.sort(rng.integers(0, size + 1, (200, 2)), axis=1):
        assert np.array_equal(order.indices(2, range(start, stop)), everything[start:stop])
    assert order.indices(2, range(5, 5)).size == 0


@pytest.mark.parametrize("positions", [range(-1, 3), range(8, 11), range(4000, 4002)])
def test_positions_outside_of_an_epoch_are_no_samples(positions: range) -> None:
    with pytest.raises(IndexError, match="an epoch of 10 samples"):
        Order(10, seed=0).indices(0, positions)


@pytest.mark.parametrize("samples", [0, -1, MAX_SAMPLES + 1])
def test_a_size_out_of_range_is_refused(samples: int) -> None:
    with pytest.raises(ValueError, match="must be 1 to"):
        Order(samples, seed=0)
