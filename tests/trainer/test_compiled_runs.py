"""Runs with ``torch_compile=True``."""

import pytest
import torch
from torch._dynamo.utils import counters

from tests.support.models import only, without_dropout
from tests.support.trainers import EXACT, examples_of, trained_in

pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning")  # the tracer's


@pytest.mark.slow
def test_a_compiled_run_ends_with_the_uncompiled_weights(tmp_path):
    """The batches of a physical size are padded to it, and evaluation is not compiled."""
    case, found = only("roberta-classifier"), []
    settings = EXACT | {"per_device_train_batch_size": 5, "expected_batch_size": 12}
    settings |= {"max_steps": 3, "projection_update_steps": 2, "learning_rate": 0.1}
    settings |= {"update_rule": "sgd"}  # Adam would divide rounding by itself
    for compiled in ({}, {"torch_compile": True, "torch_compile_backend": "aot_eager"}):
        torch._dynamo.reset()
        counters.clear()
        trainer = trained_in(
            tmp_path / f"{len(compiled)}",
            model=without_dropout(case.model(num_hidden_layers=1)),
            train_dataset=examples_of("roberta-classifier"),
            eval_dataset=examples_of("roberta-classifier"),
            eval_data_is_public=True,
            **settings,
            **compiled,
        )
        trainer.evaluate()
        found.append(trainer.model.state_dict())
    assert counters["stats"]["unique_graphs"] == 1
    for name, weight in found[0].items():
        torch.testing.assert_close(found[1][name], weight, rtol=1e-4, atol=1e-6)
