"""The number of replicas that a coordinator's jobs start with, where the replicas do not say it."""

from __future__ import annotations

import pytest

from ftopt.sync.protocol.coordinator.entry.admission import makes_no_sense, misfit, policy_of
from ftopt.sync.server.start import filled
from tests.sync.server.test_access import hello


@pytest.mark.parametrize(("theirs", "given", "found"), [(None, 3, 3), (2, 3, 2), (None, None, 1)])
def test_a_hello_without_a_number_gets_the_coordinators(
    theirs: int | None, given: int | None, found: int | None
) -> None:
    plain = hello(settings={"start_replicas": theirs}, lines={"policy.start_replicas": str(theirs), "model": "m"})
    whole = filled(plain, given)
    assert policy_of(whole).start_replicas == found
    assert makes_no_sense(whole.job, whole) == ""
    assert misfit(whole.job, filled(plain, given).lines, whole, whole.samples) == ""
    assert whole.lines["model"] == "m"
    assert plain.settings["start_replicas"] == theirs


def test_without_any_number_a_job_starts_with_as_many_as_a_quorum_needs() -> None:
    plain = hello(settings={"start_replicas": None, "min_replicas": 2}, lines={})
    assert policy_of(filled(plain, None)).start_replicas == 2
