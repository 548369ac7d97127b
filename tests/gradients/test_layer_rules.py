"""Every layer rule against single-sample autograd: a rule without a row in ``ROWS`` fails."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.opt.modeling_opt import OPTLearnedPositionalEmbedding
from transformers.models.t5.modeling_t5 import T5LayerNorm
from transformers.pytorch_utils import Conv1D

from dp_grape_hf import per_sample_gradients
from dp_grape_hf.gradients import ENGINES, flat
from dp_grape_hf.gradients.forms import SparseRows
from dp_grape_hf.gradients.rules import RULES, LayerRule, layer_rule, rule_for
from dp_grape_hf.projections import Projector, Side
from tests.gradients.functions import Function, mean_output
from tests.support.oracles import assert_exact, assert_gradients_equal, single_sample_gradients

B, T = 4, 3


def floats(*shape):
    return lambda batch_size: torch.randn(batch_size, *shape)


def indices(*shape, below=5):
    return lambda batch_size: torch.randint(0, below, (batch_size, *shape))


class CentredRMSNorm(nn.Module):
    def __init__(self, width, weight=1.0, variance_epsilon=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.full((width,), weight))
        self.variance_epsilon = variance_epsilon

    def forward(self, x):
        x = x - x.mean(-1, keepdim=True)
        return (
            x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon) * self.weight
        )


class OutsideRMSNorm(CentredRMSNorm):
    """Adds its epsilon to the root, which only small inputs feel."""

    def forward(self, x):
        return x / (x.square().mean(-1, keepdim=True).sqrt() + self.variance_epsilon) * self.weight


class GatedRMSNorm(CentredRMSNorm):
    def forward(self, x, gate):
        return super().forward(x * gate.sigmoid())


class CallsGated(GatedRMSNorm):
    def forward(self, x):
        return GatedRMSNorm.forward(self, x, gate=x)


class ScaledLinear(nn.Linear):
    def forward(self, x):
        return super().forward(x) * self.weight.sum()


class RenamedLinear(nn.Linear):
    """Computes what its base class computes."""


class CountingEmbedding(nn.Embedding):
    def forward(self, x):
        return super().forward(x) * super().forward(4 - x)


@dataclass(frozen=True)
class Row:
    """A layer, its input for B samples, and whether a closed form is expected to be used."""

    name: str
    layer: Callable[[], nn.Module]
    inputs: Callable[[int], Tensor]
    closed: bool = True
    flattened: bool = False  # the layer sees (B * T, ...)

    def __str__(self):
        return self.name


ROWS = [
    Row("linear", lambda: nn.Linear(6, 4), floats(6)),
    Row("linear, positions", lambda: nn.Linear(6, 9), floats(T, 6)),
    Row("linear, two kinds of positions", lambda: nn.Linear(6, 4), floats(2, T, 6)),
    Row("linear, many positions", lambda: nn.Linear(3, 4), floats(40, 3)),
    Row("linear, no bias", lambda: nn.Linear(6, 6, bias=False), floats(T, 6)),
    Row("linear, flattened", lambda: nn.Linear(6, 4), floats(T, 6), flattened=True),
    Row("linear, as long as the batch", lambda: nn.Linear(B, B), floats(B, B)),
    Row("linear, renamed", lambda: RenamedLinear(6, 4), floats(T, 6)),
    Row("linear, overridden", lambda: ScaledLinear(6, 4), floats(T, 6), closed=False),
    Row("conv1d", lambda: Conv1D(4, 6), floats(T, 6)),
    Row("conv1d, flat input", lambda: Conv1D(9, 6), floats(6)),
    Row("conv1d, flattened", lambda: Conv1D(6, 6), floats(T, 6), flattened=True),
    Row("embedding", lambda: nn.Embedding(5, 4), indices(T)),
    Row("embedding, repeated", lambda: nn.Embedding(5, 4), indices(30)),
    Row("embedding, one index each", lambda: nn.Embedding(5, 4), indices()),
    Row("embedding, padding", lambda: nn.Embedding(5, 4, padding_idx=2), indices(12)),
    Row("embedding, negative padding", lambda: nn.Embedding(5, 4, padding_idx=-1), indices(12)),
    Row("embedding, flattened", lambda: nn.Embedding(5, 4), indices(T), flattened=True),
    Row("embedding, two dimensions", lambda: nn.Embedding(5, 9), indices(2, 3)),
    Row("embedding, scaled", lambda: Gemma3TextScaledWordEmbedding(5, 4, 0, 3.0), indices(12)),
    Row("embedding, shifted", lambda: OPTLearnedPositionalEmbedding(8, 4), indices(6, below=2)),
    Row("embedding, two look-ups", lambda: CountingEmbedding(5, 4), indices(6)),
    Row("layer norm", lambda: nn.LayerNorm(6), floats(T, 6)),
    Row("layer norm, no bias", lambda: nn.LayerNorm(6, bias=False), floats(6)),
    Row("layer norm, two dimensions", lambda: nn.LayerNorm((T, 6), eps=0.1), floats(2, T, 6)),
    Row("layer norm, whole sample", lambda: nn.LayerNorm((T, 6)), floats(T, 6)),
    Row("layer norm, flattened", lambda: nn.LayerNorm(6), floats(T, 6), flattened=True),
    Row("rms norm", lambda: nn.RMSNorm(6), floats(T, 6)),
    Row("rms norm, epsilon", lambda: nn.RMSNorm(6, eps=0.1), floats(T, 6), flattened=True),
    Row("rms norm, two dimensions", lambda: nn.RMSNorm((T, 6)), floats(2, T, 6), closed=False),
    Row("rms norm of llama", lambda: LlamaRMSNorm(6), floats(T, 6)),
    Row("rms norm of gemma", lambda: GemmaRMSNorm(6), floats(T, 6)),
    Row("rms norm, centred", lambda: CentredRMSNorm(6), floats(T, 6), closed=False),
    Row("rms norm, centred, zero", lambda: CentredRMSNorm(6, 0.0), floats(T, 6), closed=False),
    Row("rms norm, epsilon outside", lambda: OutsideRMSNorm(6), floats(T, 6), closed=False),
    Row("rms norm, gated", lambda: CallsGated(6), floats(T, 6), closed=False),
    Row("rms norm of t5", lambda: T5LayerNorm(6), floats(T, 6)),
    Row("conv2d", lambda: nn.Conv2d(2, 3, 3), floats(2, 7, 6)),
    Row("conv2d, patches", lambda: nn.Conv2d(2, 3, 2, stride=2, bias=False), floats(2, 6, 6)),
    Row(
        "conv2d, all settings",
        lambda: nn.Conv2d(2, 3, (3, 2), stride=(2, 1), padding=(2, 1), dilation=(1, 2)),
        floats(2, 7, 6),
    ),
    Row("conv2d, valid", lambda: nn.Conv2d(2, 3, 3, padding="valid"), floats(2, 5, 5)),
    Row("conv2d, same", lambda: nn.Conv2d(2, 3, 3, padding="same"), floats(2, 5, 5)),
    Row("conv2d, groups", lambda: nn.Conv2d(4, 6, 3, groups=2), floats(4, 5, 5)),
    Row(
        "conv2d, reflected",
        lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"),
        floats(2, 5, 5),
        closed=False,
    ),
    Row("conv2d, frames", lambda: nn.Conv2d(2, 3, 2), floats(T, 2, 4, 4), flattened=True),
    Row("conv2d, depthwise", lambda: nn.Conv2d(4, 4, 3, padding=1, groups=4), floats(4, 5, 5)),
    Row(
        "conv2d, same and oblong", lambda: nn.Conv2d(2, 3, (5, 3), padding="same"), floats(2, 5, 5)
    ),
    Row("conv2d, one by one", lambda: nn.Conv2d(2, 3, 1, padding="same"), floats(2, 5, 5)),
    Row("conv2d, padded patches", lambda: nn.Conv2d(2, 3, 2, 2, padding=1), floats(2, 6, 6)),
    Row(
        "conv2d, patches of frames",
        lambda: nn.Conv2d(2, 3, 2, 2),
        floats(T, 2, 4, 4),
        flattened=True,
    ),
    Row("torch's conv1d", lambda: nn.Conv1d(2, 3, 2), floats(2, 7)),
    Row("conv3d", lambda: nn.Conv3d(2, 4, 2, stride=2, padding=1, groups=2), floats(2, 4, 3, 4)),
    Row("group norm", lambda: nn.GroupNorm(2, 4), floats(4, 3, 3), closed=False),
    Row("prelu", lambda: nn.PReLU(4), floats(4, 3), closed=False),
]
each_row = pytest.mark.parametrize("row", ROWS, ids=str)


class Wrapped(nn.Module):
    def __init__(self, row):
        super().__init__()
        self.layer, self.flattened = row.layer(), row.flattened
        with torch.no_grad():
            for parameter in self.layer.parameters():
                if "zero" not in row.name:
                    parameter.add_(torch.randn_like(parameter))

    def forward(self, x):
        if not self.flattened:
            return self.layer(x)
        return self.layer(x.flatten(0, 1)).unflatten(0, x.shape[:2])


def loss(outputs, labels):
    return outputs.reshape(outputs.shape[0], -1).sin().sum(1)


check = partial(assert_exact, loss=loss)


@each_row
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN:UserWarning")
def test_a_layers_gradients_equal_those_of_single_samples(row, engine):
    """By a closed form where it is exact; none belongs to a layer without a rule that applies."""
    model = Wrapped(row)
    assert (rule_for(model.layer) is not None) == row.closed
    for batch_size in (1, B):
        # Kernels that sum in another order for another batch size round otherwise.
        with torch.backends.mkldnn.flags(enabled=False):
            check(model, {"x": row.inputs(batch_size)}, engine=engine)
    shapes = {name: p.shape for name, p in model.named_parameters() if p.dim() == 2}
    for side in Side if shapes else ():
        projectors = {
            name: Projector(torch.randn(shape[side is Side.RIGHT], 2), side)
            for name, shape in shapes.items()
        }
        check(model, {"x": row.inputs(B)}, projectors, engine=engine)


def test_every_rule_has_a_row():
    covered = {type(row.layer()) for row in ROWS if row.closed}
    missing = {layer_type.__name__ for layer_type in RULES.keys() - covered}
    assert not missing, f"add a row to ROWS for {missing}"


@each_row
@pytest.mark.parametrize("engine", ENGINES)
def test_a_frozen_part_of_a_layer_leaves_the_rest_exact(row, engine):
    model = Wrapped(row)
    names = [name for name, _ in model.named_parameters()]
    for frozen in names if len(names) > 1 else []:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name != frozen)
        check(model, {"x": row.inputs(B)}, engine=engine)


@pytest.mark.parametrize("layer_type", [LlamaRMSNorm, GemmaRMSNorm, nn.RMSNorm])
def test_an_rms_norm_in_half_precision_keeps_its_closed_form(layer_type):
    for dtype in (torch.bfloat16, torch.float16):
        assert rule_for(layer_type(64).to(dtype)) is RULES[nn.RMSNorm]


@pytest.mark.parametrize("layer_type", [LlamaRMSNorm, GemmaRMSNorm, T5LayerNorm])
def test_the_output_of_rms_norm_has_its_modules_dtype(layer_type):
    """Under autocast the input has 16 bits, and the weight 32."""
    dtypes = []

    def compute(m, x):
        dtypes.append((hidden := m.norm(m.layer(x))).dtype)
        return hidden.float()

    model = Function(compute, layer=nn.Linear(6, 6), norm=layer_type(6))
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.randn(B, T, 6))
        per_sample_gradients(model, {"x": torch.randn(B, T, 6)}, loss=mean_output)
    assert len(dtypes) > 2
    assert len({*dtypes}) == 1


class Scaled(LlamaRMSNorm):
    def forward(self, hidden_states, times=1.0):
        return times * super().forward(hidden_states)


def test_rms_norm_with_further_inputs_runs_without_its_rule():
    model = Function(lambda m, x: m.norm(x, 3.0), norm=Scaled(6))
    inputs = {"x": torch.randn(B, T, 6)}
    gradients = per_sample_gradients(model, inputs, loss=mean_output)[1]
    expected = single_sample_gradients(model, inputs, {}, loss=mean_output)[1]
    assert_gradients_equal(gradients, expected)


def test_a_layer_that_looks_like_another_has_no_rule():
    no_epsilon, scaled = LlamaRMSNorm(6), nn.Linear(6, 4)
    del no_epsilon.variance_epsilon
    scaled.scale = nn.Parameter(torch.randn(4))
    for layer in (GatedRMSNorm(6), no_epsilon, scaled):
        assert rule_for(layer) is None


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_the_parameters_behind_a_reparametrised_weight_have_exact_gradients():
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 4)))
    gradients = check(model, {"input": torch.randn(B, 6)})
    assert set(gradients) == {name for name, _ in model.named_parameters()}


def test_a_layer_type_has_one_rule():
    before = dict(RULES)
    with pytest.raises(ValueError, match="Linear has a rule already"):
        layer_rule(nn.Linear)(LayerRule)
    assert before == RULES


def test_a_table_is_never_materialised_for_each_sample(monkeypatch):
    monkeypatch.setattr(flat, "MOST", 50 * 2 - 1)
    model = Wrapped(Row("", lambda: nn.Embedding(50, 4), indices(T)))
    x = torch.randint(0, 50, (B, T))
    for projectors in ({}, {"layer.weight": Projector(torch.randn(4, 2), Side.RIGHT)}):
        _, gradients = per_sample_gradients(model, {"x": x}, projections=projectors, loss=loss)
        assert isinstance(gradients["layer.weight"], SparseRows)
        assert gradients["layer.weight"].values.shape == (B, T, 2 if projectors else 4)


@pytest.mark.parametrize(("side", "kept"), [(Side.RIGHT, 2 + 1), (Side.LEFT, 16)])  # 1: of bias
def test_only_the_projected_input_survives_the_forward_pass(side, kept):
    model = Wrapped(Row("", lambda: nn.Linear(16, 16), floats(T, 16)))
    model(torch.randn(B, T, 16))
    projectors = {"layer.weight": Projector(torch.randn(16, 2), side)}
    saved = []

    def pack(tensor):
        saved.append(tuple(tensor.shape))
        return tensor

    def linear(outputs, labels):
        return outputs.flatten(1).sum(1)  # saves nothing itself

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        per_sample_gradients(
            model, {"x": torch.randn(B, T, 16)}, projections=projectors, loss=linear
        )
    assert {shape for shape in saved if shape[0] == B} == {(B, T, kept)}
