"""The released iterate: the last one, or an average."""

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dp_grape_hf.optimizers import ITERATES, Iterate, LastIterate
from dp_grape_hf.optimizers.iterates import AverageOfIterates, iterate

Parameters = dict[str, nn.Parameter]
MAKE: dict[str, Callable[[Parameters], Iterate]] = {
    "last": LastIterate,
    "average": lambda parameters: AverageOfIterates(parameters, decay=0.7),
}


def parameters(dtype: torch.dtype = torch.float32) -> Parameters:
    generator = torch.Generator().manual_seed(0)
    shapes = {"matrix": (4, 3), "vector": (5,), "number": ()}
    drawn = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {name: nn.Parameter(value.to(dtype)) for name, value in drawn.items()}


def move(weights: Parameters, step: int) -> dict[str, Tensor]:
    """Makes one step, the same for the same number, and returns copies of the weights."""
    generator = torch.Generator().manual_seed(100 + step)
    with torch.no_grad():
        for weight in weights.values():
            weight.add_(torch.randn(weight.shape, generator=generator).to(weight.dtype))
    return copies(weights)


def copies(weights: Parameters) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in weights.items()}


def released(kept: Iterate, weights: Parameters) -> dict[str, Tensor]:
    with kept.released():
        return copies(weights)


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def saved_and_loaded(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_every_iterate_is_tested_here() -> None:
    assert ITERATES.keys() == MAKE.keys()
    assert all(type(MAKE[name](parameters())) is cls for name, cls in ITERATES.items())


# ---- What is released ----


def test_the_last_iterate_is_what_the_model_has() -> None:
    weights = parameters()
    kept = LastIterate(weights)
    for i in range(3):
        last = move(weights, i)
        kept.update()
        assert_equal(released(kept, weights), last)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("decay", [0.0, 0.3, 0.999, 1 - 1e-9, 1.0])
def test_the_average_has_shares_that_decay_and_sum_to_one(decay: float, dtype: torch.dtype) -> None:
    weights, seen = parameters(dtype), []
    kept = AverageOfIterates(weights, decay)
    for i in range(6):
        seen.append(move(weights, i))
        kept.update()
        shares = torch.tensor([decay ** (i - j) for j in range(i + 1)], dtype=torch.float64)
        shares /= shares.sum()
        found = released(kept, weights)
        for name in weights:
            every = torch.stack([values[name].double() for values in seen])
            expected = torch.tensordot(shares, every, 1)
            tolerance = 2e-6 if dtype is torch.float32 else 2**-8
            torch.testing.assert_close(
                found[name].double(), expected, rtol=tolerance, atol=tolerance
            )


def test_an_average_of_bfloat16_weights_sees_steps_that_bfloat16_cannot_add_up() -> None:
    """Of 1 and 1 + 2**-7 in turn, the mean lies between two neighbours: it is kept, not lost."""
    weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    kept = AverageOfIterates({"weight": weight}, 1.0)
    for i in range(1000):
        with torch.no_grad():
            weight.fill_(1 + 2**-7 * (i % 2))
        kept.update()
    average = kept.state_dict()["values"]["weight"]
    assert average.dtype is torch.float32
    torch.testing.assert_close(average, torch.tensor([1 + 2**-8]), rtol=1e-5, atol=0)


# ---- In and out of the model ----


@pytest.mark.parametrize("name", MAKE)
def test_training_goes_on_after_a_look_as_if_there_had_been_none(name: str) -> None:
    weights, plain = parameters(), parameters()
    kept, other = MAKE[name](weights), MAKE[name](plain)
    for i in range(5):
        move(weights, i), move(plain, i)
        kept.update(), other.update()
        before = copies(weights)
        with kept.released():
            pass
        assert_equal(copies(weights), before)
    assert_equal(released(kept, weights), released(other, plain))


@pytest.mark.parametrize("name", MAKE)
def test_what_is_released_for_good_is_what_was_shown(name: str) -> None:
    weights = parameters()
    kept = MAKE[name](weights)
    for i in range(5):
        last = move(weights, i)
        kept.update()
    shown = released(kept, weights)
    kept.release_()
    assert_equal(copies(weights), shown)
    assert (name == "last") == all(torch.equal(shown[key], last[key]) for key in last)


@pytest.mark.parametrize("name", MAKE)
def test_weights_come_back_when_something_fails_inside(name: str) -> None:
    weights = parameters()
    kept = MAKE[name](weights)
    for i in range(4):
        last = move(weights, i)
        kept.update()
    with pytest.raises(KeyError), kept.released():
        raise KeyError("an evaluation that fails")
    assert_equal(copies(weights), last)
    kept.update()  # and it is usable again


def test_the_parameters_stay_the_objects_that_an_optimizer_holds() -> None:
    model = nn.Linear(3, 2)
    pointers = [parameter.data_ptr() for parameter in model.parameters()]
    kept = AverageOfIterates(dict(model.named_parameters()), 0.5)
    kept.update()
    with kept.released():
        assert [parameter.data_ptr() for parameter in model.parameters()] == pointers
    kept.release_()
    assert [parameter.data_ptr() for parameter in model.parameters()] == pointers
    assert all(
        parameter.grad_fn is None and parameter.requires_grad for parameter in model.parameters()
    )


# ---- State ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("saved_after", [0, 1, 4])
def test_a_saved_state_continues_as_if_it_had_never_been_saved(
    saved_after: int, name: str, dtype: torch.dtype
) -> None:
    weights = parameters(dtype)
    kept = MAKE[name](weights)
    for i in range(saved_after):
        move(weights, i)
        kept.update()
    state = saved_and_loaded(kept.state_dict())
    fresh = parameters(dtype)
    with torch.no_grad():
        for key, value in fresh.items():
            value.copy_(weights[key])
    resumed = MAKE[name](fresh)
    resumed.load_state_dict(state)
    for i in range(saved_after, 12):
        move(weights, i), move(fresh, i)
        kept.update(), resumed.update()
        assert_equal(released(resumed, fresh), released(kept, weights))


def test_a_loaded_state_shares_no_memory_with_its_source() -> None:
    weights = parameters()
    kept = AverageOfIterates(weights, 0.5)
    kept.update()
    state = kept.state_dict()
    before = {name: value.clone() for name, value in state["values"].items()}
    other = AverageOfIterates(parameters(), 0.5)
    other.load_state_dict(state)
    move(weights, 0)
    other._parameters["vector"].data.add_(1)
    other.update()
    assert_equal(state["values"], before)


# ---- Refusals ----


@pytest.mark.parametrize("name", MAKE)
def test_nothing_is_released_before_the_first_step(name: str) -> None:
    kept = MAKE[name](parameters())
    with pytest.raises(ValueError, match=r"update\(\) was not called"), kept.released():
        pass
    with pytest.raises(ValueError, match=r"update\(\) was not called"):
        kept.release_()


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("call", ["update", "release_", "released"])
def test_released_weights_are_never_taken_for_those_of_training(name: str, call: str) -> None:
    kept = MAKE[name](parameters())
    kept.update()

    def enter() -> None:
        with kept.released():
            pass

    calls = {"update": kept.update, "release_": kept.release_, "released": enter}
    with kept.released(), pytest.raises(ValueError, match=rf"{call}\(\) inside of released"):
        calls[call]()


def test_the_state_of_another_iterate_is_refused() -> None:
    weights = parameters()
    kept = AverageOfIterates(weights, 0.5)
    kept.update()
    with pytest.raises(ValueError, match=r"'average'.*'last'"):
        LastIterate(weights).load_state_dict(kept.state_dict())


@pytest.mark.parametrize(
    "other",
    [{"matrix": (4, 3), "number": ()}, {"matrix": (4, 3), "vector": (6,), "number": ()}],
    ids=["a name", "a shape"],
)
def test_the_state_of_other_parameters_is_refused_by_name(other: dict[str, Any]) -> None:
    kept = AverageOfIterates(parameters(), 0.5)
    kept.update()
    fresh = AverageOfIterates({n: nn.Parameter(torch.zeros(s)) for n, s in other.items()}, 0.5)
    with pytest.raises(ValueError, match=r"1 differ .* vector"):
        fresh.load_state_dict(kept.state_dict())


@pytest.mark.parametrize("decay", [-0.1, 1.1, float("nan")])
def test_a_decay_out_of_range_is_refused(decay: float) -> None:
    with pytest.raises(ValueError, match=r"decay="):
        AverageOfIterates(parameters(), decay)


def test_a_name_is_registered_once() -> None:
    with pytest.raises(ValueError, match="'last' is registered twice"):
        iterate("last")(LastIterate)
