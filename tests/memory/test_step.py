"""The simulated memory of a step: equal to a real step's, and within what the project promises."""

from itertools import product

import pytest
import torch
from torch import Tensor
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn import functional
from transformers import OPTConfig, RobertaConfig, ViTConfig

from dp_grape_hf.errors import PrivacyError, UnsupportedModelError
from dp_grape_hf.gradients import flat, layerwise
from dp_grape_hf.memory import (
    ACTIVATIONS,
    ADAMW,
    COMPARED,
    DP_GRAPE,
    PROJECTIONS,
    WEIGHTS,
    ModelOfConfig,
    Setting,
    Step,
    Timeline,
    fake_tensors,
    prepared,
    simulate as simulate_step,
)
from dp_grape_hf.memory.planning import MOST_SAMPLES, largest_batch
from dp_grape_hf.memory.step import DP_ADAM, compared
from dp_grape_hf.memory.timeline import KINDS, PER_SAMPLE, SUMS, TEMPORARY
from tests.support.trainers import TinyForSequenceClassification

GIB = 2**30
SLOW = pytest.mark.slow


def roberta(hidden, layers, heads, **more):
    return RobertaConfig(
        **{"hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": layers},
        num_attention_heads=heads,
        architectures=["RobertaForSequenceClassification"],
        **more,
    )


def opt(hidden, layers, heads, **more):
    return OPTConfig(
        **{"hidden_size": hidden, "word_embed_proj_dim": hidden, "ffn_dim": 4 * hidden},
        **{"num_hidden_layers": layers, "num_attention_heads": heads},
        architectures=["OPTForCausalLM"],
        **more,
    )


SMALL = {"vocab_size": 1000, "max_position_embeddings": 70}
FAMILIES = {
    "roberta": roberta(64, 2, 4, **SMALL),
    "opt": opt(64, 2, 4, **SMALL),
    "vit": ViTConfig(  # its embeddings have the generic rule
        **{"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "image_size": 32, "patch_size": 4},
        architectures=["ViTForImageClassification"],
    ),
}


def described(family, length=64):
    return ModelOfConfig(FAMILIES[family] if isinstance(family, str) else family, None, length)


def simulate(family, setting, length=64, gpu=True):
    model = described(family, length)
    return simulate_step(model.build, model.batch, setting, gpu=gpu)


@pytest.mark.filterwarnings("ignore:Module is None")  # the tracker's own
@pytest.mark.parametrize(
    ("family", "setting"),
    [
        ("opt", Setting(DP_GRAPE, 8)),
        *(
            pytest.param(family, setting, marks=SLOW)
            for family, setting in (
                *(("opt", compared(m, Setting(batch_size=8))) for m in COMPARED if m != DP_GRAPE),
                ("opt", Setting(DP_GRAPE, 8, gradient_checkpointing=True)),
                ("opt", Setting(DP_GRAPE, 8, dtype=torch.bfloat16)),
                ("roberta", Setting(DP_GRAPE, 8)),
                ("roberta", Setting(DP_GRAPE, 8, projection="principal", rank=4)),
                *(("roberta", Setting(m, 8)) for m in ("dp_lora", "dp_galore", "dpzero")),
                ("roberta", Setting("dp_lora", 8, dtype=torch.bfloat16)),
                ("roberta", Setting(DP_ADAM, 8)),
                ("vit", Setting(DP_GRAPE, 8)),
            )
        ),
    ],
)
def test_a_simulated_step_uses_the_memory_of_a_real_one(family, setting):
    simulated = simulate(family, setting, gpu=False)
    model = prepared(described(family).build(setting.dtype), setting)
    inputs = described(family).batch(8)
    if "attention_mask" in inputs:
        inputs["attention_mask"][:, -1] = 0  # a simulation takes it that there is padding
    step = Step(model, inputs, setting)
    for _ in range(2):  # a step leaves nothing over
        step.run()
    assert step.timeline.peak().total == pytest.approx(simulated.total, rel=0.002)
    if (family == "vit" and setting.method != ADAMW) or setting.method in ("dp_lora", "dpzero"):
        return  # the tracker cannot see vmap's tensors; adapters and function modes break its hooks
    if setting.projection == "principal":
        return  # nor follow a module that is called several times in a step
    tracker = MemTracker()
    tracker.track_external(model, step.optimizer, *inputs.values())
    with tracker:
        step.run()
    real = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    assert simulated.total == pytest.approx(real, rel=0.03)


@pytest.mark.slow
def test_a_simulation_does_not_change_torch_or_its_random_state():
    before = torch.get_rng_state()
    functions = functional.dropout, functional.scaled_dot_product_attention
    simulate("roberta", Setting(batch_size=2))
    assert torch.equal(torch.get_rng_state(), before)
    assert functions == (functional.dropout, functional.scaled_dot_product_attention)
    assert type(torch.empty(1)) is Tensor


def test_a_timeline_finds_the_peak_and_its_parts():
    timeline = Timeline()
    weight = torch.zeros(256)  # 1 KiB
    timeline.label(WEIGHTS, weight)
    with timeline:
        torch.zeros(2**20)  # before the step: not its peak
        timeline.phase = "forward"
        kept = torch.zeros(512)
        torch.zeros(256)  # freed within the phase
        alias = kept.view(2, 256)[0]  # memory of its own it has not
        timeline.phase = "backward"
        gradient = torch.zeros(1024)
        small = torch.zeros(1)  # takes a block of 512 bytes
        del kept, alias
        torch.zeros(128)
    timeline.label(PER_SAMPLE, [gradient])  # known afterwards only
    peak = timeline.peak()
    of_kinds = {WEIGHTS: 1024, ACTIVATIONS: 2048, PER_SAMPLE: 4096, TEMPORARY: 512}
    assert peak.kinds == dict.fromkeys(KINDS, 0) | of_kinds
    assert peak.phase == "backward"
    assert small.numel() == 1


@SLOW
def test_measuring_principal_directions_takes_less_than_a_training_step():
    peak = simulate("roberta", Setting(DP_GRAPE, 16, projection="principal", rank=4))
    given = (
        2 * (3 * 64 + 256) + 64
    )  # numbers, to the layers and the head; queries, keys and values share theirs
    assert peak.kinds[PROJECTIONS] == pytest.approx(4 * 4 * given, rel=0.1)  # blocks of 512
    assert peak.phase == "backward"


@pytest.mark.slow
def test_activations_are_computed_again_where_a_gpu_is_simulated(monkeypatch):
    setting, config = Setting(batch_size=16), roberta(64, 6, 4, **SMALL)
    on_gpu = simulate(config, setting).total
    monkeypatch.setattr(layerwise, "RECOMPUTABLE", ())
    assert on_gpu < simulate(config, setting).total


@pytest.mark.slow
def test_summed_gradients_are_those_of_the_release(monkeypatch):
    monkeypatch.setattr(flat, "MOST", 0)
    small_batch = simulate("opt", Setting(DP_ADAM, 1), length=2)
    assert small_batch.phase in ("clip", "release", "update")
    assert small_batch.kinds[SUMS] > 0.5 * small_batch.kinds[WEIGHTS]


@pytest.mark.parametrize("mask", [None, torch.bool, torch.float32])
@pytest.mark.parametrize("groups", [1, 2])
def test_the_gpus_attention_has_the_shapes_of_torchs(mask, groups):
    def attend():
        query = torch.zeros(2, 4, 6, 8, requires_grad=True)
        key, value = (torch.zeros(2, 4 // groups, 6, 8, requires_grad=True) for _ in range(2))
        bias = None if mask is None else torch.zeros(2, 1, 6, 6, dtype=mask)
        output = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=bias, dropout_p=0.1, enable_gqa=groups > 1
        )
        return output, *torch.autograd.grad(output.sum(), (query, key, value))

    with fake_tensors():
        fake = attend()
    assert [(x.shape, x.dtype) for x in fake] == [(x.shape, x.dtype) for x in attend()]


def test_gpus_store_no_attention_matrix_and_byte_masks_for_dropout():
    on_gpu, on_cpu = (
        simulate("roberta", Setting(ADAMW, 4), gpu=gpu).kinds[ACTIVATIONS] for gpu in (True, False)
    )
    assert on_gpu < 0.8 * on_cpu
    with fake_tensors():
        timeline = Timeline()
        timeline.phase = "forward"
        with timeline:
            x = torch.zeros(1024, requires_grad=True)
            kept = functional.dropout(x, 0.5)
        assert kept.requires_grad
        assert functional.dropout(x, 0.5, training=False) is x
    assert timeline.peak().total == 4096 + 4096 + 1024


class SelectingForSequenceClassification(TinyForSequenceClassification):
    """Keeps positive numbers only: how many is not known without contents."""

    def forward(self, x, labels=None, id=None):
        return super().forward(x[x > 0].view(len(x), -1), labels)


def test_memory_that_depends_on_contents_is_refused():
    with pytest.raises(UnsupportedModelError, match="depends on the contents"):
        simulate_step(
            lambda dtype: SelectingForSequenceClassification(),
            lambda size: {"x": torch.ones(size, 6), "labels": torch.zeros(size).long()},
            Setting(batch_size=2),
        )


def test_an_unknown_method_is_refused_by_name():
    with pytest.raises(PrivacyError, match="method='sgd'"):
        simulate("roberta", Setting("sgd"))


PEAKS = {
    "a line": lambda size: 2_000 + 200 * size,
    "a constant": lambda size: 1_000,
    "never": lambda size: 10**9,
    "the update of small batches": lambda size: max(5_300, 2_000 + 200 * size),
    "two lines": lambda size: max(20_000 + 2 * size, 10_000 + 400 * size),
    "whole blocks": lambda size: 512 * -(-(2_000 + 200 * size) // 512),
    "a square": lambda size: size * size,
}


@pytest.mark.parametrize("name", PEAKS)
def test_the_largest_batch_fits_and_the_next_does_not(name):
    peak, asked = PEAKS[name], list[int]()

    def simulated(size):
        asked.append(size)
        return peak(size)

    for limit, start in product((1_000, 5_300, 24_000, 80_000), (1, 8, 40, 10_000)):
        asked.clear()
        largest = largest_batch(simulated, limit, start)
        assert largest == 0 or peak(largest) <= limit
        assert largest == MOST_SAMPLES or peak(largest + 1) > limit
        assert len(asked) == len(set(asked)) <= 2 * MOST_SAMPLES.bit_length()


# The shapes of public models. Nothing is downloaded: a simulation needs no weights.
ROBERTA_LARGE = roberta(
    1024, 24, 16, vocab_size=50265, max_position_embeddings=514, type_vocab_size=1
)


@SLOW
@pytest.mark.parametrize(
    ("model", "length", "setting", "most"),
    [
        pytest.param(ROBERTA_LARGE, 128, Setting(batch_size=40), 11.0, id="roberta-large"),
        pytest.param(opt(2048, 24, 32), 512, Setting(batch_size=8), 16.5, id="opt-1.3b"),
    ],
)
def test_a_large_model_takes_no_more_than_promised(model, length, setting, most):
    assert simulate(model, setting, length).total <= most * GIB


@SLOW
@pytest.mark.parametrize("size", [1, 128])
def test_dp_grape_takes_less_than_adamw_at_every_batch_size(size):
    ours, theirs = (simulate(ROBERTA_LARGE, Setting(m, size), 128).total for m in (DP_GRAPE, ADAMW))
    assert ours < 0.9 * theirs
