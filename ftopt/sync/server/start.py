"""The number of replicas that a coordinator's new jobs start with, where their scripts do not say it."""

from __future__ import annotations

from dataclasses import replace

from ftopt.sync.protocol import messages as m

_NAME = "start_replicas"


def filled(hello: m.Hello, start_replicas: int | None) -> m.Hello:
    """The hello with ``policy.start_replicas`` if it has none (`ftopt.FaultPolicy`), in its settings and in what
    replicas compare: all hellos of a job are filled alike. Without a number, a job starts as soon as a quorum can form:
    others join while it runs."""
    if hello.settings.get(_NAME, 0) is not None:
        return hello
    number = start_replicas if start_replicas is not None else int(hello.settings.get("min_replicas") or 1)
    lines = {**hello.lines, f"policy.{_NAME}": str(number)}
    return replace(hello, settings={**hello.settings, _NAME: number}, lines=lines)
