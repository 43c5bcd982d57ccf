"""What a user passes by mistake to `wrap`, `connect` and `local_groups` is refused in plain words."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import ftopt
from ftopt.errors import UserError
from ftopt.methods import Method
from ftopt.optimizer.counts import Status
from tests.optimizer.running import together


def _wrapped(**other: Any) -> ftopt.ReplicaOptimizer:
    model = nn.Linear(4, 2)
    inner = other.pop("inner", torch.optim.SGD(model.parameters(), lr=0.1))
    arguments = {"model": model, "method": ftopt.LocalSGD(sync_every=2), "group": ftopt.solo()} | other
    return ftopt.wrap(inner, arguments.pop("model"), arguments.pop("method"), **arguments)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"inner": ftopt.outer.SGD(lr=0.1)}, "inner is a SGD; must be a torch.optim.Optimizer"),
        ({"inner": None}, "inner is a NoneType; must be"),
        ({"inner": torch.optim.SGD}, r"inner is a class \(SGD\); must be"),
        ({"model": nn.Linear(1, 1).parameters()}, "model is a generator; must be the torch.nn.Module"),
        (
            {"method": ftopt.DiLoCo},
            r"method=<class .*; must be a method of ftopt; that is the class: use DiLoCo\(",
        ),
        ({"method": "diloco"}, r"method='diloco'; must be a method of ftopt; use ftopt.DiLoCo\(sync_every=500\)"),
        ({"method": "localsgd"}, r"use ftopt.LocalSGD\(sync_every=500\)"),
        (
            {"inner": nn.Linear(1, 1), "model": torch.optim.SGD([torch.ones(1)])},
            "inner is a Linear and model a SGD",
        ),
        ({"method": ftopt.solo(), "group": ftopt.LocalSGD(sync_every=2)}, "must be a method of ftopt"),
        ({"state_dir": 3}, "state_dir=3; must be the path of a folder"),
        ({"undo": "yes"}, "undo='yes'; must be True or False"),
        ({"group": 3}, "group=3; must be one group"),
        ({"group": ftopt.local_groups(2)}, r"group=\[.*; must be one group; use .* one of ftopt.local_groups"),
    ],
)
def test_wrap_names_the_argument_that_is_of_another_kind(other: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        _wrapped(**other)


@pytest.mark.parametrize(
    ("what", "call"),
    [
        ("undo", lambda x: _wrapped(undo=x)),
        ("leave_on_signals", lambda x: _wrapped(leave_on_signals=x)),
        ("propose", lambda x: _wrapped().sync(propose=x)),
        ("flush", lambda x: _wrapped().close(flush=x)),
        ("early", lambda x: _wrapped().close(early=x)),
        ("shared", lambda x: ftopt.Checkpoints("nowhere", _wrapped(), shared=x)),
        ("standby", lambda x: ftopt.connect("http://127.0.0.1:9", "s0", standby=x)),
        ("drop_last", lambda x: ftopt.DataLoader([1, 2], drop_last=x, group=ftopt.solo())),
        ("pin_memory", lambda x: ftopt.DataLoader([1, 2], pin_memory=x, num_workers=1, group=ftopt.solo())),
        ("outer.nesterov", lambda x: ftopt.outer.SGD(nesterov=x, momentum=0.5)),
    ],
)
def test_a_truth_value_is_true_or_false_and_no_number(what: str, call: Callable[[Any], object]) -> None:
    for wrong in (1, 0, None, "no", torch.tensor(1)):
        with pytest.raises(UserError, match=rf"{what}=.*; must be True or False"):
            call(wrong)
    if what not in ("propose", "flush", "early", "pin_memory", "standby"):
        for right in (True, False, numpy.bool_(True)):
            call(right)


def test_a_launched_process_is_told_that_its_environment_has_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    for url, said in (("http://head:29410", r"use ftopt.connect\(\), "), ("", r"use ftopt.connect\(url\), ")):
        monkeypatch.setenv("FTOPT_COORDINATOR", url)
        with pytest.raises(UserError, match=said):
            _wrapped(group=3)


def test_a_group_is_for_one_optimizer() -> None:
    group = ftopt.solo()
    with _wrapped(group=group), pytest.raises(UserError, match=r"group of replica 'r0' is in use"):
        _wrapped(group=group).__enter__()
    with pytest.raises(UserError, match=r"or was closed; a group is for one ftopt\.wrap"):
        _wrapped(group=group).__enter__()


def _step(optimizer: ftopt.ReplicaOptimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()


@pytest.mark.parametrize(
    "wrong",
    [
        1.5, 2.0, "3", None, True, [3], float("nan"), numpy.float32(3), numpy.bool_(True), numpy.ones(1),
        torch.tensor(0.5), torch.tensor(3.0), torch.tensor(True), torch.tensor([3]), torch.tensor([1, 2]),
    ],
    ids=repr,
)  # fmt: skip
@pytest.mark.parametrize("what", ["tokens", "samples"])
def test_counts_are_whole_numbers(what: str, wrong: Any) -> None:
    with pytest.raises(UserError, match=rf"(?s)log\({what}=.*\); must be a whole number"):
        _wrapped().log(**{what: wrong})


@pytest.mark.parametrize(
    "number", [3, torch.tensor(3), torch.tensor(3, dtype=torch.int8), numpy.int64(3), numpy.array(3)]
)
def test_a_count_may_be_a_number_of_torch_or_numpy(number: Any) -> None:
    with _wrapped(method=ftopt.LocalSGD(sync_every=1, weights="tokens")) as optimizer:
        optimizer.log(tokens=number, samples=number)
        optimizer.log(tokens=number)
        _step(optimizer)
        assert optimizer.status.versions == (1,) and optimizer._core.started().counters.tokens == 6


def test_a_count_that_is_negative_or_beyond_what_a_message_holds_is_refused() -> None:
    with _wrapped() as optimizer:
        for what in ("tokens", "samples"):
            with pytest.raises(UserError, match=rf"log\({what}=-1\); must be 0 or more"):
                optimizer.log(**{what: -1})
            with pytest.raises(UserError, match=rf"9007199254740992 {what} in all; at most 2\^53 - 1"):
                optimizer.log(**{what: 1 << 53})
        optimizer.log(tokens=(1 << 53) - 2)
        _step(optimizer)
        optimizer.log(tokens=1)
        with pytest.raises(UserError, match="9007199254740992 tokens in all"):
            optimizer.log(tokens=1)
        _step(optimizer)
        assert optimizer.status.versions == (1,)


@pytest.mark.parametrize(
    "wrong", ["0.5", [0.5], True, 1 << 2000, torch.ones(2), torch.ones(()) * 1j, torch.ones(0)], ids=repr
)
def test_a_loss_is_one_number(wrong: Any) -> None:
    with pytest.raises(UserError, match=r"log\(loss=.*; must be one real number; use loss.mean"):
        _wrapped().log(loss=wrong, tokens=3)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_a_loss_that_is_not_finite_is_left_out_of_the_mean(kind: Any, bad: float) -> None:
    seen: list[float | None] = []
    trigger = ftopt.triggers.AdaComm(initial=3, least=3, most=3)
    optimizer = _wrapped(method=ftopt.LocalSGD(sync_every=3, trigger=trigger))
    with optimizer:
        for loss in (2.0, bad, 4.0, 5.0, 5.0, 5.0):
            optimizer.log(loss=kind(loss))
            _step(optimizer)
            fragment = optimizer._core.started().fragments[0]
            seen.append(fragment.trigger_metrics.agreed(fragment.applied.outer).loss)
    assert seen == [None, None, 3.0, 3.0, 3.0, 5.0]


@pytest.mark.parametrize("method", [ftopt.LocalSGD(sync_every=2), ftopt.SyncSGD()], ids=lambda method: method.name)
@pytest.mark.parametrize("rate", [float("nan"), float("inf"), "0.1", torch.tensor(float("nan")), torch.ones(2), True])
def test_a_rate_that_is_no_finite_number_is_refused_before_the_step(method: Method, rate: Any) -> None:
    model = nn.Linear(4, 2)
    with _wrapped(inner=torch.optim.SGD(model.parameters(), lr=0.1), model=model, method=method) as optimizer:
        _step(optimizer)
        before = [p.clone() for p in model.parameters()]
        optimizer.param_groups[0]["lr"] = rate
        with pytest.raises(UserError, match=r"lr=.* in a parameter group; must be a finite number; mend"):
            _step(optimizer)
        assert optimizer.local_steps == 1 and all(map(torch.equal, before, model.parameters()))
        optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
        _step(optimizer)
        assert optimizer.local_steps == 2


@pytest.mark.parametrize(
    ("weights", "counted", "said"),
    [
        ("tokens", [5, 0, 5], "for 1 of 2 inner steps so far: this contribution weighs 5;"),
        ("tokens_per_step", [0, 0, 0], "for 2 of 2 inner steps so far: this contribution weighs 2;"),
    ],
)
def test_weights_by_tokens_that_nobody_counts_are_told_of_once(weights: str, counted: list[int], said: str) -> None:
    with _wrapped(method=ftopt.LocalSGD(sync_every=2, weights=weights)) as optimizer:
        with pytest.warns(UserWarning, match=rf"local_sgd\(weights='{weights}'\).*{said}.*optimizer.log") as told:
            for tokens in (*counted, *counted):
                optimizer.log(tokens=tokens)
                _step(optimizer)
        assert len(told) == 1


def test_weights_of_nothing_since_no_tokens_are_counted_are_told_of() -> None:
    optimizer = _wrapped(method=ftopt.LocalSGD(sync_every=2, weights="tokens"))
    with pytest.warns(UserWarning, match="for 2 of 2 inner steps so far: the contribution weighs nothing") as told:
        optimizer.__enter__()
        for _ in range(2):
            _step(optimizer)
        optimizer.close(flush=False)
    assert len(told) == 1


def test_weights_by_tokens_that_are_counted_are_not_warned_of() -> None:
    for method in (ftopt.LocalSGD(sync_every=2, weights="tokens"), ftopt.LocalSGD(sync_every=2)):
        with _wrapped(method=method) as optimizer:
            for _ in range(4):
                optimizer.log(tokens=3 * (method.weights == "tokens"))
                _step(optimizer)
            assert optimizer.status.versions == (2,)


@pytest.mark.parametrize(
    ("n", "other", "said"),
    [
        (0, {}, "n=0; must be a whole number of replicas, at least 1"),
        ("2", {}, "n='2'; must be a whole number"),
        (True, {}, "n=True; must be a whole number"),
        (2, {"names": ["a", "b", "c"]}, "must be 2 names"),
        (2, {"names": "ab"}, "names='ab'; must be a list of 2 names"),
        (2, {"names": 3}, "names=3; must be a list of 2 names"),
        (1, {"on_event": "log"}, "on_event='log'; must be a function"),
        (1, {"names": [0]}, "replica 0: it is no string"),
        (2, {"policy": {"grace_s": 1}}, r"policy=\{'grace_s': 1\}; must be settings of ftopt"),
    ],
)
def test_local_groups_checks_its_arguments(n: Any, other: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        ftopt.local_groups(n, **other)


@pytest.mark.parametrize(
    "url", ["localhost:29410", "http://localhost:99999", "http://localhost:x", "http://[::1", 29410]
)
def test_connect_refuses_what_is_no_address(url: Any) -> None:
    with pytest.raises(UserError, match=r"must be http://HOST:PORT"):
        ftopt.connect(url)


def test_connect_refuses_names_and_settings_of_another_kind() -> None:
    with pytest.raises(UserError, match="replica 3: it is no string"):
        ftopt.connect("http://localhost:1", 3)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="must be settings of ftopt"):
        ftopt.connect("http://localhost:1", "r0", policy={})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: ftopt.DiLoCo(sync_evry=50),
            r"DiLoCo has no setting 'sync_evry'; did you mean sync_every\?",
        ),
        (lambda: ftopt.DiLoCo(outer_optimizer=1), r"no setting 'outer_optimizer'; did you mean outer\?"),
        (lambda: ftopt.StreamingDiLoCo(fragment_sync_delay=1), r"did you mean delay\?"),
        (lambda: ftopt.LocalSGD(zzz=1), "LocalSGD has no setting 'zzz'; it has sync_every, "),
        (lambda: ftopt.LocalSGD(500), r"LocalSGD\(500\); settings go by name: LocalSGD\(sync_every=\.\.\.\)"),
        (lambda: ftopt.FaultPolicy(grace=3), r"did you mean grace_s\?"),
        (lambda: ftopt.triggers.Every(step=3), r"Every has no setting 'step'; did you mean steps\?"),
        (lambda: ftopt.triggers.Every(3, 4), r"Every\(4\); settings go by name"),
        (lambda: ftopt.codecs.TopK(frac=0.1), r"did you mean fraction\? it has fraction, bits$"),
        (lambda: ftopt.outer.SGD(momentun=0.9), r"did you mean momentum\?"),
        (lambda: ftopt.fragments.Strided(3), r"settings go by name: Strided\(n=...\)"),
        (lambda: ftopt.DiLoCo(outer=torch.optim.SGD), r"the class SGD; .*partial\(torch.optim.SGD, lr=0.7, mom"),
        (
            lambda: ftopt.DiLoCo(outer=torch.optim.SGD([torch.zeros(1)])),
            r"of type SGD; .*partial\(torch.optim.SGD, lr",
        ),
        (lambda: ftopt.DiLoCo(outer=torch.optim.RMSprop), r"functools.partial\(torch.optim.RMSprop, lr=0.3\)"),
        (lambda: ftopt.DiLoCo(outer=partial(torch.optim.SGD, momentum=0.9)), "with the rate among them"),
        (lambda: ftopt.DiLoCo(outer=ftopt.outer.SGD), "outer is the class SGD; must be .* an instance"),
        (lambda: ftopt.DiLoCo(outer="sdg"), "outer='sdg'; must be auto, paper, sgd, adam, or an outer optimizer"),
        (lambda: ftopt.DiLoCo(outer_lr=0), "outer_lr=0; must be a number above 0; use outer_lr=1"),
        (lambda: ftopt.DiLoCo(outer_momentum=1.0), r"outer_momentum=1.0; must be a number in \[0, 1\)"),
        (lambda: ftopt.DiLoCo(outer=ftopt.outer.Adam(), outer_lr=1), "are of outer.SGD, and outer is Adam"),
        (lambda: ftopt.DiLoCo(trigger=ftopt.triggers.Every), "must be a trigger of ftopt"),
        (lambda: ftopt.StreamingDiLoCo(fragments=3), "fragments"),
    ],
)
def test_a_setting_that_is_misspelt_or_of_another_kind_is_answered_with_what_is_meant(make: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        make()


def test_settings_can_be_copied_and_pickled_and_subclasses_may_have_an_init_of_their_own() -> None:
    class Own(ftopt.triggers.Trigger):
        def __init__(self, whatever: int, *, more: int) -> None:
            super().__init__()

        def due(self, progress: Any) -> Any:
            return ftopt.triggers.Due.NO

    assert Own(3, more=4)
    for settings in (
        ftopt.PAFT(sync_every=3),
        ftopt.FaultPolicy(grace_s=1.0),
        ftopt.outer.SGD(),
        ftopt.codecs.TopK(0.1, 4),
    ):
        assert copy.deepcopy(settings) == pickle.loads(pickle.dumps(settings)) == settings


class Shared(nn.Module):
    """Parameters that are views of one storage."""

    def __init__(self, *views: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        storage = torch.randn(6, 4)
        for number, view in enumerate(views):
            self.register_parameter(f"p{number}", nn.Parameter(view(storage)))


def _of(model: nn.Module, method: Method | None = None) -> ftopt.ReplicaOptimizer:
    method = method or ftopt.LocalSGD(sync_every=1)
    return ftopt.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, method, group=ftopt.solo())


@pytest.mark.parametrize(
    ("views", "which"),
    [
        ([lambda s: s[:1].expand(6, 4)], "p0"),
        ([lambda s: s.as_strided((4, 3), (2, 1))], "p0"),
        ([lambda s: s.view(-1), lambda s: s[2]], "p0, p1"),
        ([lambda s: s[:3], lambda s: s[2:]], "p0, p1"),
        ([lambda s: s[:, :2], lambda s: s[1:, 1:]], "p0, p1"),
        ([lambda s: s.view(-1), lambda s: s[0, :1], lambda s: s[4]], "p0, p1, p2"),
    ],
)
def test_parameters_that_share_memory_are_refused(views: Any, which: str) -> None:
    with pytest.raises(UserError, match=rf"share memory: {which}; .* \.clone\(\)"):
        _of(Shared(*views))


@pytest.mark.parametrize(
    "views", [[lambda s: s.t()], [lambda s: s[:, ::2], lambda s: s[:, 1::2]], [lambda s: s[:3], lambda s: s[3:]]]
)
def test_views_of_one_storage_that_do_not_overlap_are_trained(views: Any) -> None:
    model = Shared(*views)
    with _of(model) as optimizer:
        _step(optimizer)
        assert optimizer.status.versions == (1,)


def test_complex_parameters_are_refused_with_advice_that_keeps_the_imaginary_part() -> None:
    model = nn.Module()
    model.w = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    with pytest.raises(UserError, match=r"complex parameters.*: w \(torch.complex64\).*view_as_real") as told:
        _of(model)
    assert ".float()" not in str(told.value)


def test_parameters_without_values_are_refused() -> None:
    with torch.device("meta"):
        meta = nn.Linear(2, 1)
    for model in (meta, nn.LazyLinear(1)):
        with pytest.raises(UserError, match=r"parameters without values: weight.*to_empty.*one forward pass"):
            _of(model)


GRADIENTS = [ftopt.SyncSGD(), ftopt.PAFT(sync_every=2)]


@pytest.mark.parametrize("method", GRADIENTS, ids=lambda method: method.name)
@pytest.mark.parametrize("module", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_are_not_exchanged(method: Method, module: Any) -> None:
    model = nn.Sequential(module(8, 2, sparse=True))
    with pytest.raises(UserError, match=rf"0 is {module.__name__}\(sparse=True\), and {method.name} exchanges"):
        _of(model, method)
    dense = nn.Sequential(module(8, 2))
    with _of(dense, method) as optimizer:
        dense[0].weight.grad = torch.ones(8, 2).to_sparse(1)
        with pytest.raises(UserError, match=r"a gradient of shape \(8, 2\) is sparse .* ftopt.LocalSGD"):
            optimizer.step()
        optimizer.close(flush=False)


@pytest.mark.parametrize("inner", [torch.optim.SparseAdam, torch.optim.SGD])
def test_sparse_gradients_may_be_used_at_home(inner: Any) -> None:
    model = nn.Embedding(8, 2, sparse=True)
    optimizer = ftopt.wrap(inner(model.parameters(), lr=0.1), model, ftopt.DiLoCo(sync_every=2), group=ftopt.solo())
    with optimizer:
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.tensor([1, 3])).sum().backward()
            optimizer.step()
        assert optimizer.status.versions == (2,)


@pytest.mark.parametrize("answer", [None, "no", 1, float("nan"), torch.tensor(True)], ids=repr)
def test_a_trigger_of_ones_own_must_answer_with_due(answer: Any) -> None:
    class Own(ftopt.triggers.Trigger):
        def due(self, progress: Any) -> Any:
            return answer

    with _wrapped(method=ftopt.LocalSGD(sync_every=5, trigger=Own())) as optimizer:
        with pytest.raises(
            ftopt.errors.UserError, match=r"Own.due\(\) gives .*; must be ftopt.triggers.Due.NO, YES or NOW"
        ):
            _step(optimizer)
        optimizer.close(flush=False)


DATA = [torch.ones(2)] * 8


@pytest.mark.parametrize(
    "wrong",
    [
        {"batch_size": "4"}, {"batch_size": 0}, {"batch_size": 2.0}, {"seed": None}, {"seed": -1}, {"epochs": "1"},
        {"epochs": 0}, {"accumulate": 1.5}, {"num_workers": None}, {"prefetch_factor": 0}, {"collate_fn": 3},
        {"drop_last": "no"}, {"multiprocessing_context": "thread"}, {"dataset": None}, {"dataset": 3},
        {"group": [ftopt.solo()]}, {"global_batch": 2.0}, {"dataset": iter(DATA), "shard": 3},
        {"dataset": iter(DATA), "shard": (0,)}, {"dataset": iter(DATA), "shard": ("0", "1")},
    ],
    ids=lambda wrong: ", ".join(f"{name}={value!r:.20}" for name, value in wrong.items()),
)  # fmt: skip
def test_a_data_loader_checks_its_arguments(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=[*wrong][-1]):
        ftopt.DataLoader(**{"dataset": DATA, **wrong})


@pytest.mark.parametrize(
    "wrong",
    [
        {"every": "5"}, {"every": 0}, {"every": 1.0}, {"keep": None}, {"keep": 0}, {"folder": None},
        {"optimizer": None},
        {"optimizer": torch.optim.SGD([torch.ones(1)])},
    ],
    ids=lambda wrong: ", ".join(f"{name}={value!r:.20}" for name, value in wrong.items()),
)  # fmt: skip
def test_checkpoints_check_their_arguments(wrong: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=[*wrong][-1]):
        ftopt.Checkpoints(**{"folder": tmp_path, "optimizer": _wrapped(), **wrong})
    with pytest.raises(UserError, match=r"include\(model=...\): a int without state_dict"):
        ftopt.Checkpoints(tmp_path, _wrapped()).include(model=3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"on_event": 3}, "on_event=3; must be a function"),
        ({"connect_s": float("nan")}, "connect_s=nan; must be"),
        ({"connect_s": "10"}, "connect_s='10'; must be"),
        ({"host": 7}, "host=7; must be this machine's"),
    ],
)
def test_connect_checks_its_arguments(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        ftopt.connect("http://localhost:1", "r0", **wrong)


def test_what_is_said_while_training_is_checked_too() -> None:
    with _wrapped() as optimizer:
        for state in (None, 3, ""):
            with pytest.raises(UserError, match="must be a word for the status"), optimizer.busy(state):  # type: ignore[arg-type]
                pass
        for timeout_s in (None, "30", float("nan"), -1):
            with pytest.raises(UserError, match=r"timeout_s=.*must be a number of seconds"):
                optimizer.close(timeout_s=timeout_s)  # type: ignore[arg-type]
        _step(optimizer)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: ftopt.outer.CosineRate(), r"CosineRate needs steps, .*; write CosineRate\(steps=...\)"),
        (lambda: ftopt.triggers.LinearFDA(), r"LinearFDA needs threshold, .*; write LinearFDA\(threshold=...\)"),
        (
            lambda: ftopt.wrap(),
            r"wrap\(\): missing a required argument: 'inner'; call it as in ftopt.wrap\(optimizer, ",
        ),
        (
            lambda: ftopt.wrap(1, 2),
            r"missing a required .*argument: 'method'; .*DiLoCo\(sync_every=500\), group",
        ),
        (lambda: ftopt.wrap(1, 2, 3, group=4, undoo=True), "got an unexpected keyword argument 'undoo'; call it as in"),
    ],
)
def test_what_is_missing_is_named_with_what_to_write(make: Callable[[], object], said: str) -> None:
    with pytest.raises(UserError, match=said):
        make()


@pytest.mark.parametrize(
    "settings",
    [
        ftopt.PAFT(sync_every=3, trigger=ftopt.triggers.LinearFDA(0.5)),
        ftopt.DiLoCo(outer=ftopt.outer.SGD(schedule=ftopt.outer.CosineRate(steps=3))),
        ftopt.FaultPolicy(),
        ftopt.fragments.Named(patterns=["a", "*"]),
    ],
    ids=lambda settings: type(settings).__name__,
)
def test_settings_can_be_copied_and_pickled(settings: object) -> None:
    assert copy.deepcopy(settings) == settings == pickle.loads(pickle.dumps(settings)) == copy.copy(settings)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: ftopt.DataLoader([1], 2, shuffle=True),
            r"DataLoader\(\): .*'shuffle'; .*draws the order",
        ),
        (lambda: ftopt.DataLoader(), r"DataLoader\(\): missing .*'dataset'; call it as in ftopt.DataLoader\("),
        (lambda: ftopt.Checkpoints("folder"), r"Checkpoints\(\): missing .*'optimizer'; .*; it has folder, optimizer"),
        (lambda: ftopt.TokenWindows(b"", window=3), r"TokenWindows\(\): .*; it has source, length"),
        (
            lambda: ftopt.connect("http://a:1", replicas=3),
            r"connect\(\): .*'replicas'; .*start_replicas=4",
        ),
        (lambda: ftopt.local_groups(2, start_replicas=2), r"local_groups\(\): .*; it has n, policy"),
        (lambda: ftopt.solo("r0"), r"solo\(\): too many positional arguments; .*; it has on_event"),
    ],
)
def test_a_call_with_arguments_that_there_are_not_is_answered_with_those_that_there_are(
    make: Callable[[], object], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        make()


def test_an_outer_optimizer_may_be_given_by_its_class() -> None:
    assert ftopt.outer.Torch(cls=torch.optim.RMSprop) == ftopt.outer.Torch(cls="torch.optim.RMSprop")  # type: ignore[arg-type]


def test_a_model_is_trained_as_one_replica_at_a_time() -> None:
    """Two optimizers of one model, each with a group of its own: each step would count twice."""
    model = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 2))

    def wrapped(part: nn.Module) -> ftopt.ReplicaOptimizer:
        return _wrapped(model=part, inner=torch.optim.SGD(part.parameters(), lr=0.1))

    first, second, third = wrapped(model), wrapped(model), wrapped(model[1])
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    first.step()
    for other in (second, third):
        with pytest.raises(
            UserError, match=r"trained as replica '.*' already, by an optimizer that has not left its job"
        ):
            other.step()
    first.close()
    second.step()
    second.close()


def test_of_two_threads_that_join_with_one_model_only_one_may() -> None:
    model, refused, both = nn.Linear(4, 2), threading.Event(), threading.Barrier(2)

    def train(group: ftopt.ReplicaGroup) -> str:
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = ftopt.wrap(inner, model, ftopt.LocalSGD(sync_every=2), group=group)
        both.wait(60)
        try:
            with optimizer:
                assert refused.wait(60)
        except UserError as error:
            refused.set()
            return str(error)
        return ""

    groups = ftopt.local_groups(2, policy=ftopt.FaultPolicy(start_replicas=2, start_s=0.5))
    said = together([lambda group=group: train(group) for group in groups])  # type: ignore[misc]
    assert sorted(said)[0] == "", said
    assert "this model is trained as replica" in sorted(said)[1]


@pytest.mark.parametrize("given", [{"policy": ftopt.FaultPolicy()}, {"on_event": print}])
def test_settings_of_the_job_are_given_where_it_is_joined(given: dict[str, Any]) -> None:
    model = nn.Linear(2, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UserError, match=f"{next(iter(given))}= beside group=; .* to what makes the group"):
        ftopt.wrap(inner, model, ftopt.DiLoCo(), group=ftopt.solo(), **given)


def test_alone_too_on_event_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FTOPT_COORDINATOR", raising=False)
    model, seen = nn.Linear(2, 1), list[str]()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = ftopt.wrap(
        inner,
        model,
        ftopt.LocalSGD(sync_every=1),
        policy=ftopt.FaultPolicy(),
        on_event=lambda event: seen.append(event.event),
    )
    assert optimizer.status == Status() and optimizer.version == 0 and not optimizer.status.started
    for step in optimizer.steps(2):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        assert (optimizer.status.started, optimizer.status.inner_step) == (True, step + 1)
    assert "start" in seen and optimizer.version == 2
    assert "Record" not in repr(optimizer.status)
    with pytest.raises(UserError, match="policy=3; must be settings"):
        ftopt.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, ftopt.DiLoCo(), policy=3)  # type: ignore[arg-type]
