"""Adam whose moments live in projected coordinates (paper, Algorithm 2).

For a projected weight the private gradient, both moments and the update have r x max(m, n)
numbers; only the last step lifts the update onto the weight, ``W -= lr * lift(m_hat / (sqrt(v_hat)
+ eps))``. Unprojected parameters get plain Adam. Weight decay is decoupled, as in AdamW.

The optimizer is post-processing: it sees private gradients only, and costs no privacy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from dp_grape_hf.errors import PrivacyError
from dp_grape_hf.projection import Projector


class ProjectedAdam(torch.optim.Optimizer):
    """Adam in coordinates, with parameter groups, schedulers and state like any torch optimizer.

    Gradients do not come through ``p.grad``, whose shape would be the weight's: call ``receive``
    with the private gradients, then ``step``. Moments are float32 whatever the weight's dtype, and
    are kept when the projection is redrawn.

    Args:
        params: parameters or parameter groups, which may set the values below for themselves.
        lr: the learning rate.
        betas: decay rates of the first and second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled; a step multiplies the weight by ``1 - lr * weight_decay``.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        for name, value, good in (
            ("lr", lr, lr >= 0),
            ("betas", betas, all(0 <= beta < 1 for beta in betas)),
            ("eps", eps, eps >= 0),
            ("weight_decay", weight_decay, weight_decay >= 0),
        ):
            if not good:
                raise ValueError(f"{name}={value} is out of range.")
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        self._private_grads: Mapping[nn.Parameter, Tensor] | None = None
        self._projectors: Mapping[nn.Parameter, Projector] = {}

    def receive(
        self,
        private_grads: Mapping[nn.Parameter, Tensor],
        projectors: Mapping[nn.Parameter, Projector] | None = None,
    ) -> None:
        """Takes the private gradients of the next step, in coordinates; they are overwritten."""
        self._private_grads, self._projectors = private_grads, projectors or {}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Updates the parameters from the gradients received, once.

        Raises:
            PrivacyError: if nothing was received since the last step: there was no release.
        """
        if closure is not None:
            raise PrivacyError("A closure would differentiate without noise; it is not supported.")
        if self._private_grads is None:
            raise PrivacyError("step() without receive(): there is no private gradient to apply.")
        for group in self.param_groups:
            given = {w: self._private_grads[w] for w in group["params"] if w in self._private_grads}
            plain = {w: g for w, g in given.items() if self._is_plain(w)}
            for weight, gradient in given.items():
                self._check_state(weight, gradient)
                if weight not in plain:
                    self._update(weight, gradient, group)
            self._update_plain([*plain], [*plain.values()], group)
        self._private_grads, self._projectors = None, {}

    def _is_plain(self, weight: nn.Parameter) -> bool:
        return weight not in self._projectors and weight.dtype is torch.float32

    def _check_state(self, weight: nn.Parameter, gradient: Tensor) -> None:
        state = self.state[weight]
        if not state:  # torch's kernel wants the step count on the device; reading it there waits
            device = weight.device if self._is_plain(weight) else "cpu"
            state["step"] = torch.zeros((), device=device)
            state["exp_avg"] = torch.zeros_like(gradient)
            state["exp_avg_sq"] = torch.zeros_like(gradient)
        first = state["exp_avg"]
        if first.shape != gradient.shape:
            raise PrivacyError(
                f"The optimizer's state has shape {tuple(first.shape)} where the private gradient "
                f"has {tuple(gradient.shape)}: the projection changed. Resume with the projection, "
                "projection_rank and optim_target_modules that the checkpoint was made with."
            )

    def _update_plain(
        self, weights: list[Tensor], gradients: list[Tensor], group: dict[str, Any]
    ) -> None:
        """Updates unprojected float32 parameters by torch's own kernel: one pass over memory."""
        beta1, beta2 = group["betas"]
        states = [self.state[weight] for weight in weights]
        adamw(
            weights,
            gradients,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _update(self, weight: nn.Parameter, gradient: Tensor, group: dict[str, Any]) -> None:
        state, projector = self.state[weight], self._projectors.get(weight)
        lr, (beta1, beta2) = float(group["lr"]), group["betas"]
        first, second = state["exp_avg"], state["exp_avg_sq"]
        state["step"] += 1
        step = int(state["step"])
        first.lerp_(gradient, 1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        correction1, correction2 = 1 - beta1**step, 1 - beta2**step
        denominator = torch.sqrt(second, out=gradient).div_(correction2**0.5).add_(group["eps"])
        if group["weight_decay"]:
            weight.mul_(1 - lr * group["weight_decay"])
        if projector is None:
            weight.addcdiv_(first, denominator, value=-lr / correction1)
        else:
            update = torch.div(first, denominator, out=denominator)
            projector.add_lifted_(weight, update, -lr / correction1)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the state; moments stay float32, where torch would cast them like the weight."""
        super().load_state_dict(state_dict)
        saved = state_dict["state"]
        order = [index for group in state_dict["param_groups"] for index in group["params"]]
        weights = [weight for group in self.param_groups for weight in group["params"]]
        for index, weight in zip(order, weights, strict=True):
            for key in ("exp_avg", "exp_avg_sq"):
                if index in saved:
                    moment = saved[index][key]
                    self.state[weight][key] = moment.to(weight.device, torch.float32, copy=True)

    def state_bytes(self) -> int:
        """Returns the bytes of the moments."""
        return sum(s[k].nbytes for s in self.state.values() for k in ("exp_avg", "exp_avg_sq"))
