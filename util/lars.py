"""LARS for linear probing (You et al., arXiv:1708.03888), as in MAE's protocol."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class LARS(torch.optim.Optimizer):
    """SGD with momentum whose step on each matrix is scaled by the matrix's norm. Vectors take plain momentum steps.

    For parameters p with two or more dimensions: g <- (g + wd p) * trust_coefficient ||p|| / ||g + wd p|| if both norms
    are positive. Then for all parameters: mu <- momentum mu + g, p <- p - lr mu.

    If `found_inf` is set to a tensor that is not 0, a step changes nothing, as in torch's fused optimizers. This needs
    no host-device sync.
    """

    _step_supports_amp_scaling = True  # lets GradScaler set `found_inf` instead of reading it on the host
    found_inf: Tensor | None = None

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.0,
        weight_decay: float = 0.0,
        momentum: float = 0.9,
        trust_coefficient: float = 0.001,
    ) -> None:
        defaults = dict(lr=lr, weight_decay=weight_decay, momentum=momentum, trust_coefficient=trust_coefficient)
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Takes one step with the gradients in the parameters' `.grad`. A `closure` is ignored."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                g = p.grad
                if p.ndim > 1:
                    g = g + group["weight_decay"] * p
                    ratio = group["trust_coefficient"] * p.norm() / g.norm()
                    g = g * torch.where((p.norm() > 0) & (g.norm() > 0), ratio, 1.0)
                state = self.state[p]
                if "mu" not in state:
                    state["mu"] = torch.zeros_like(p)
                mu = state["mu"]
                mu.copy_(self._new_if_finite(mu, group["momentum"] * mu + g))
                p.copy_(self._new_if_finite(p, p - group["lr"] * mu))

    def _new_if_finite(self, old: Tensor, new: Tensor) -> Tensor:
        if self.found_inf is None:
            return new
        return torch.where(self.found_inf != 0, old, new)
