"""What is chosen follows from public numbers, does what it says, and is left alone where it is
given."""

import re
from dataclasses import replace
from functools import partial
from itertools import islice

import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    DebertaV2Config,
    DistilBertConfig,
    ElectraConfig,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    MPNetConfig,
    RobertaConfig,
    set_seed,
)

from dp_grape_hf.accounting import usual_batch_size
from dp_grape_hf.arguments import PrivacyPlan
from dp_grape_hf.choosing import (
    Rates,
    Setting,
    average_at_first,
    clipped_apart,
    is_pretrained,
    last_layer,
    rate_warnings,
    train_matrices_only,
)
from dp_grape_hf.choosing.rates import Group
from dp_grape_hf.cli.main import main
from dp_grape_hf.gradients import RewardLoss, loss_for
from dp_grape_hf.ledger import CARD_NAME, LEDGER_NAME, Earlier, Ledger
from dp_grape_hf.projections import on_inputs
from dp_grape_hf.trainer import chosen
from tests.support.choosing import WORDS, examples, trainer_of
from tests.support.ledgers import MECHANISM, ledger_of
from tests.support.marks import slow_but
from tests.support.trainers import Examples, make_args

WIDTH = 16


def config(**changes):
    sizes = {"vocab_size": WORDS, "hidden_size": WIDTH, "num_hidden_layers": 3}
    more = {"num_attention_heads": 2, "intermediate_size": 32, "num_labels": 3}
    return BertConfig(**sizes | more | changes)


@torch.no_grad()
def trained(model):
    for module in model.modules():
        if "Norm" in type(module).__name__:
            module.weight.uniform_(0.9, 1.1)
    return model


def pretrained(folder, model=None):
    set_seed(0)
    model = trained(model or BertForSequenceClassification(config()))
    model.save_pretrained(folder)
    return AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3).eval()


def text(size=4, length=8):
    return {"input_ids": torch.randint(5, WORDS, (size, length))}


def of_the_run(suggestion):
    """What the first table of a suggestion says, by name."""
    first = suggestion.split("\n\n")[1]
    rows = (re.split(" {2,}", line, maxsplit=1) for line in first.splitlines())
    return {name: value for name, value in rows if name}


@pytest.mark.parametrize(("samples", "passes"), [(2635, 3), (60_000, 1), (1024, 10), (100_000, 30)])
def test_a_batch_grows_with_the_root_of_what_is_read(samples, passes):
    size = usual_batch_size(samples, passes)
    assert size == pytest.approx(0.8 * (samples * passes) ** 0.5, abs=0.5)
    assert usual_batch_size(samples, 4 * passes) == pytest.approx(2 * size, rel=0.02)


@pytest.mark.parametrize(
    ("samples", "passes", "steps", "batch"),
    [
        (1000, 2, 50, 40),
        (2635, 3, 200, 40),
        *((3000, 3, 5, 300), (40, 3, 3, 9)),  # at most a tenth, and more of few
        (10, 1000, None, 10),  # no more than there are
    ],
)
def test_given_steps_decide_a_batch_of_at_most_a_tenth(samples, passes, steps, batch):
    assert usual_batch_size(samples, passes, steps) == batch


def setting(rule, schedule, bands=(1.0,), **settings):
    of_a_run = dict.fromkeys(Setting._fields)
    given = {"rule": rule, "schedule": schedule, "bands": bands, "settings": settings}
    return Setting(**of_a_run | given)


def test_the_walk_of_momentum_is_that_of_its_sum():
    """A noise n at step k has moved a number by (1 - b^(T-k)) / (1 - b) at the end."""
    beta, steps = 0.9, 40
    weights = [(1 - beta ** (steps - k)) / (1 - beta) for k in range(steps)]
    expected = 0.3 * sum(w**2 for w in weights) ** 0.5
    found = setting("momentum", [1.0] * steps, momentum=beta).walk(0.3)
    assert found == pytest.approx(expected, rel=0.1)


def test_the_walk_of_sgd_follows_the_schedule():
    schedule = [1.0, 0.5, 0.25]
    expected = 2.0 * sum(s**2 for s in schedule) ** 0.5
    assert setting("sgd", schedule).walk(2.0) == pytest.approx(expected, rel=0.1)


def test_the_walk_of_adam_does_not_depend_on_noise_size():
    small, large = (setting("adam", [1.0] * 50).walk(std) for std in (0.01, 10.0))
    assert small == pytest.approx(large, rel=1e-3)


def test_of_a_pretrained_model_matrices_and_head_are_trained(tmp_path):
    model = pretrained(tmp_path)
    train_matrices_only(model, "classifier")
    left = {n for n, p in model.named_parameters() if p.requires_grad}
    assert {"classifier.weight", "classifier.bias"} <= left
    assert all(
        ".weight" in n and "Norm" not in n and "embeddings" not in n
        for n in left - {"classifier.bias"}
    )
    assert "bert.encoder.layer.0.output.dense.weight" in left


@torch.no_grad()
def test_a_new_head_reads_averages_of_the_last_layers_inputs(tmp_path):
    model, batch = pretrained(tmp_path), text()
    assert average_at_first(model, model.classifier, batch) == "bert.encoder.layer.2"
    out = model.bert(**batch, output_hidden_states=True)
    given = out.hidden_states[2]
    average = given[:, 0] + 10 * given.mean(1)
    expected = nn.functional.layer_norm(average, (WIDTH,), eps=model.config.layer_norm_eps)
    torch.testing.assert_close(out.last_hidden_state[:, 0], expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(out.pooler_output, expected.tanh(), rtol=1e-3, atol=1e-3)


SHAPE = {"vocab_size": WORDS, "hidden_size": WIDTH, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 2, "intermediate_size": 32, "num_labels": 3}
ENCODERS = {
    "distilbert": DistilBertConfig(
        vocab_size=WORDS, dim=WIDTH, hidden_dim=32, n_layers=2, n_heads=2, num_labels=3
    ),
    "mpnet": MPNetConfig(**SHAPE),
    "roberta": RobertaConfig(**SHAPE),
    "electra": ElectraConfig(**SHAPE, embedding_size=WIDTH),
    "deberta": DebertaV2Config(**SHAPE),
}


@torch.no_grad()
@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_of_other_families_read_the_average_too(name, tmp_path):
    """But for the biases of positions, which MPNet adds to its attention and are small."""
    set_seed(0)
    model = pretrained(tmp_path, AutoModelForSequenceClassification.from_config(ENCODERS[name]))
    batch, output = text(2, 8), last_layer(model, text()).module
    assert average_at_first(model, output, batch) is not None
    out = model.base_model(**batch, output_hidden_states=True)
    given = out.hidden_states[-2]
    expected = nn.functional.layer_norm(given[:, 0] + 10 * given.mean(1), (WIDTH,))
    found = out.last_hidden_state[:, 0]
    assert float((found - expected).norm() / expected.norm()) < 0.02


def test_another_head_is_left_alone(tmp_path):
    trained = pretrained(tmp_path / "trained")
    trained.classifier.bias.data.fill_(0.1)
    set_seed(0)
    fresh = BertForSequenceClassification(config())  # no weights that say anything
    decoder = GPT2ForSequenceClassification(DECODER)
    for model, head in ((trained, "classifier"), (fresh, "classifier"), (decoder, "score")):
        before = {n: p.clone() for n, p in model.named_parameters()}
        assert average_at_first(model.eval(), getattr(model, head), text()) is None
        assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


DECODER = GPT2Config(
    vocab_size=WORDS, n_embd=WIDTH, n_layer=2, n_head=2, num_labels=3, pad_token_id=0
)


def test_a_new_head_is_clipped_apart(tmp_path):
    body = pretrained(tmp_path / "body")
    assert clipped_apart(body, "classifier") == "classifier"
    body.classifier.requires_grad_(False)
    head = pretrained(tmp_path / "head")
    head.bert.requires_grad_(False)
    set_seed(0)
    fresh = BertForSequenceClassification(config())
    vocabulary = trained(GPT2LMHeadModel(DECODER))
    for model, output in (
        *((body, "classifier"), (head, "classifier"), (fresh, "classifier")),
        (vocabulary, "lm_head"),
    ):
        assert clipped_apart(model, output) is None


def test_the_inputs_of_a_new_head_are_partially_whitened(tmp_path):
    set_seed(0)
    model = trained(GPT2ForSequenceClassification(DECODER))
    model.transformer.ln_f.weight.data[3] *= 40  # of a feature that is large in every text
    trainer = trainer_of(tmp_path / "out", model)
    assert trainer.plan.mechanism.clipped_apart == "score"
    projectors = trainer.private_run.projectors_at(0)
    read = []
    model.score.register_forward_pre_hook(lambda module, args: read.append(args[0].flatten(0, 1)))
    with torch.no_grad():
        for batch in trainer._public_inputs()():
            on_inputs(model.eval(), batch)
    features = torch.cat(read)
    matrix = projectors["score.weight"].matrix
    assert matrix.shape == (WIDTH, WIDTH)
    before, after = (
        torch.linalg.eigvalsh(given.T @ given / len(given))
        for given in (features, features @ matrix)
    )
    assert before[-1] / before.sum() > 0.9
    expected = before / (before / before.mean() + 0.1).sqrt()
    torch.testing.assert_close(after, expected, rtol=1e-2, atol=1e-4)
    trainer._choose_rates()
    size = float((features @ matrix).square().sum(1).mean().sqrt())
    own, schedule = trainer.plan.mechanism, [1.0] * trainer.plan.steps
    std = own.noise_multiplier * own.max_grad_norm / own.expected_batch_size
    walk = setting("momentum", schedule, own.bands, momentum=0.9).walk(std)
    in_logits = trainer.rates.head.rate * walk * size
    assert trainer.rates.head.effect == pytest.approx(in_logits, rel=0.05)


def test_pretrained_weights_are_recognised_by_norms_and_not_by_name(tmp_path):
    saved = pretrained(tmp_path)
    assert is_pretrained(saved)
    fresh = AutoModelForSequenceClassification.from_config(AutoConfig.from_pretrained(tmp_path))
    assert fresh.name_or_path == str(tmp_path)
    assert not is_pretrained(fresh)
    fresh.load_state_dict(saved.state_dict())
    assert is_pretrained(fresh)


def test_an_untrained_model_has_one_learning_rate_for_all_weights(tmp_path):
    set_seed(0)
    model = BertForSequenceClassification(config())
    trainer = trainer_of(tmp_path / "out", model)
    table = trainer.suggestion()
    assert all(p.requires_grad for p in model.parameters())
    assert trainer.plan.mechanism.clipped_apart is None
    assert (trainer.args.update_rule, trainer.args.projection_rank) == ("sgd", 16)
    assert trainer.args.lr_scheduler_type == "linear"
    assert of_the_run(table)["schedule"] == "linear"
    rates = trainer.rates
    assert rates.fresh
    assert len({*rates.by_name.values()}) == 1


@pytest.mark.parametrize(("eps", "bound"), [(0.5, "noise"), (1000.0, "step")])
def test_an_untrained_models_rate_is_limited_by_noise_or_steps(eps, bound, tmp_path):
    set_seed(0)
    trainer = trainer_of(tmp_path / "out", BertForSequenceClassification(config()), eps=eps)
    trainer.suggestion()
    layers = [m for m in trainer.model.modules() if isinstance(m, nn.Linear)]
    norm = sum(layer.out_features for layer in layers) ** 0.5
    size = norm / sum(layer.weight.numel() for layer in layers) ** 0.5
    steps = trainer.plan.steps
    linear = [1 - step / steps for step in range(steps)]
    std = trainer.rates.body.noise / trainer.rates.body.numbers**0.5
    by_noise = 2.7 * size / setting("sgd", linear).walk(std)
    by_steps = 0.15 * norm  # C is 1, and SGD moves by the rate
    expected = {"noise": by_noise, "step": by_steps}
    assert min(expected, key=lambda name: expected[name]) == bound
    assert trainer.rates.body.rate == pytest.approx(expected[bound], rel=1e-3)


def adapter(folder, config):
    return get_peft_model(pretrained(folder), config(task_type="SEQ_CLS"))


def biases(folder):
    model = pretrained(folder)
    for name, parameter in model.named_parameters():
        kept = "bias" in name or "Norm" in name or name.startswith("classifier")
        parameter.requires_grad_(kept)
    return model


WAYS = {
    "as it comes": (pretrained, {}),
    "SGD": (pretrained, {"update_rule": "sgd"}),
    "full gradients": (pretrained, {"method": "dp_adam", "update_rule": "momentum"}),
    "LoRA": (partial(adapter, config=LoraConfig), {"method": "dp_lora", "update_rule": "momentum"}),
    "DoRA": (
        partial(adapter, config=partial(LoraConfig, use_dora=True)),
        {"method": "dp_lora", "update_rule": "sgd"},
    ),
    "IA3": (
        partial(
            adapter,
            config=partial(
                IA3Config, target_modules=["key", "value"], feedforward_modules=["value"]
            ),
        ),
        {"method": "dp_adam", "update_rule": "momentum"},
    ),
    "BitFit": (biases, {"method": "dp_adam", "update_rule": "momentum"}),
}


@pytest.mark.parametrize("way", slow_but(("as it comes", "LoRA", "BitFit"), WAYS))
def test_learning_rates_do_not_grow_without_limit_as_noise_falls(way, tmp_path):
    make, changes = WAYS[way]
    rates, limits = [], []
    for eps in (0.5, 8.0, 1e5, 1e6):
        trainer = trainer_of(tmp_path / "out", make(tmp_path / "base"), eps=eps, **changes)
        table = trainer.suggestion()
        groups = trainer.rates.groups
        rates.append([group.rate for group in groups])
        limits.append([group.limit for group in groups])
        assert all(limit in table for limit in limits[-1])
    assert limits[0] == ["noise", "noise"]
    assert limits[2:] == [["stability", "stability"]] * 2
    assert rates[2] == pytest.approx(rates[3], rel=0.15)
    for low, middle, high in zip(*rates[:3], strict=True):
        assert low < middle < high


def test_adam_has_one_learning_rate_at_any_noise(tmp_path):
    """It divides noise by its size: what is left of it in the weights does not fall with it."""
    rates = []
    for eps in (8.0, 1e5):
        trainer = trainer_of(
            tmp_path / "out", pretrained(tmp_path / "base"), eps=eps, update_rule="adam"
        )
        trainer.suggestion()
        rates.append([group.rate for group in trainer.rates.groups])
    assert rates[0] == pytest.approx(rates[1], rel=0.1)


def test_steps_without_noise_change_features_by_at_most_the_limit(tmp_path):
    """The rule is run on a gradient of plain autograd, until its steps are equally long."""
    trainer = trainer_of(tmp_path / "out", pretrained(tmp_path / "base"), eps=1e6, max_steps=200)
    trainer.suggestion()
    assert trainer.rates.body.limit == "stability"
    model, rates = trainer.model.eval(), trainer.rates
    projectors = trainer.private_run.projectors_at(0)
    inputs = list(islice(trainer._public_inputs()(), 0, 5, 2))
    read = []
    model.classifier.register_forward_pre_hook(lambda module, args: read.append(args[0]))

    def features():
        read.clear()
        for batch in inputs:
            on_inputs(model, batch)
        return torch.cat(read)

    before = features()
    generator = torch.Generator().manual_seed(0)
    along = torch.randn(WIDTH, generator=generator)
    half = read[::2]
    sides = [torch.randint(2, (len(rows), 1), generator=generator) * 2 - 1 for rows in half]
    weights = {n: trainer.model.get_parameter(n) for n in rates.body.parameters}
    separated = (torch.cat(half) * along * torch.cat(sides)).sum()
    gradients = torch.autograd.grad(separated, [*weights.values()])
    projected = [projectors[n].project(g) for n, g in zip(weights, gradients, strict=True)]
    norm = torch.cat([z.flatten() for z in projected]).norm()
    with torch.no_grad():
        for (name, weight), z in zip(weights.items(), projected, strict=True):
            step = z * rates.body.most / norm * rates.body.rate * 10  # momentum of 0.9
            weight.sub_(projectors[name].lift(step))
        after = features()
    moved, known = after - after.mean(0), before.detach() - before.detach().mean(0)
    assert float((moved - known).norm() / known.norm()) == pytest.approx(0.6, rel=0.1)


def test_adam_moves_all_numbers_alike_whatever_their_gradients():
    adam = setting("adam", [1.0] * 9)
    steps = adam.one_step({"weight": torch.tensor([[1e-3, -2.0], [0.0, 0.5]])})["weight"]
    torch.testing.assert_close(steps, torch.tensor([[-1.0, 1.0], [0.0, -1.0]]), rtol=1e-3, atol=0)
    assert adam.one_step({"weight": torch.zeros(2)}) == {}


def test_epsilon_delta_and_passes_are_all_that_is_needed(tmp_path):
    trainer = trainer_of(tmp_path / "out", pretrained(tmp_path / "base"), logging_steps=1)
    trainer.train()
    assert trainer.rates.body.effect == pytest.approx(0.6, rel=0.1)
    assert trainer.rates.head.effect == pytest.approx(1.2, rel=1e-3)
    assert trainer.plan.mechanism.clipped_apart == "classifier"
    assert trainer.rates.body.most == trainer.rates.head.most == pytest.approx(0.5**0.5)
    assert trainer.plan.mechanism.clipping == "automatic"
    assert trainer.plan.mechanism.expected_batch_size == round(0.8 * 128**0.5)
    assert trainer.privacy_spent().epsilon <= 8
    groups = {group["lr"] for group in trainer.optimizer.param_groups}
    assert groups == {*trainer.rates.by_name.values()}  # which stay


@pytest.mark.parametrize(
    ("changes", "noise"),
    [
        ({"num_labels": 1}, 0.2),
        ({"num_labels": 3, "problem_type": "regression"}, 0.2),
        ({"num_labels": 3, "problem_type": "multi_label_classification"}, 1.2),
    ],
    ids=str,
)
def test_a_head_that_puts_out_numbers_bears_less_noise(changes, noise, tmp_path):
    pretrained(tmp_path / "base")
    model = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "base", ignore_mismatched_sizes=True, **changes
    )
    rows, number = examples(), changes["num_labels"]
    labelled = [{**row, "labels": [1.0] * number if number > 1 else 1.0} for row in rows]
    trainer = trainer_of(tmp_path / "out", model, train_dataset=Examples(labelled))
    said = trainer.suggestion()
    assert trainer.rates.head.effect == pytest.approx(noise, rel=1e-3)
    assert ("Labels are numbers" in said) == (f"adds {noise:g} to a number" in said) == (noise < 1)


def test_a_reward_is_no_number_that_labels_are():
    """Only the difference of two counts, in a logistic loss."""
    model = BertForSequenceClassification(config(num_labels=1))
    assert loss_for(model).regresses
    assert not RewardLoss(lambda model, inputs: torch.ones(()), None).regresses


def test_measuring_leaves_weights_and_random_numbers_as_they_were(tmp_path):
    trainer = trainer_of(tmp_path / "out", pretrained(tmp_path / "base").train())
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    state = torch.get_rng_state()
    trainer.private_run.projectors_at(0)
    ran = []
    trainer.model.classifier.register_forward_hook(lambda *call: ran.append(call))
    trainer._choose_rates()
    assert len(ran) == 1  # to find the layer; logits are not measured
    assert all(module.training for module in trainer.model.modules())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(p, before[n]) for n, p in trainer.model.named_parameters())


def test_a_continued_model_moves_by_half_as_much(tmp_path, monkeypatch):
    """Two equal runs find the weights equally well, so the second one moves by half as much."""
    first = trainer_of(tmp_path / "first", pretrained(tmp_path / "base"))
    first.train()
    first.save_model()

    def rates(size, name):
        model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "first")
        model.classifier.bias.data.fill_(size)
        second = trainer_of(tmp_path / name, model, earlier_data="other")
        second.start()
        share = "Continues a private model: 0.5" in second.suggestion()
        return second.rates, share

    for size, share in ((0.1, 0.5), (0.0, 1.0)):  # of the biases of the head
        of_second, says_so = rates(size, f"{size}")
        assert of_second.head.effect == pytest.approx(1.2 * share, rel=1e-3)
        assert says_so == (share < 1)
        with monkeypatch.context() as patched:
            patched.setattr(chosen, "_share", lambda *_: 1.0)
            whole, _ = rates(size, f"{size}, whole")
        expected = {name: share * rate for name, rate in whole.by_name.items()}
        assert of_second.by_name == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    ("steps", "sigma", "share"), [(0, 1.5, 1.0), (1, 1.5, 0.8), (1, 3.0, 16 / 17), (100, 1.5, 0.5)]
)
def test_a_run_counts_as_much_as_its_precision(steps, sigma, share, tmp_path):
    """With four releases of B = 64 and sigma = 1.5, after the releases of an earlier run."""
    earlier = Earlier(ledger_of(steps, replace(MECHANISM, noise_multiplier=sigma)), "a file", False)
    of_run = {"noise_multiplier": 1.5, "expected_batch_size": 64, "max_steps": 4}
    args = make_args(tmp_path, **of_run, target_delta=1e-5)
    assert PrivacyPlan(args, 1024, earlier).share_of_rates == pytest.approx(share)
    resumed = replace(earlier, resumed=True)  # a resumed run is no earlier one
    assert PrivacyPlan(args, 1024, resumed).share_of_rates == 1


def test_bands_raise_the_precision_of_their_sum():
    bands = {"noise": "banded", "coefficients": "[0.8, 0.6]"}
    plain, banded = MECHANISM.precision(8), replace(MECHANISM, **bands).precision(8)
    assert plain == pytest.approx(64**2 * 8 / 1.5**2)
    assert banded == pytest.approx(1.4**2 * plain)


def test_what_is_given_is_taken_as_it_is(tmp_path):
    given = {
        "max_grad_norm": 0.5,
        "r": 2,
        "update_rule": "adam",
        "lr_scheduler_type": "cosine",
        "max_steps": 3,
        "gradient_factors": {"bert": 2.0},
        "learning_rate_factors": {"classifier": 3.0},
    }
    trainer = trainer_of(
        tmp_path / "out", pretrained(tmp_path / "base"), expected_batch_size=7, **given
    )
    own = trainer.plan.mechanism
    assert (own.max_grad_norm, own.clipping, own.expected_batch_size) == (0.5, "flat", 7)
    assert own.factors_by_pattern == {"bert": 2.0}
    assert own.clipped_apart is None
    assert trainer.args.update_rule == "adam"
    assert trainer.args.lr_scheduler_type == "cosine"
    assert of_the_run(trainer.suggestion())["schedule"] == "cosine"
    assert {*trainer.private_run.ranks.values()} == {2}


def test_factors_multiply_the_chosen_learning_rates(tmp_path):
    rates = []
    for number, factors in enumerate((None, {"*": 0.5})):
        trainer = trainer_of(
            tmp_path / f"{number}", pretrained(tmp_path / "base"), learning_rate_factors=factors
        )
        trainer.suggestion()
        rates.append(trainer.rates.by_name)
    assert rates[1] == pytest.approx({name: rate / 2 for name, rate in rates[0].items()})


def test_with_a_rate_nothing_is_chosen(tmp_path):
    model = pretrained(tmp_path / "base")
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    trainer = trainer_of(tmp_path / "out", model, learning_rate=1e-3)
    assert trainer.args.lr_scheduler_type == "linear"
    assert all(p.requires_grad for p in trainer.model.parameters())
    assert all(torch.equal(p, before[n]) for n, p in trainer.model.named_parameters())
    own = trainer.plan.mechanism
    assert (own.clipping, own.expected_batch_size, own.projection_rank) == ("flat", 8, 16)


UNSUITABLE = [
    ({"learning_rate": 1e-6}, "if all examples agreed, a logit would move by"),
    ({"learning_rate": 100.0}, "The model would lose its pretraining"),
    ({"learning_rate": 100.0}, "to a logit. A label changes it by about 1"),
    ({"eps": 0.001}, "too few examples for this epsilon"),
]


@pytest.mark.parametrize(("changes", "said"), UNSUITABLE)
def test_unsuitable_settings_are_reported_before_the_first_step(changes, said, tmp_path, caplog):
    trainer = trainer_of(tmp_path / "out", pretrained(tmp_path / "base"), **changes)
    trainer.start()
    assert any(said in record.message for record in caplog.records)


@pytest.mark.parametrize(
    ("effect", "most", "chosen", "warns"),
    [(0.01, 1, False, 1), (0.1, 1, False, 0), (0.01, 3, False, 0), (0.01, 1, True, 0)],
)
def test_a_rate_too_small_without_a_new_head_is_reported(effect, most, chosen, warns):
    body = Group("body", ["weight"], 4, 2e-5, noise=2.0, most=most, effect=effect)
    warnings = rate_warnings(Rates({"weight": 2e-5}, body, None, False), chosen=chosen)
    assert ["at learning_rate=2e-05, even noise" in text for text in warnings] == [True] * warns


def test_no_warning_concerns_chosen_settings(tmp_path, caplog):
    trainer_of(tmp_path / "out", pretrained(tmp_path / "base"), eps=100.0).start()
    assert not [r for r in caplog.records if r.name.startswith("dp_grape_hf")]


def test_constant_signal_moves_a_parameter_by_the_sum_of_rates():
    sizes = torch.tensor([0.0, 2.0, 7.0])
    assert setting("sgd", [1.0, 0.5]).push(sizes).tolist() == pytest.approx([0, 3, 10.5])
    assert setting("adam", [1.0] * 5).push(sizes).tolist() == pytest.approx([0, 5, 5])


@pytest.mark.slow
def test_a_run_begins_with_a_table_of_what_was_chosen(tmp_path, capsys):
    trainer = trainer_of(tmp_path / "out", pretrained(tmp_path / "base"), disable_tqdm=False)
    table = trainer.suggestion()
    assert "64 examples, epsilon 8 at delta 0.001" in table
    assert of_the_run(table)["schedule"] == "constant_with_warmup"
    assert "bert.encoder.layer.2, its input, becomes an average" in table
    trainer.train()
    shown = capsys.readouterr()
    assert table in shown.out + shown.err


@pytest.mark.slow
def test_ledger_and_card_state_the_chosen_rates_and_their_schedule(tmp_path):
    trainer = trainer_of(tmp_path / "out", pretrained(tmp_path / "base"))
    trainer.train()
    trainer.save_model()
    rates = trainer.rates
    said = Ledger.load(tmp_path / "out" / LEDGER_NAME).mechanism.chosen
    assert f"head: learning rate {rates.head.rate:.4g}" in said
    assert said.endswith("under the schedule constant_with_warmup")
    assert said in (tmp_path / "out" / CARD_NAME).read_text()
    verify = ["verify", str(tmp_path / "out")]
    assert main(verify) == 0


@pytest.mark.slow
def test_signal_is_logged_of_body_and_head(tmp_path):
    settings = {"logging_steps": 1, "eps": 1000.0, "noise": "independent"}
    trainer = trainer_of(tmp_path / "out", pretrained(tmp_path / "base"), **settings)
    trainer.train()
    logs = trainer.state.log_history[0]
    parts = [logs[f"noise_{group}"] for group in ("body", "head")]
    assert sum(part**2 for part in parts) == pytest.approx(logs["noise"] ** 2, rel=1e-3)
    assert logs["signal_head"] > 0
    assert logs["noise_head"] == pytest.approx(trainer.rates.head.noise, rel=1e-4)


@pytest.mark.slow
def test_suggest_chooses_what_a_run_does(tmp_path, capsys):
    base = tmp_path / "base"
    model, tokenizer = pretrained(base), AutoTokenizer.from_pretrained(base)
    settings = {"accountant": "pld", "processing_class": tokenizer}
    expected = trainer_of(tmp_path / "out", model, **settings).suggestion()
    options = "--num_labels 3 --num_samples 64 --eps 8 --delta 1e-3 --epochs 2"
    assert main(["suggest", str(tmp_path / "base"), *options.split()]) == 0
    assert capsys.readouterr().out == expected
    assert main(["suggest", str(tmp_path / "base"), *options.split(), "--learning_rate=9"]) == 0
    assert "noise would hide the labels" in capsys.readouterr().out


def test_suggest_refuses_a_model_that_is_not_there(tmp_path, capsys):
    options = "--num_samples 64 --eps 8 --delta 1e-3"
    assert main(["suggest", str(tmp_path / "none"), *options.split()]) == 2
    assert "has no config" in capsys.readouterr().err
