"""Input for the fuzzers: messages, HTTP requests, WebSocket frames and conversations, right, wrong or nearly right."""

from __future__ import annotations

import functools
import json
import random
import struct
import typing
from collections.abc import Callable
from dataclasses import is_dataclass
from typing import Any

from ftopt.sync.protocol import messages as m
from ftopt.sync.protocol.replica.machine import Replica

from .access import TOKEN, identity

WORDS = ["", "r0", "other", "training", "0" * 32, "\u2028", "\x00", "a" * 5000, "\\ud800", "../../x", "=" * 4, "AAAA"]
NUMBERS: list[Any] = [0, 1, -1, 2, 5, 63, 1 << 31, 1 << 40, 1 << 63, -(1 << 70), 1.5, -0.0, 1e308, 5e-324]
JUNK: list[Any] = [None, True, False, [], {}, [[]], {"a": 1}, *WORDS, *NUMBERS]
TEXTS = [
    "NaN",
    "Infinity",
    "-Infinity",
    "1e999",
    "[" * 2000,
    "{" * 2000,
    '"\\ud800"',
    "\ufeff",
    "9" * 5000,
    "//",
    "\x00",
]
KINDS = [*typing.get_args(m.FromReplica), *typing.get_args(m.FromCoordinator)]


hints_of = functools.cache(typing.get_type_hints)


@functools.cache
def shape_of(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    return typing.get_origin(kind), typing.get_args(kind)


def an_instance(kind: Any, chance: random.Random) -> Any:
    """A JSON value of that type."""
    if is_dataclass(kind) and isinstance(kind, type):
        return {name: an_instance(hint, chance) for name, hint in hints_of(kind).items()}
    origin, args = shape_of(kind)
    if origin is tuple and args[-1] is Ellipsis:
        return [an_instance(args[0], chance) for _ in range(chance.choice((0, 1, 1, 2, 5)))]
    if origin is tuple:
        return [an_instance(arg, chance) for arg in args]
    if origin is dict:
        return {chance.choice(WORDS[:5]): an_instance(args[1], chance) for _ in range(chance.randrange(3))}
    if args:
        return an_instance(chance.choice(args), chance)
    if kind is int:
        return chance.choice((0, 0, 1, 1, 2, 5, 7, 100, 1 << 40))
    values: dict[Any, Any] = {float: chance.choice((0.0, 1.0, 5.0, 2.5, 7)), bool: chance.random() < 0.5}
    return values.get(kind, None if kind is type(None) else chance.choice(WORDS[:5]))


def a_message(kind: type, chance: random.Random) -> dict[str, Any]:
    """A well-formed message, sensible or not, as a JSON object."""
    return {"type": kind.__name__, **an_instance(kind, chance)}


def spoil(value: Any, chance: random.Random) -> Any:
    """The value with one thing changed somewhere inside."""
    if isinstance(value, dict) and value and chance.random() < 0.8:
        key = chance.choice(list(value))
        changed = dict(value)
        match chance.randrange(4):
            case 0:
                del changed[key]
            case 1:
                changed[chance.choice(WORDS)] = changed.pop(key)
            case _:
                changed[key] = spoil(value[key], chance)
        return changed
    if isinstance(value, list) and value and chance.random() < 0.8:
        at = chance.randrange(len(value))
        match chance.randrange(3):
            case 0:
                return value[:at] + value[at + 1 :]
            case 1:
                return value[:at] + value[at : at + 1] * chance.choice((2, 3, 50)) + value[at:]
            case _:
                return [*value[:at], spoil(value[at], chance), *value[at + 1 :]]
    return chance.choice(JUNK)


def scribble(text: str, chance: random.Random) -> str:
    """The text with a piece cut out, doubled or overwritten."""
    a, b = sorted(chance.randrange(len(text) + 1) for _ in range(2))
    match chance.randrange(4):
        case 0:
            return text[:a] + text[b:]
        case 1:
            return text[:b] + text[a:]
        case 2:
            return text[:a] + chance.choice(TEXTS) + text[b:]
        case _:
            return text[:a] + chr(chance.choice((0, 34, 44, 58, 92, 0x7F, 0x2028, 0x1F600))) + text[a + 1 :]


def an_input(chance: random.Random) -> str:
    """A message's text: one in eight is left as it is, the others are broken in their values or as text."""
    message: Any = a_message(chance.choice(KINDS), chance)
    how = chance.randrange(8)
    for _ in range(chance.choice((1, 1, 2, 4)) if how > 2 else 0):
        message = spoil(message, chance)
    text = json.dumps(message).replace("\\\\ud800", "\\ud800")
    for _ in range(chance.choice((1, 1, 3)) if how in (1, 2, 3) else 0):
        text = scribble(text, chance)
    return text


def a_request(chance: random.Random) -> bytes:
    """Bytes that resemble an HTTP request, more or less."""
    method = chance.choice(("GET", "GET", "POST", "PUT", "HEAD", "OPTIONS", "CONNECT", "PRI", "G\x00T", "a" * 9000))
    path = chance.choice(
        ("/status", "/connect", "/", "*", "//", "/%ff", "/status?" + "a=" * 3000, "http://x/status", " ")
    )
    version = chance.choice(("HTTP/1.1", "HTTP/1.1", "HTTP/1.0", "HTTP/2.0", "HTTP/9", ""))
    lines = [f"{method} {path} {version}", "Host: x"]
    lines += chance.sample(
        [
            f"Authorization: Bearer {TOKEN}",
            f"Authorization: Bearer {TOKEN}",
            "Authorization: Bearer \xff\x00",
            "Upgrade: websocket",
            "Connection: Upgrade",
            "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
            "Sec-WebSocket-Key: x",
            "Sec-WebSocket-Version: 13",
            "Sec-WebSocket-Extensions: permessage-deflate; client_max_window_bits=99",
            "Content-Length: 5",
            "Content-Length: -1",
            "Content-Length: 99999999999999999999",
            "Transfer-Encoding: chunked",
            "Content-Encoding: deflate",
            "Expect: 100-continue",
            "X: " + "y" * 9000,
            ": empty",
            "no colon",
            *[f"X-{i}: y" for i in range(5)],
        ],
        chance.randrange(10),
    )
    data = "\r\n".join(lines).encode("latin-1") + chance.choice((b"\r\n\r\n", b"\r\n\r\n", b"\n\n", b"\r\n", b""))
    data += chance.choice((b"", b"hello", b"5\r\nhello\r\n0\r\n\r\n", b"ffffffffff\r\n", chance.randbytes(50)))
    for _ in range(chance.choice((0, 0, 1, 5))):
        at = chance.randrange(len(data))
        data = data[:at] + chance.randbytes(1) + data[at + 1 :]
    return data


def a_frame(chance: random.Random) -> bytes:
    """A WebSocket frame from a client, in order or not."""
    payload = chance.choice(
        (b"", b"{}", an_input(chance).encode("utf-8", "replace"), chance.randbytes(20), b"\xff\xfe")
    )
    first = chance.choice(
        (0x81, 0x81, 0x81, 0x82, 0x01, 0x00, 0x80, 0x88, 0x89, 0x8A, 0xC1, 0xF1, 0x83, chance.randrange(256))
    )
    size = len(payload) if chance.random() < 0.9 else chance.choice((0, 1, 125, 126, 65535, 1 << 31, (1 << 63) - 1))
    masked = 0x80 if chance.random() < 0.95 else 0
    if size < 126:
        head = struct.pack("!BB", first, masked | size)
    elif size < 1 << 16:
        head = struct.pack("!BBH", first, masked | 126, size)
    else:
        head = struct.pack("!BBQ", first, masked | 127, size)
    mask = chance.randbytes(4) if masked else b""
    body = bytes(byte ^ mask[i % 4] for i, byte in enumerate(payload)) if masked else payload
    return head + mask + body


FROM_REPLICA = typing.get_args(m.FromReplica)
LIES: list[Callable[[random.Random], dict[str, Any]]] = [
    lambda chance: {"incarnation": chance.choice((0, 1, 2, 7))},
    lambda chance: {"epoch": chance.choice((0, 1, 5, 5, 5, 5, 1 << 33))},
    lambda chance: {"replica": chance.choice(("a", "b", "c"))},
    lambda chance: {"fragments": chance.choice((1, 2, 3))},
    lambda chance: {"lines": {"model": chance.choice(("tiny", "other"))}},
    lambda chance: {"roster": [[chance.choice(("a", "b", "ghost")), chance.choice((1, 2, 9))]]},
    lambda chance: {"gone": [[chance.choice(("a", "b", "ghost")), chance.choice((1, 2, 9))]]},
    lambda chance: {"positions": [{"fragment": 0, "version": chance.choice((0, 3, 1 << 40)), "chain": "c" * 32}]},
    lambda chance: {"prepared": [{"fragment": 0, "attempt": 1, "version": 1, "digest": "d"}]},
    lambda chance: {"contributions": [an_instance(m.Contribution, chance) | {"fragment": 0}]},
    lambda chance: {
        "settings": {chance.choice(("start_s", "min_replicas", "x")): chance.choice((0.001, 1, "x", None))}
    },
    lambda chance: {"initial": chance.choice(("", "i", "j"))},
    lambda chance: {"inner_step": chance.choice((0, 5, 1 << 40))},
    lambda chance: {"samples": {"samples": 40, "batch_size": 4, "epochs": chance.choice((None, 1))}, "wants": 5},
    lambda chance: {"claim": [[chance.choice((0, 3, 9)), chance.choice((3, 12, 1 << 40))]], "wants": 7},
    lambda chance: {"done": [[0, chance.choice((3, 40))]], "cursor": chance.choice((0, 50, 1 << 50))},
]


def a_conversation(job: str, chance: random.Random) -> list[str]:
    """A hello, true but for a few lies, and well-formed messages in any order."""

    # Mostly what the coordinator machine gets to see; the parser has tests of its own.
    hello = json.loads(m.encode(Replica(identity(job, chance.choice("abc"))).hello()))
    for lie in chance.sample(LIES, chance.choice((0, 0, 1, 2, 4))):
        hello |= lie(chance)
    kinds = [chance.choice(FROM_REPLICA[1:]) for _ in range(chance.choice((0, 3, 10)))]
    return [json.dumps(hello), *(json.dumps(sensible(a_message(kind, chance), chance)) for kind in kinds)]


def sensible(value: Any, chance: random.Random) -> Any:
    """The message with values that make sense, most of the time."""
    if chance.random() < 0.02:
        return value
    match value:
        case {"steps": _}:
            steps = chance.choice((0, 5, 5))
            wrong = {"fragment": 0, "steps": steps, "last_step": chance.choice((5, 10)), "weight": float(steps)}
            ranges = chance.choice(([], [], [[0, 5]], [[2, 3], [5, 9]]))
            return value | wrong | {"version": chance.choice((0, 0, 1, 2)), "finite": True, "ranges": ranges}
        case {"fragment": _}:
            return value | {"fragment": 0}
        case {"type": "StoreSet"}:
            return value | {"value": "AAAA"}
        case dict():
            return {key: sensible(part, chance) for key, part in value.items()}
    return value
