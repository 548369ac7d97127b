"""Runs private steps on a device that is not there: what would be on two devices fails here.

    python -m tests.models.dry_run --only "OPT|RoBERTa|ViT"

Most of what fails when a program meets its first GPU is a tensor, or a generator, that is on the
CPU. This needs no GPU and no build of torch for one: torch lets Python register a device, and fake
tensors have one without contents. A step of every method, with each way to clip and to compute
norms, is run on it for the models of ``tests.models``. The exit status is 1 if an operation was
given tensors of two devices, or a generator of another device than its result.

What depends on contents (the examination of a first batch), or on a kernel, is not seen; a CUDA
device then runs ``python -m recipes.gpu_report``.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from tqdm import tqdm

from dp_grape_hf.errors import PrivacyError, UnsupportedModelError
from dp_grape_hf.memory import DP_GRAPE, Setting, Step, fake_tensors, prepared
from dp_grape_hf.projections import PRINCIPAL
from recipes.paper.memory import every_method

DEVICE = "absent"
BATCH = 2
WRONG = re.compile(r"two (different )?devices|another device")
"""What torch, or the check of generators, says of a mixture."""

Generator = torch.Generator


MODULE = SimpleNamespace(
    is_available=lambda: True,
    is_initialized=lambda: True,
    current_device=lambda: 0,
    device_count=lambda: 1,
    _is_in_bad_fork=lambda: False,
    manual_seed_all=lambda seed: None,
    get_rng_state=lambda device=None: torch.zeros(16, dtype=torch.uint8),
    set_rng_state=lambda state, device=None: None,
    get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
)
"""What torch asks of the module of a device."""


class _Generator(Generator):
    """A generator of the CPU that says it is of the device it was made for."""

    def __new__(cls, device="cpu"):
        made = Generator.__new__(cls)
        made.place = torch.device(device)
        return made

    @property
    def device(self):
        return self.place


class _Checks(TorchFunctionMode):
    """Compares generators with what they fill, which fake tensors do not.

    Numbers that torch would put on the device itself are made on the CPU and put there.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            index = tuple(torch.tensor(i) if isinstance(i, list) else i for i in index)
            args = (args[0], index, *args[2:])
        if func in (torch.tensor, torch.as_tensor) and _is_absent(kwargs.get("device")):
            here = func(*args, **kwargs | {"device": "cpu"})
            return torch.empty(here.shape, dtype=here.dtype, device=DEVICE)
        output = func(*args, **kwargs)
        generator = kwargs.get("generator")
        if generator is not None and isinstance(output, Tensor):
            if _is_absent(output.device) is not _is_absent(generator.device):
                raise RuntimeError(
                    f"{func.__name__} fills a tensor on {output.device} from a generator of "
                    f"another device, {generator.device}."
                )
        return output


def _is_absent(device):
    return device is not None and torch.device(device).type == DEVICE


def register():
    """Makes the device known to torch, for good.

    Raises:
        RuntimeError: this version of torch does not let Python register one.
    """
    from torch.utils import backend_registration

    setup = getattr(backend_registration, "_setup_privateuseone_for_python_backend", None)
    if setup is None:
        raise RuntimeError(
            f"torch {torch.__version__} does not let Python register a device. Take 2.10 or newer."
        )
    setup(DEVICE, MODULE)


def placed(model, inputs):
    """Puts a model there, in place, and returns its inputs, all without contents."""
    known = {}

    def there(tensor):
        if id(tensor) not in known:
            empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=DEVICE)
            is_parameter = isinstance(tensor, nn.Parameter)
            known[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
        return known[id(tensor)]

    for module in model.modules():
        for own in (module._parameters, module._buffers):
            own.update({name: there(value) for name, value in own.items() if value is not None})
    return {k: there(v) if isinstance(v, Tensor) else v for k, v in inputs.items()}


def settings():
    found = [row.setting for row in every_method(Setting(batch_size=BATCH))]
    grape = Setting(method=DP_GRAPE, batch_size=BATCH)
    return [*found, replace(grape, projection=PRINCIPAL), replace(grape, dtype=torch.bfloat16)]


def run(build, batch, setting):
    model = prepared(build().to(setting.dtype), setting)
    try:
        with ExitStack() as stack:
            stack.enter_context(fake_tensors())
            inputs = placed(model, batch)
            stack.enter_context(_Checks())
            Step(model, inputs, setting).run()
    except (PrivacyError, UnsupportedModelError) as error:
        return f"refused: {error}"
    except (RuntimeError, NotImplementedError) as error:
        return f"{'WRONG' if WRONG.search(str(error)) else 'not simulated'}: {error}"
    return ""


def main(argv=None):
    from tests.models.zoo import rows

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="a pattern in the names of the models")
    options = parser.parse_args(argv)
    register()
    vars(torch)["Generator"] = _Generator
    counts = Counter()
    chosen = [row for row in rows() if re.search(options.only, str(row))]
    for row in tqdm(chosen, disable=None):
        batch = row.batch(BATCH)
        for setting in settings():
            found = run(row.model, batch, setting)
            counts[found.partition(": ")[0] or "on one device"] += 1
            if found:
                line = f"{row}, {setting.method}: {found.splitlines()[0][:200]}"
                tqdm.write(line, file=sys.stdout)
    sys.stdout.write(", ".join(f"{n} {kind}" for kind, n in counts.items()) + "\n")
    return 1 if counts["WRONG"] else 0


if __name__ == "__main__":
    sys.exit(main())
