"""Recipes: what is read, what is refused, and in which words."""

from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest

from ftopt.cli.main import main
from ftopt.config.data_settings import Text
from ftopt.config.inner_settings import AdamWConfig, CosineConfig, MuonConfig, SgdConfig
from ftopt.config.loader import dump, load
from ftopt.config.model_settings import FactoryConfig
from ftopt.config.optimizers import shared_out
from ftopt.config.plain import gpt_parameters
from ftopt.config.shipped import shipped, title
from ftopt.errors import UserError
from ftopt.fragments import Balanced, Strided
from ftopt.methods import BySpeed, DecoupledDiLoCo, DiLoCo, LocalSGD, StreamingDiLoCo
from ftopt.outer import SGD, Adam, CosineRate, LinearRate, Torch
from ftopt.run.fault_spec import Fault
from ftopt.triggers import AnyOf, Every, EverySeconds, LinearFDA


def errors_of(*overrides: str, source: str = "diloco_bytes") -> str:
    with pytest.raises(UserError) as caught:
        load(source, overrides)
    return str(caught.value)


@pytest.mark.parametrize("name", sorted(shipped()))
def test_a_shipped_recipe_is_valid_and_says_how_to_run_it(name: str) -> None:
    assert load(name).name == name
    assert title(shipped()[name])
    assert f"ftopt run {name}" in shipped()[name].read_text(encoding="utf-8")


def test_both_recipes_are_shipped() -> None:
    assert {"diloco_bytes", "localsgd_bytes"} <= set(shipped())
    assert isinstance(load("localsgd_bytes").method, LocalSGD)


def test_a_resolved_recipe_reads_back_as_itself(tmp_path: Path) -> None:
    recipe = load("diloco_bytes", ["faults=[{replica: 1, at_step: 9, point: reduce, do: kill, rejoin_s: 2}]"])
    path = tmp_path / "recipe.yaml"
    path.write_text(dump(recipe), encoding="utf-8")
    assert load(str(path)) == recipe
    assert recipe.faults == [Fault(replica=1, at_step=9, point="reduce", do="kill", rejoin_s=2.0)]


def test_exponents_are_numbers_and_off_is_a_word() -> None:
    recipe = load("diloco_bytes", ["inner.lr=1e-3", "log.wandb=off", "train.clip_norm=null", "policy.grace_s=1"])
    assert recipe.inner.lr == 1e-3
    assert recipe.log.wandb == "off"
    assert recipe.train.clip_norm is None
    assert recipe.policy.grace_s == 1.0


def test_every_error_is_told_at_once_with_the_nearest_key() -> None:
    message = errors_of(
        "train.inner_step=3",
        "inner.lr=abc",
        "methd.sync_every=3",
        "method.outer.lr=-1",
        "policy.heartbeat_s=2",
        "train.seed=1.5",
        "faults=[{replica: 1, point: reduc}, {do: explode}]",
    )
    assert "8 errors" in message
    for part in (
        "train.inner_step: unknown key; did you mean train.inner_steps?",
        "inner.lr='abc' (str); must be a number",
        "methd: unknown key; did you mean method?",
        "method.outer.lr=-1.0",
        "policy.dead_after_s=3 with heartbeat_s=2",
        "train.seed=1.5 (float); must be a whole number",
        "faults[0].point='reduc'",
        "do='explode'; allowed: kill, stop, hang, partition",
    ):
        assert part in message


def test_errors_between_sections_are_told_together() -> None:
    message = errors_of("policy.min_replicas=9", "faults=[{replica: 7}]")
    assert "2 errors" in message
    assert "policy.min_replicas=9 with replicas=4" in message
    assert "faults[0].replica=7" in message


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("method.name=dilco", "did you mean diloco?"),
        ("train=3", "must be a section"),
        ("nonsense", "write key=value"),
        ("checkpoint.every=-1", "must be at least 0"),
        ("checkpoint.dir=''", "checkpoint.dir is empty; give a folder, or null"),
        ("train.autocast=fp8", "allowed: null, bf16"),
        ("inner={name: adamw, betas: [0.9]}", "must be two numbers"),
        ("data.name=text", "data.path is empty"),
        ("model.width=65", "use width=64"),
        ("replicas=0", "replicas=0; must be from 1 to 4096"),
        ("replicas=99999999999999999999", "must be from 1 to 4096"),
        ("train.seed=99999999999999999999", "train.seed=99999999999999999999; must be at most"),
        ("name=" + 200 * "a", "name has 200 characters; at most 128"),
        ("log.wandb=maybe", "allowed: auto, off, online, offline"),
        ("faults={}", "must be a list"),
        ("faults=[{do: hang}]", "must be a number of seconds above 0"),
        ("faults=[{point: fetch}]", "use incarnation=2"),
        ("model.factory=nonsense", "package.module:function"),
        ("data.name=digits", "use model.name=convnet"),
        ("model.name=convnet", "use data.name=digits"),
    ],
)
def test_a_wrong_value_is_refused_with_what_is_allowed(override: str, part: str) -> None:
    assert part in errors_of(override)


def test_an_unknown_recipe_names_the_nearest() -> None:
    assert "did you mean diloco_bytes?" in errors_of(source="diloco_byte")


def test_a_file_that_is_not_there_names_the_nearest_beside_it(tmp_path: Path) -> None:
    (tmp_path / "houses.yaml").touch()
    assert f"did you mean {tmp_path / 'houses.yaml'}?" in errors_of(source=str(tmp_path / "houses.yml"))
    assert "`ftopt ls` lists" in errors_of(source=str(tmp_path / "cars.yml"))
    assert "`ftopt ls` lists" in errors_of(source=str(tmp_path / "nowhere" / "houses.yml"))


def test_a_file_that_is_no_recipe_is_refused(tmp_path: Path) -> None:
    broken, listing = tmp_path / "broken.yaml", tmp_path / "list.yaml"
    broken.write_text("name: [", encoding="utf-8")
    listing.write_text("- 1", encoding="utf-8")
    assert "cannot be read as YAML" in errors_of(source=str(broken))
    assert "a recipe is a mapping" in errors_of(source=str(listing))


def test_another_choice_drops_the_settings_that_it_does_not_have() -> None:
    recipe = load("diloco_bytes", ["inner.name=sgd", "inner.lr=0.1", "method.name=local_sgd"])
    assert isinstance(recipe.inner, SgdConfig)
    assert recipe.method == LocalSGD(sync_every=50)


def test_fragments_without_a_name_are_cut_by_the_methods_own_rule() -> None:
    few = ["method={fragments: {n: 6}}", "method.sync_every=24"]
    decoupled = load("diloco_bytes", ["method.name=decoupled_diloco", *few]).method
    streaming = load("diloco_bytes", ["method.name=streaming_diloco", *few]).method
    assert isinstance(decoupled, DecoupledDiLoCo) and decoupled.fragments == Balanced(n=6)
    assert isinstance(streaming, StreamingDiLoCo) and streaming.fragments == Strided(n=6)


def test_averaged_moments_and_a_codec_that_rounds_are_refused() -> None:
    said = errors_of("method.name=slowmo", "method.inner_state=average", "method.codec=fp4")
    assert "codec=fp4 with inner_state=average" in said and "use codec=fp32" in said


def test_a_fault_in_an_outer_state_needs_a_method_that_keeps_one() -> None:
    fault = "faults=[{point: inner, do: corrupt, what: outer}]"
    assert "faults[0].what=outer with method.name=local_sgd, which keeps no" in errors_of(
        fault, source="localsgd_bytes"
    )
    for recipe in ("diloco_bytes", "slowmo_bytes", "syncsgd_bytes", "paft_digits"):
        assert load(recipe, [fault]).faults[0].aim == "outer"


def test_a_setting_of_another_choice_is_an_unknown_key() -> None:
    assert "inner.betas: unknown key" in errors_of("inner.betas=[0.9, 0.95]")


def test_muon_and_an_adamw_for_the_rest_are_one_setting() -> None:
    recipe = load("diloco_bytes", ["inner.schedule.warmup=5"])
    muon, adamw = recipe.inner_sections()
    assert adamw == AdamWConfig(lr=0.032, schedule=CosineConfig(warmup=5)) and adamw.schedule == muon.schedule
    of_muon, rest = shared_out([muon, adamw], gpt_parameters(recipe.model))
    assert {name.split(".")[2] for name in of_muon} == {"attention", "mlp"}
    assert {"embed.weight", "head.weight", "norm.weight"} < set(rest)
    tied = gpt_parameters(replace(recipe.model, tied=True))
    assert shared_out([muon, adamw], tied)[0] == of_muon, "the last matrix is none of a head"
    assert "inner.rest_lr=0; must be above 0" in errors_of("inner.rest_lr=0")


def test_a_factory_or_own_text_needs_one_key(tmp_path: Path) -> None:
    assert isinstance(load("diloco_bytes", ["model.factory=package.module:function"]).model, FactoryConfig)
    recipe = load("diloco_bytes", ["data.name=text", f"data.path={tmp_path}"])
    assert recipe.data == Text(path=str(tmp_path), batch_size=16)


MUON_AND_ADAMW = "inner=[{name: muon, lr: 0.02, schedule: {name: cosine, warmup: 5}}, {name: adamw, params: rest}]"


def test_several_inner_optimizers_are_a_list_that_reads_back(tmp_path: Path) -> None:
    recipe = load("diloco_bytes", [MUON_AND_ADAMW])
    muon, adamw = recipe.inner_sections()
    assert muon == MuonConfig(lr=0.02, schedule=CosineConfig(warmup=5))
    assert adamw == AdamWConfig()
    path = tmp_path / "recipe.yaml"
    path.write_text(dump(recipe), encoding="utf-8")
    assert load(str(path)) == recipe
    changed = load(str(path), ["inner.1.lr=1e-2", "inner.0.name=adamw"])
    first = AdamWConfig(lr=0.02, params="matrices", schedule=CosineConfig(warmup=5))
    assert changed.inner_sections() == [first, AdamWConfig(lr=0.01)]
    assert load(str(path), ["inner.name=sgd"]).inner == SgdConfig()
    with pytest.raises(
        UserError, match=r"inner\.lr: inner is a list here; name one of its items, inner\.0 to inner\.1"
    ):
        load(str(path), ["inner.lr=1"])


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("inner=[]", "must have at least one optimizer"),
        ("inner=[{name: muon, lr: -1}]", "inner[0].lr=-1; must be above 0"),
        (
            "inner=[{}, {name: mion}]",
            "inner[1].name='mion'; allowed: adamw, adam, sgd, muon, torch; did you mean muon?",
        ),
        ("inner=[{schedule: {name: cosine, warmup: -1}}]", "inner[0].schedule.warmup=-1; must be at least 0"),
        ("inner.decay=none", "allowed: all, weights"),
        ("inner={name: torch, cls: RMSprop}", "must be package.module.Class"),
        ("inner={name: torch, args: {lr: 1}}", "give it as inner.lr"),
        ("inner={name: muon, adjust_lr: no}", "allowed: original, match_rms_adamw"),
    ],
)
def test_a_wrong_inner_optimizer_is_refused_where_it_stands(override: str, part: str) -> None:
    assert part in errors_of(override)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ((), []),
        (("train.inner_steps=20",), ["inner.schedule.warmup=50 is shortened to the run's train.inner_steps=20"]),
        (
            ("train.inner_steps=20", "inner=[{params: head}, {schedule: {warmup: 30}}]"),
            ["inner[1].schedule.warmup=30 is shortened to the run's train.inner_steps=20"],
        ),
    ],
)
def test_a_warm_up_ends_within_the_run(overrides: tuple[str, ...], told: list[str]) -> None:
    warnings: list[str] = []
    recipe = load("diloco_bytes", overrides, warn=warnings.append)
    assert warnings == told
    assert recipe.inner_sections()[-1].schedule.warmup == min(50, recipe.train.inner_steps)
    assert load("diloco_bytes", [*overrides, "method.sync_every=5"]).inner == recipe.inner


def test_a_shortened_warm_up_is_said_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "diloco_bytes", "train.inner_steps=20"]) == 0
    assert capsys.readouterr().err == (
        "ftopt: inner.schedule.warmup=50 is shortened to the run's train.inner_steps=20\n"
    )


def test_replica_ids_are_what_one_would_guess() -> None:
    ids = load("diloco_bytes", ["replicas=12"]).replica_ids()
    assert ids == [f"r{number}" for number in range(12)]


def test_what_is_wrong_between_sections_is_said_beside_what_is_wrong_in_others() -> None:
    with pytest.raises(UserError) as caught:
        load("diloco_bytes", ["train.inner_stpes=5", "inner.lr=abc", "replicas=2", "policy.min_replicas=3"])
    text = str(caught.value)
    assert "3 errors" in text
    assert "policy.min_replicas=3 with replicas=2" in text
    assert "did you mean train.inner_steps" in text


def test_outer_optimizers_and_their_schedules_are_choices_of_a_recipe() -> None:
    recipe = load(
        "diloco_bytes",
        ["method.outer.name=adam", "method.outer.schedule.name=cosine", "method.outer.schedule.steps=12"],
    )
    assert recipe.method == DiLoCo(sync_every=50, outer=Adam(schedule=CosineRate(steps=12)))
    falling = {"momentum": 0.9, "momentum_schedule": {"name": "linear", "steps": 12, "floor": 0.0}}
    recipe = load("diloco_bytes", [f"method.outer={falling}"])
    assert recipe.method.outer == SGD(momentum=0.9, momentum_schedule=LinearRate(steps=12, floor=0))
    assert load("diloco_bytes", ["method.outer=paper"]).method == DiLoCo(sync_every=50, outer="paper")
    for overrides in permutations(["method.outer=adam", "method.outer.lr=0.1"]):
        assert load("diloco_bytes", overrides).method == DiLoCo(sync_every=50, outer=Adam(lr=0.1))
    assert load("diloco_bytes", ["method.outer=adam"]).method == DiLoCo(sync_every=50, outer=Adam())
    assert "and method.outer.lr=0.1: one replaces the other" in errors_of("method.outer=paper", "method.outer.lr=0.1")
    assert "in a recipe a section such as {name: sgd" in errors_of("method.outer=SDG")
    recipe = load("diloco_bytes", ["method.outer.name=torch", "method.outer.args={lr: 0.1}"])
    assert recipe.method == DiLoCo(sync_every=50, outer=Torch(args={"lr": 0.1}))
    assert "looks at the whole tensor" in errors_of("method.outer.name=torch", "method.outer.cls=torch.optim.Adafactor")
    assert "method.outer.schedule.steps is missing" in errors_of("method.outer.schedule.name=cosine")


def test_rounds_shared_out_by_speed(tmp_path: Path) -> None:
    recipe = load("localsgd_bytes", ["method.pacing.round_steps=200"])
    assert recipe.method == LocalSGD(sync_every=10, pacing=BySpeed(round_steps=200))
    written = tmp_path / "recipe.yaml"
    written.write_text(dump(recipe), encoding="utf-8")
    assert load(str(written)) == recipe
    assert load("diloco_bytes", ["method.pacing.name=by_speed"]).method.pacing == BySpeed()
    assert "method.pacing.round_steps=0; must be" in errors_of("method.pacing.round_steps=0")
    assert "method.sync_every=2.5 (float); must be a whole number" in errors_of("method.sync_every=2.5")
    assert "method.pacing: unknown key" in errors_of("method={name: slowmo, pacing: {round_steps: 9}}")


NESTED = (
    "method={name: local_sgd, sync_every: 50, trigger: {name: any_of, triggers: [{name: every, steps: 20}, "
    "{name: any_of, triggers: [{name: every_seconds, seconds: 60}, {name: linear_fda, threshold: 1}]}]}}"
)


def test_a_list_of_choices_is_read_and_written_back(tmp_path: Path) -> None:
    recipe = load("localsgd_bytes", [NESTED])
    assert recipe.method.trigger == AnyOf([Every(20), AnyOf([EverySeconds(60.0), LinearFDA(1.0)])])
    path = tmp_path / "recipe.yaml"
    path.write_text(dump(recipe), encoding="utf-8")
    assert load(str(path)) == recipe
    assert load(str(path), ["method.trigger=null"]).method.trigger is None
    assert load(str(path), ["method.trigger={name: every, steps: 3}"]).method.trigger == Every(3)


def test_errors_in_a_list_of_choices_name_the_item() -> None:
    items = "{name: every, steps: 0}, {name: linear_fda, treshold: 3, threshold: 1}, {name: evry}, {steps: 1}, 3"
    message = errors_of(f"method.trigger={{name: any_of, triggers: [{items}]}}", source="localsgd_bytes")
    for part in (
        "5 errors",
        "method.trigger.triggers[0].steps=0; must be a whole number",
        "method.trigger.triggers[1].treshold: unknown key; did you mean method.trigger.triggers[1].threshold?",
        "method.trigger.triggers[2].name='evry'; allowed: every,",
        "method.trigger.triggers[3].name=None; allowed: every,",
        "method.trigger.triggers[4]=3; must be a section",
    ):
        assert part in message
    message = errors_of("method.trigger={name: any_of, triggers: 3}", source="localsgd_bytes")
    assert "method.trigger.triggers=3; must be a list of sections, e.g. [{name: every, ...}]" in message


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("tests.config.test_loader.Fault", "is not a method; must be a subclass of ftopt.methods.Method"),
        ("tests.config.test_loader.Nothing", "cannot be imported: tests.config.test_loader has no 'Nothing'"),
        ("no_such_module.Mine", "cannot be imported: No module named 'no_such_module'; the working"),
        ("..", "cannot be imported"),
        ("ftopt.methods.method.Method", "abstract"),
    ],
)
def test_an_own_method_that_is_none_is_reported_with_all_other_errors(name: str, said: str) -> None:
    message = errors_of(f"method={{name: {name}}}", "replicas=x")
    assert ("2 errors" in message and f"method.name='{name}'" in message) or "method: Can't instantiate" in message
    assert said in message and "replicas='x'" in message


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["ranks=0"], "ranks=0; must be from 1 to 1024"),
        (["ranks=-2"], "ranks=-2; must be from 1 to 1024"),
        (["ranks=99999"], "ranks=99999; must be from 1 to 1024"),
        (["ranks=two"], "ranks='two' (str); must be a whole number"),
        (["ranks=2", "parallel=tp"], "parallel='tp'; allowed: fsdp, ddp"),
        (["restarts=-1"], "restarts=-1; must be at least 0"),
        (["ranks=64", "data.batch_size=16"], "data.batch_size=16 with ranks=64; it is the whole replica's"),
        (["ranks=3", "data.batch_size=16"], "use a multiple of 3, such as 15"),
        (
            ["ranks=2", "policy.recover=replay"],
            "policy.recover=replay with ranks=2; replay is for replicas of one process",
        ),
        (["ranks=2", "faults=[{do: nan}]"], "faults[0].what=params with ranks=2; each rank has a part of it"),
        (["ranks=2", "faults=[{do: corrupt, what: inner}]"], "faults[0].what=inner with ranks=2"),
    ],
)
def test_what_a_replica_of_several_ranks_cannot_do_is_refused(overrides: list[str], message: str) -> None:
    text = errors_of(*overrides)
    assert "1 error\n" in text
    assert message in text


def test_a_global_batch_is_for_replicas_of_one_process() -> None:
    assert "data.global_batch=64 with ranks=2" in errors_of("ranks=2", source="globalbatch_bytes")


def test_what_strikes_rank_0_alone_is_a_fault_of_an_island() -> None:
    faults = "[{do: corrupt}, {do: corrupt, point: payload}, {do: kill, rejoin_s: 1}, {do: partition, for_s: 1}]"
    recipe = load("diloco_bytes", ["ranks=2", f"faults={faults}"])
    assert (recipe.ranks, recipe.parallel, recipe.restarts) == (2, "fsdp", 0)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("method.H=5", "method.H: unknown key; did you mean method.sync_every?"),
        ("H=5", "H: unknown key; did you mean method.sync_every?"),
        ("method={name: slowmo, tau: 5}", "method.tau: unknown key; did you mean method.sync_every?"),
        ("inner.betas=[0.9]", "inner.betas: unknown key; it is a setting of inner.name=adamw or adam; allowed: "),
        ("method={name: DiLoCo}", "did you mean diloco?"),
        ("method={name: Streaming DiLoCo}", "did you mean streaming_diloco?"),
        ("method={name: LOCALSGD}", "did you mean local_sgd?"),
        ("method.codec={name: top_k, k: 5}", "method.codec.k: unknown key; allowed"),
        ("train.inner_steps=???", "train.inner_steps='???' (str); must be a whole number"),
        ("data.path=x", "data.path: unknown key; it is a setting of data.name=text or tokens; allowed: batch_size"),
        ("inner=[{momentum: 1}]", "inner[0].momentum: unknown key; it is a setting of inner[0].name=sgd or muon; "),
    ],
)
def test_the_papers_letters_and_others_names_are_understood(override: str, said: str) -> None:
    assert said in errors_of(override)


def test_all_that_are_no_overrides_are_named_at_once() -> None:
    assert "'a', '=3' are not overrides; write key=value" in errors_of("a", "replicas=2", "=3")


@pytest.mark.parametrize("reference", ["${oc.env:SECRET}", "x${oc.env:SECRET,none}", "${ oc.env:SECRET}"])
def test_the_environment_gets_into_no_recipe(
    reference: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is in it may be secret; a recipe is written into the run's folder, its report and the trackers."""
    monkeypatch.setenv("SECRET", "hunter2")
    recipe = tmp_path / "own.yaml"
    recipe.write_text(f"name: '{reference}'\n")
    for arguments in (["validate", str(recipe)], ["run", "diloco_bytes", "--dry-run", f"name={reference}"]):
        assert main(arguments) == 2
        out, err = capsys.readouterr()
        assert "refers to the environment" in err and "hunter2" not in out + err
