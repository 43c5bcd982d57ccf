"""Nested values come back as they were, bit for bit."""

from __future__ import annotations

import contextlib
import json
import math
import random
import struct
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ftopt.common.rng import get_rng_state, set_rng_state
from ftopt.common.tree import flatten, unflatten
from ftopt.common.tree_kinds import KINDS
from ftopt.errors import UserError

TENSORS = ["tensor", "bits", "sparse", "compressed", "subclass", "parameter"]
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5)
KEYS = st.text(max_size=3) | st.integers(-3, 3)
TREES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(KEYS, inner, max_size=3)
    ),
    max_leaves=10,
)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, float):
        alike = isinstance(b, float) and struct.pack("d", a) == struct.pack("d", b)
        return alike or (math.isnan(a) and math.isnan(b))
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    return type(a) is type(b) and bool(a == b)


@given(TREES)
def test_what_is_encoded_comes_back(value: Any) -> None:
    tensors: dict[str, Tensor] = {}
    assert same(unflatten(flatten(value, tensors), tensors), value)


@given(kind=st.sampled_from([*KINDS, *TENSORS, "other"]), body=JSON)
def test_anything_else_is_refused_as_such(kind: str, body: Any) -> None:
    """JSON of any shape is decoded or is a ValueError."""
    with contextlib.suppress(ValueError):
        unflatten({f"${kind}": body}, {})


def test_tensors_go_beside_it_under_their_paths() -> None:
    value = {"a": [torch.ones(2, dtype=torch.bfloat16), {"b": torch.tensor(3)}], 7: (torch.zeros(0),)}
    tensors: dict[str, Tensor] = {}
    encoded = flatten(value, tensors)
    assert set(tensors) == {"a.0", "a.1.b", "7.0"}
    assert same(unflatten(encoded, tensors), value)


def test_what_has_no_place_is_named() -> None:
    with pytest.raises(UserError, match=r"loader\.sampler is a function, which a checkpoint cannot hold"):
        flatten({"loader": {"sampler": lambda: 0}}, {})


def test_a_number_of_any_length_comes_back() -> None:
    """Python writes no decimal number of more than 4,300 digits."""
    assert unflatten(json.loads(json.dumps(flatten(10**5_000, {}))), {}) == 10**5_000


def test_random_number_generators_come_back() -> None:
    before = get_rng_state()
    tensors: dict[str, Tensor] = {}
    state = unflatten(flatten(before, tensors), tensors)
    first = torch.rand(3), random.random(), numpy.random.rand()
    set_rng_state(state)
    second = torch.rand(3), random.random(), numpy.random.rand()
    assert torch.equal(first[0], second[0]) and first[1:] == second[1:]
