"""LARS for linear probing (You et al., arXiv:1708.03888), as MAE's protocol has it."""

import torch


class LARS(torch.optim.Optimizer):
    """SGD with momentum whose step on each matrix is scaled to the matrix's norm; vectors take plain momentum steps.

    For p of two or more dimensions: g <- (g + wd p) * trust_coefficient ||p|| / ||g + wd p||, where both norms are positive;
    then for all p: mu <- momentum mu + g, p <- p - lr mu. Where the engine sets `found_inf` to 1, nothing
    changes: as in torch's fused optimizers, and nobody waits for the device.
    """

    _step_supports_amp_scaling = True  # GradScaler, too, then sets found_inf instead of reading it
    found_inf = None

    def __init__(self, params, lr=0.0, weight_decay=0.0, momentum=0.9, trust_coefficient=0.001):
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay, momentum=momentum, trust_coefficient=trust_coefficient))

    @torch.no_grad()
    def step(self, closure=None):
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
                mu.copy_(self._unless_bad(mu, group["momentum"] * mu + g))
                p.copy_(self._unless_bad(p, p - group["lr"] * mu))

    def _unless_bad(self, old, new):
        return new if self.found_inf is None else torch.where(self.found_inf != 0, old, new)
