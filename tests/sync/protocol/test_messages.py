"""Messages: what is encoded comes back, and whatever is no message is refused with the field that is wrong."""

from __future__ import annotations

import json
import random
import typing
from dataclasses import MISSING, fields
from typing import Any

import pytest

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.samples import Samples

CONTRIBUTION = m.Contribution(0, 3, 5, 25, 5.0, 1000, 0.5, True, ((0, 8), (16, 24)))
POSITION = m.Position(0, 3, "c" * 32)
HELLO = m.Hello(
    protocol=m.PROTOCOL,
    job="j",
    replica="r0",
    incarnation=2,
    rank=0,
    size=1,
    epoch=4,
    address="http://10.0.0.1:5",
    initial="",
    fragments=1,
    lines={"model": "28 tensors"},
    settings={"grace_s": 2.0, "min_replicas": 1, "codec": "fp32", "start_replicas": None},
    positions=(POSITION,),
    contributions=(CONTRIBUTION,),
    prepared=(m.PreparedAttempt(0, 4000001, 4, "d"),),
    roster=(("r0", 2), ("r1", 1)),
    gone=(("r0", 1),),
    inner_step=75,
    samples=Samples(samples=100, batch_size=4, drop_last=True, epochs=2),
    claim=((10, 20), (40, 41)),
    done=((0, 8),),
    cursor=1024,
    wants=30,
    checkpoint=POSITION,
)
SAMPLES: list[m.FromReplica | m.FromCoordinator] = [
    HELLO,
    m.Propose(CONTRIBUTION, True, 30),
    m.Prepared(0, 7, "d"),
    m.Failed(0, 7, "no piece for 3 s", "r1"),
    m.Heartbeat("training", 10, 0.25, (m.Reading(0, 3, (1.0, -2.5)),)),
    m.Heartbeat("training", 10, 0.25, loss=-2.5),
    m.Heartbeat("training", 10, 0.25, counts=m.Counts(10, 2, {"nonfinite": 3}, 1.5, 4096)),
    m.Heartbeat("training", 10, 0.25, loss="nan"),
    m.Holds(POSITION),
    m.Lacks(0),
    m.Ask(12),
    m.Copied(3, (7, 6)),
    m.Keeps(("a", 1), 3),
    m.KeepFailed(("r1", 1), 3, "it was damaged on its way"),
    m.Finished(),
    m.Kept(3, "r2", "it was damaged on its way"),
    m.JobFailed("r1", 1, "it does not answer for 3 s", 57, (2, 1), 40, 1.7e9),
    m.Keep(("a", 1), 3, "http://h:1"),
    m.Inherit(("a", 1), ((3, 9),), "http://h:1", 47),
    m.StopJob("it is good enough", "r0"),
    m.AtEnd(300, 20.0, ("r1",)),
    m.Leaving(),
    m.Bye(),
    m.StoreSet("k", "dmFsdWU="),
    m.StoreGet("k"),
    m.Welcome(4, 2, (("r0", 2),), (("r0", 1),)),
    m.Refuse("gone", "superseded"),
    m.Hold("waiting"),
    m.Start(POSITION, 0, ((0, 8),)),
    m.Restore(3),
    m.Behind(POSITION, ("http://10.0.0.2:5",), True),
    m.RosterUpdate((("r2", 1),), ()),
    m.CallIn(0, 4),
    m.Speed(True, 5.0, 1.0, 0.2, 1.0, 12.5, True),
    m.Means(0, 3, 2, (1.5, -2.0)),
    m.TrainOn(0),
    m.Void(0),
    m.Quorum(0, 4, 7, 7, 0, 2, 25, 10.0, 2, 5, (("r0", 2), ("r1", 1)), (), (("r0", 1),), "", ((0, 8),)),
    m.Abort(0, 7, "r1 was lost"),
    m.Commit(0, 4, 7, "d", "c" * 32),
    m.Grant(((0, 30),), 1024, False),
    m.Plan(8, 1_000_003, ((48, 50), (52, 53)), False),
    m.Promote("r1"),
    m.JobStopped("it is good enough", "r0"),
    m.End((m.Position(0, 4, "c" * 32),), ("r0", "r1"), ("r2",), ("r3",), False),
    m.Over("nobody trains any more"),
    m.StoreValue("k", "dmFsdWU="),
]


def test_every_message_type_has_a_sample() -> None:
    known = {*typing.get_args(m.FromReplica), *typing.get_args(m.FromCoordinator)}
    assert {type(x) for x in SAMPLES} == known


@pytest.mark.parametrize("message", SAMPLES, ids=lambda x: type(x).__name__)
def test_what_is_encoded_comes_back(message: m.FromReplica | m.FromCoordinator) -> None:
    text = m.encode(message)
    assert m.decode(text) == message
    assert json.loads(text)["type"] == type(message).__name__


@pytest.mark.parametrize("message", SAMPLES, ids=lambda x: type(x).__name__)
def test_missing_and_unknown_fields_are_named(message: m.FromReplica | m.FromCoordinator) -> None:
    kind = type(message).__name__
    data = json.loads(m.encode(message))
    with pytest.raises(m.MessageError, match=f"{kind}: unknown field 'extra'"):
        m.decode(json.dumps(data | {"extra": 1}))
    for field in fields(message):
        if field.default is not MISSING:
            continue
        with pytest.raises(m.MessageError, match=f"{kind}: field '{field.name}' is missing"):
            m.decode(json.dumps({k: v for k, v in data.items() if k != field.name}))


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "a message is a JSON object, got list"),
        ("{}", "unknown message type None"),
        ('{"type": "Contribution"}', "unknown message type 'Contribution'"),
        ('{"type": ["Bye"]}', "unknown message type"),
        ('{"type": "Lacks", "fragment": "0"}', "Lacks.fragment: int is needed, got str"),
        ('{"type": "Lacks", "fragment": true}', "Lacks.fragment: int is needed, got bool"),
        ('{"type": "Lacks", "fragment": 0.0}', "Lacks.fragment: int is needed, got float"),
        ('{"type": "Lacks", "fragment": NaN}', "not JSON"),
        ('{"type": "Holds", "position": []}', "Holds.position: an object is needed, got list"),
        ('{"type": "Holds", "position": {"fragment": 0}}', "Holds.position: field 'chain' is missing"),
        ('{"type": "RosterUpdate", "known": [["a"]], "gone": []}', "RosterUpdate.known: 2 values are needed, got 1"),
        ('{"type": "RosterUpdate", "known": {}, "gone": []}', "RosterUpdate.known: a list is needed, got dict"),
        (
            '{"type": "Heartbeat", "state": "t", "inner_step": 1, "step_s": 1e999}',
            "Heartbeat.step_s: a finite number is needed",
        ),
        (
            '{"type": "Heartbeat", "state": "t", "inner_step": 1, "step_s": 1, "loss": "NaN"}',
            "Heartbeat.loss: 'NaN'; must be a number, 'nan', 'inf' or '-inf'",
        ),
        (
            '{"type": "Heartbeat", "state": "t", "inner_step": 1, "step_s": 1, "loss": 1e31}',
            "Heartbeat.loss: 1e+31; must be from -1e+30 to 1e+30",
        ),
    ],
)
def test_an_error_says_what_is_wrong(text: str, error: str) -> None:
    with pytest.raises(m.MessageError) as info:
        m.decode(text)
    assert error in str(info.value)


def test_a_whole_number_passes_for_a_float() -> None:
    decoded = m.decode('{"type":"Heartbeat","state":"training","inner_step":1,"step_s":2}')
    assert decoded == m.Heartbeat("training", 1, 2.0)


def test_fuzzed_texts_are_messages_or_message_errors() -> None:
    seed = 11
    rng = random.Random(seed)
    texts = [m.encode(x) for x in SAMPLES]
    for _ in range(3000):
        text = rng.choice(texts)
        try:
            m.decode(_garble(rng, text) if rng.random() < 0.5 else json.dumps(_twist(rng, json.loads(text))))
        except m.MessageError as error:
            assert len(str(error)) < 1000, f"seed {seed}"


def _garble(rng: random.Random, text: str) -> str:
    """Some characters gone, doubled or replaced."""
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(text) + 1)
        text = text[:at] + rng.choice(["", '"', "{", "}", "[", ",", "9", "\x00", "é", "null"]) + text[at + 1 :]
    return text


def _twist(rng: random.Random, data: Any) -> Any:
    """One value replaced by one of another kind, somewhere inside."""
    if rng.random() < 0.3 or not isinstance(data, dict | list) or not data:
        return rng.choice([None, True, -1, 2**70, 1e300, "x", [], {}, [["a", 1]], {"type": "Bye"}])
    if isinstance(data, dict):
        key = rng.choice(sorted(data))
        return data | {key: _twist(rng, data[key])}
    at = rng.randrange(len(data))
    return [*data[:at], _twist(rng, data[at]), *data[at + 1 :]]
