"""What is said of a replica that does not fit a job."""

from __future__ import annotations

import pytest

from ftopt.sync.protocol.coordinator.entry.admission import differs

MODEL = "9 tensors, 1,234 parameters, aaaa"


@pytest.mark.parametrize(
    ("here", "there", "said"),
    [
        (MODEL, MODEL.replace("aaaa", "bbbb"), "shapes or dtypes (their hash is aaaa here, bbbb in the job)"),
        (MODEL, "8 tensors, 1,000 parameters, cccc",
         "another model: 9 tensors, 1,234 parameters here, 8 tensors, 1,000 parameters in the job"),
        (f"{MODEL}; {MODEL}", f"{MODEL}; 8 tensors, 1 parameters, cccc", "another model (fragment 1): 9 tensors"),
        (f"{MODEL}; {MODEL}", MODEL, "model: 2 fragments here, 1 in the job"),
        ("nothing", MODEL, f"model: nothing here, {MODEL} in the job"),
    ],
)  # fmt: skip
def test_of_another_model_it_is_said_what_differs(here: str, there: str, said: str) -> None:
    assert said in differs("model", here, there)


def test_of_a_setting_both_values_are_told() -> None:
    assert differs("sync.min_replicas", "2", "1") == "sync.min_replicas: 2 here, 1 in the job"
