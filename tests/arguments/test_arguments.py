"""What may be asked for, in Python, on the command line and in files, and what is refused."""

import dataclasses
import io
import math
import re
from copy import copy
from typing import Any, get_type_hints

import pytest
import torch
import yaml
from transformers import HfArgumentParser, TrainingArguments
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from dp_grape_hf import DPGrapeTrainingArguments, PrivacyError
from dp_grape_hf.accounting import ACCOUNTANTS, DEFAULT, Adjacency
from dp_grape_hf.arguments import DPGrapeArguments
from dp_grape_hf.arguments.arguments import ALIASES, HOST_RATE, INDEPENDENT, RANK, UPDATE_STEPS
from dp_grape_hf.arguments.refusals import FIXED_OF_HOST, TRACKERS
from dp_grape_hf.gradients import ENGINES, GradSampleMode
from dp_grape_hf.ledger import BANDED, Clipping, EarlierData
from dp_grape_hf.optimizers import UPDATE_RULES
from dp_grape_hf.options import OPTIONS, read
from dp_grape_hf.projections import PRINCIPAL, PROJECTIONS
from tests.support.methods import OURS

HOST = {"output_dir": "unused", "report_to": "none", "use_cpu": True}
BUDGET = {"target_epsilon": 6.0, "target_delta": 1e-5}
NO_NOISE = {"target_epsilon": None, "target_delta": None, "noise_multiplier": 0.0}
OWN_FIELDS = {field.name: field for field in dataclasses.fields(DPGrapeArguments)}


def make(**changes):
    return DPGrapeTrainingArguments(**HOST | BUDGET | changes)


def parse(*words):
    host = ("--output_dir", "unused", "--report_to", "none", "--use_cpu")
    parser = HfArgumentParser(DPGrapeTrainingArguments)
    return parser.parse_args_into_dataclasses([*host, *words], look_for_args_file=False)[0]


def test_fields_and_choices_agree_with_the_table_of_options():
    types = get_type_hints(DPGrapeArguments)
    own = {name: option for name, option in OPTIONS.items() if not option.of_host}
    assert OWN_FIELDS.keys() == own.keys()
    for name, option in own.items():
        kind = dict[str, Any] | str if option.range.kind is dict else option.range.kind
        assert types[name] == (kind | None if option.default is None else kind), name
        if option.default is not None:
            assert read(name, option.default) == option.default
    choices = {
        "accountant": ACCOUNTANTS,
        "adjacency": Adjacency,
        "clipping": Clipping,
        "earlier_data": EarlierData,
        "engine": ENGINES,
        "grad_sample_mode": GradSampleMode,
        "noise": (INDEPENDENT, BANDED),
        "update_rule": UPDATE_RULES,
    }
    for name, known in choices.items():
        assert sorted(re.findall(r"'(\w+)'", own[name].range.needed)) == sorted(known), name
        assert all(own[name].range.holds(choice) for choice in known)
    assert own["accountant"].default == DEFAULT
    hosts = {f.name: f.default for f in dataclasses.fields(TrainingArguments)}
    assert all(o.default in (None, hosts[name]) for name, o in OPTIONS.items() if o.of_host)


def test_meanings_name_options_methods_and_projections_that_there_are():
    for option in OPTIONS.values():
        for name in re.findall(r"\b[a-z]+_[a-z_]+\b", option.otherwise):
            assert name in {*OPTIONS, *FIXED_OF_HOST, *OURS}, name
    assert all(f"`{name}`" in OPTIONS["method"].meaning for name in OURS)
    for name in {PRINCIPAL, *PROJECTIONS}:
        assert f"`{name}`" in OPTIONS["projection"].meaning
    defaults = [f"{HOST_RATE:g}", f"{RANK}", f"{UPDATE_STEPS}"]
    named = ("learning_rate", "projection_rank", "projection_update_steps")
    assert all(
        value in OPTIONS[name].otherwise for name, value in zip(named, defaults, strict=True)
    )


def test_with_a_rate_only_the_budget_has_no_default():
    args = make(learning_rate=1e-3)
    promised = (args.adjacency, args.noise, args.accountant, args.max_grad_norm, args.clipping)
    assert promised == ("add_or_remove_one", "independent", "pld", 1.0, "flat")
    made_of = (args.method, args.projection, args.projection_rank, args.projection_update_steps)
    assert made_of == ("dp_grape", "principal", 16, None)
    assert (args.update_rule, args.lr_scheduler_type) == ("adam", "linear")
    assert args.private
    assert not args.chooses


def test_without_a_rate_what_is_not_given_is_chosen():
    args = make()
    assert args.chooses
    assert args.expected_batch_size is None  # until N is known
    chosen = args.update_rule, args.projection_rank, args.clipping, args.max_grad_norm
    assert chosen == ("momentum", 4, "automatic", 1.0)
    given = make(update_rule="adam", r=8, max_grad_norm=0.1, gradient_accumulation_steps=2)
    kept = given.update_rule, given.projection_rank, given.clipping, given.expected_batch_size
    assert kept == ("adam", 8, "flat", 16)


def test_lora_on_pretrained_weights_moves_by_momentum():
    chosen = make(method="dp_lora")
    assert (chosen.update_rule, chosen.noise) == ("momentum", None)  # None: banded where it helps
    fresh = chosen.for_fresh_weights()
    assert (fresh.update_rule, fresh.noise) == ("adam", "independent")
    given = make(method="dp_lora", learning_rate=1e-3), make(method="dp_lora", update_rule="sgd")
    assert [args.update_rule for args in given] == ["adam", "sgd"]
    assert make(method="dp_adam").update_rule == "adam"


@pytest.mark.parametrize("changes", [NO_NOISE, {"method": "adam", "target_epsilon": None}])
def test_without_noise_there_is_nothing_to_choose_by(changes):
    args = make(**changes)
    assert not args.chooses
    assert args.learning_rate == TrainingArguments(output_dir="unused").learning_rate


@pytest.mark.parametrize(("short", "name"), ALIASES.items())
def test_a_short_name_is_its_long_name(short, name):
    value = {"eps": 3.0, "delta": 1e-6, "r": 8, "F": 50}[short]
    settings = {key: v for key, v in BUDGET.items() if key != name}
    by_short = DPGrapeTrainingArguments(**HOST | settings | {short: value})
    assert getattr(by_short, name) == value
    assert (
        by_short.to_dict() == DPGrapeTrainingArguments(**HOST | settings | {name: value}).to_dict()
    )
    assert not hasattr(by_short, short)


@pytest.mark.parametrize(("short", "name"), ALIASES.items())
def test_both_names_of_one_quantity_are_refused(short, name):
    with pytest.raises(PrivacyError, match=rf"{short}=0\.5 and {name}=0\.5 are two names"):
        DPGrapeTrainingArguments(**HOST | {short: 0.5, name: 0.5})


def test_a_token_is_not_shown():
    assert "geheim" not in repr(make(hub_token="geheim"))


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_the_expected_batch_is_what_users_of_the_trainer_expect(accumulation, ranks, monkeypatch):
    """Batch per device, times accumulation, times ranks; accumulation has then done its work."""
    monkeypatch.setattr(TrainingArguments, "world_size", property(lambda self: ranks))
    batch = {"per_device_train_batch_size": 5, "gradient_accumulation_steps": accumulation}
    args = make(**batch, learning_rate=1e-3)
    assert args.expected_batch_size == args.logical_batch_size == 5 * accumulation * ranks
    assert args.gradient_accumulation_steps == 1
    given = make(per_device_train_batch_size=5, expected_batch_size=100)
    assert (given.expected_batch_size, given.per_device_train_batch_size) == (100, 5)


def test_two_ways_to_set_the_logical_batch_are_refused():
    with pytest.raises(PrivacyError, match=r"expected_batch_size=100.*accumulation_steps=2"):
        make(expected_batch_size=100, gradient_accumulation_steps=2)


def rebuilt(args):
    return DPGrapeTrainingArguments(**args.to_dict())


def through_torch(args):
    file = io.BytesIO()
    torch.save(args, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "copied",
    [dataclasses.replace, through_torch, rebuilt, lambda args: rebuilt(rebuilt(args))],
    ids=["replace", "torch.save", "to_dict", "to_dict twice"],
)
def test_a_copy_keeps_every_value(copied):
    args = make(
        per_device_train_batch_size=4,
        gradient_accumulation_steps=8,
        activation_checkpointing=True,
        max_grad_norm=0.25,
        projection_rank=4,
        num_samples=1000,
    )
    assert args.expected_batch_size == 32
    assert copied(args).to_dict() == args.to_dict()


def test_max_grad_norm_of_zero_is_refused_with_the_alternatives():
    told = r"^max_grad_norm=0.0 must be greater than 0: .*\. Leave it at 1.0.*max_grad_norm=inf"
    with pytest.raises(PrivacyError, match=told):
        make(max_grad_norm=0)


@pytest.mark.parametrize("name", [*OWN_FIELDS, *sorted(FIXED_OF_HOST), "fp16"])
@pytest.mark.parametrize("copied", [lambda args: args, copy, through_torch])
def test_an_option_is_fixed_from_its_check_on(copied, name):
    args = copied(make())
    value = getattr(args, name)
    setattr(args, name, value)  # which changes nothing
    with pytest.raises(PrivacyError, match=rf"{name}=.*dataclasses.replace\(args, {name}="):
        setattr(args, name, object())
    assert getattr(args, name) == value
    args.output_dir = "elsewhere"  # nothing relies on


def test_only_missing_options_are_chosen_and_in_a_copy():
    args = make(projection_rank=8)
    chosen = args.with_choices({"projection_rank": 2, "update_rule": "sgd", "target_epsilon": 9.0})
    assert (chosen.projection_rank, chosen.update_rule, chosen.target_epsilon) == (8, "sgd", 6.0)
    assert args.update_rule != "sgd"


def test_a_copy_is_checked_again():
    with pytest.raises(PrivacyError, match="max_grad_norm=-1"):
        dataclasses.replace(make(), max_grad_norm=-1.0)


def test_the_command_line_takes_long_and_short_names():
    long = parse(
        *("--target_epsilon", "3", "--target_delta", "1e-6"),
        *("--projection_rank", "8", "--projection-update-steps", "50", "--max_grad_norm", "0.5"),
    )
    short = parse(*"--eps 3 --delta 1e-6 --r 8 --F 50 --max_grad_norm 0.5".split())
    expected = make(
        target_epsilon=3.0,
        target_delta=1e-6,
        projection_rank=8,
        projection_update_steps=50,
        max_grad_norm=0.5,
    )
    assert long.to_dict() == short.to_dict() == expected.to_dict()


def test_the_command_line_accepts_none_as_the_noise_multiplier():
    args = parse("--noise_multiplier", "0", "--max_grad_norm", "inf")
    assert (args.noise_multiplier, args.max_grad_norm, args.private) == (0.0, math.inf, False)


def test_help_explains_every_field_and_shows_the_short_names():
    page = HfArgumentParser(DPGrapeTrainingArguments).format_help()
    whole = "".join(page.split())
    for name, field in OWN_FIELDS.items():
        text = field.metadata["help"]
        assert len(text.split()) > 5, name
        assert text.rstrip().endswith("."), name
        assert f"--{name}" in page
        assert "".join(text.split()) in whole
    for short in ALIASES:
        assert f"--{short} " in page


def test_a_number_that_yaml_reads_as_text_is_a_number(tmp_path):
    """In YAML 1.1 a float needs a point: ``1e-5`` is text."""
    file = tmp_path / "args.yaml"
    file.write_text(
        "output_dir: unused\nreport_to: none\nuse_cpu: true\n"
        "target_epsilon: 6\ntarget_delta: 1e-5\nmax_grad_norm: 5e-1\n"
    )
    assert isinstance(yaml.safe_load(file.read_text())["target_delta"], str)
    args = HfArgumentParser(DPGrapeTrainingArguments).parse_yaml_file(file)[0]
    assert (args.target_epsilon, args.target_delta, args.max_grad_norm) == (6.0, 1e-5, 0.5)
    file.write_text("output_dir: unused\neps: 6\ndelta: 1e-5\n")  # the parser drops these names
    with pytest.raises(PrivacyError, match="YAML or JSON file needs these long names"):
        HfArgumentParser(DPGrapeTrainingArguments).parse_yaml_file(file)


VALUES = [
    *(("target_epsilon", value) for value in (0.0, math.inf, math.nan)),
    *(("target_delta", value) for value in (0.0, 1.0, math.nan)),
    *(("noise_multiplier", value) for value in (-1.0, math.inf, math.nan)),
    *(("max_grad_norm", value) for value in (-0.5, math.nan, math.inf)),
    *((name, 0) for name in ("expected_batch_size", "num_samples", "max_examples_per_unit")),
    *((name, 0) for name in ("projection_rank", "projection_update_steps")),
    *((name, "little") for name in ("target_delta", "max_grad_norm", "noise_multiplier")),
    ("projection_seed", -1),
    ("projection", "fourier"),
    ("engine", "hooks"),
    ("clipping", "adaptive"),
    ("label_smoothing_factor", 1.0),
    ("label_smoothing_factor", -0.1),
    ("accountant", "moments"),
]


@pytest.mark.parametrize(
    ("epsilon", "sigma"), [(None, None), (6.0, 1.0), (6.0, 0.0)], ids=["neither", "both", "zero"]
)
def test_exactly_one_of_budget_and_noise_is_given(epsilon, sigma):
    with pytest.raises(PrivacyError) as error:
        make(target_epsilon=epsilon, noise_multiplier=sigma)
    assert f"target_epsilon={epsilon}" in str(error.value)
    assert f"noise_multiplier={sigma}" in str(error.value)


@pytest.mark.parametrize("promise", [{"target_epsilon": 6.0}, {"noise_multiplier": 1.0}], ids=str)
def test_a_promise_needs_a_delta(promise):
    with pytest.raises(PrivacyError, match=r"target_delta=None.*1e-5"):
        DPGrapeTrainingArguments(**HOST | promise)


@pytest.mark.parametrize(("found", "on_cpu"), [("mps", True), ("xpu", True), ("cuda", False)])
def test_an_accelerator_with_unexamined_random_numbers_is_not_used(
    found, on_cpu, monkeypatch, caplog
):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(found))
    args = DPGrapeTrainingArguments(output_dir="x", eps=1.0, delta=1e-5)
    assert args.use_cpu is on_cpu
    assert (f"'{found}'" in caplog.text) is on_cpu
    assert args.device.type == "cpu"  # of this machine


def test_a_batch_on_each_device_of_nothing_is_refused():
    with pytest.raises(PrivacyError, match="expected_batch_size=0"):
        make(per_device_train_batch_size=0, learning_rate=1e-3)


@pytest.mark.parametrize("optim", ["sgd", "rmsprop", "adagrad"])
def test_optim_names_the_update_rule(optim):
    chosen = make(optim=optim)
    assert chosen.update_rule == optim
    assert chosen.with_choices({"update_rule": "momentum"}).update_rule == optim
    with pytest.raises(PrivacyError, match="two optimizers"):
        make(optim=optim, update_rule="momentum")


REFUSED = [
    ("auto_find_batch_size", True),
    ("fp16", True),
    ("deepspeed", {"train_batch_size": 8}),  # whether it is installed or not
    ("use_liger_kernel", True),
    ("neftune_noise_alpha", 5.0),
    ("optim_args", "amsgrad=True"),
    ("train_sampling_strategy", "batch_rebalance"),
    ("train_sampling_strategy", "sequential"),
    ("optim", "adafactor"),
    ("optim", "galore_adamw"),
    ("optim", "adamw_torch_8bit"),
    ("include_num_input_tokens_seen", "all"),
    ("include_num_input_tokens_seen", "non_padding"),
    ("save_strategy", "best"),
    ("load_best_model_at_end", True),
    ("lr_scheduler_type", "reduce_lr_on_plateau"),
    ("lr_scheduler_type", "greedy"),
]
EVALUATING = {"eval_strategy": "epoch", "save_strategy": "epoch"}


@pytest.mark.parametrize(("option", "value"), VALUES + REFUSED)
def test_a_bad_option_is_refused_with_its_name_and_value(option, value):
    budget = {"target_epsilon": None} if option == "noise_multiplier" else {}
    with pytest.raises(PrivacyError) as error:
        make(**EVALUATING | budget | {option: value})
    assert f"{option}={value!r}" in str(error.value)


def test_half_precision_asked_for_by_the_launcher_is_refused(monkeypatch):
    """``accelerate launch --mixed_precision fp16`` speaks through the environment."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    with pytest.raises(PrivacyError, match="fp16"):
        make()


@pytest.mark.parametrize(
    ("tracker", "variable", "default"),
    [(tracker, *pair) for tracker, pairs in TRACKERS.items() for pair in pairs],
)
def test_a_tracker_that_uploads_checkpoints_is_refused(tracker, variable, default, monkeypatch):
    trackers = {"report_to": ["tensorboard", tracker]}
    monkeypatch.delenv(variable, raising=False)
    if default == "false":
        assert make(**trackers).report_to == trackers["report_to"]
        monkeypatch.setenv(variable, "checkpoint")
    with pytest.raises(PrivacyError, match=f"report_to=.*{tracker}.*{variable}"):
        make(**trackers)
    assert make().report_to == []  # what a tracker reads that is not used
    if variable:
        monkeypatch.setenv(variable, "False")
        assert make(**trackers).report_to == trackers["report_to"]


def test_every_tracker_of_transformers_is_known():
    assert set(INTEGRATION_TO_CALLBACK) <= set(TRACKERS)
    assert make(report_to=["trackio"]).report_to == ["trackio"]
    with pytest.raises(PrivacyError, match="new_tracker is not a supported"):
        make(report_to=["new_tracker"])


@pytest.mark.parametrize("value", ["all", "gradients"])
def test_a_tracker_that_logs_gradients_is_refused(value, monkeypatch):
    trackers = {"report_to": ["wandb"]}
    monkeypatch.setenv("WANDB_WATCH", value)
    with pytest.raises(PrivacyError, match=f"WANDB_WATCH='{value}'"):
        make(**trackers)
    assert make().report_to == []
    monkeypatch.setenv("WANDB_WATCH", "parameters")
    assert make(**trackers).report_to == ["wandb"]


def test_following_a_metric_is_allowed_on_data_declared_public():
    for option, value in REFUSED[-3:]:
        args = make(**EVALUATING | {option: value, "eval_data_is_public": True})
        assert args.eval_data_is_public


def test_token_counts_are_allowed_without_noise():
    args = make(**NO_NOISE, include_num_input_tokens_seen=True)
    assert args.include_num_input_tokens_seen == "all"


@pytest.mark.parametrize(
    "kwargs", [None, {"every_n_layers": 2}, '{"use_reentrant": false}'], ids=str
)
def test_checkpointing_is_never_reentrant(kwargs):
    kept = dict(kwargs) if isinstance(kwargs, dict) else {}
    args = make(activation_checkpointing=True, activation_checkpointing_kwargs=kwargs)
    with pytest.warns(FutureWarning, match="gradient_checkpointing"):
        by_old_name = make(gradient_checkpointing=True, gradient_checkpointing_kwargs=kwargs)
    for name in ("activation_checkpointing", "gradient_checkpointing"):
        assert getattr(args, name) is getattr(by_old_name, name) is True
        settings = getattr(args, f"{name}_kwargs")
        assert settings == getattr(by_old_name, f"{name}_kwargs") == kept | {"use_reentrant": False}
    assert kwargs == kept or not kept


@pytest.mark.parametrize("kwargs", [{"use_reentrant": True}, '{"use_reentrant": true}'])
def test_reentrant_checkpointing_is_refused(kwargs):
    with pytest.raises(PrivacyError, match="'use_reentrant': True"):
        make(activation_checkpointing=True, activation_checkpointing_kwargs=kwargs)
    with (
        pytest.warns(FutureWarning, match="deprecated"),
        pytest.raises(PrivacyError, match="'use_reentrant': True"),
    ):
        make(gradient_checkpointing=True, gradient_checkpointing_kwargs=kwargs)
