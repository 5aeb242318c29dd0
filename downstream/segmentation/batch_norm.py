"""BatchNorm whose statistics in training are those of all processes, on any device."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce  # its gradient is all-reduced, too


class SyncBatchNorm2d(nn.BatchNorm2d):
    """BatchNorm over all processes, in plain operations. All processes must have batches of the same shape.

    DDP accepts torch's own SyncBatchNorm on GPUs only. There, `torch.nn.SyncBatchNorm.convert_sync_batchnorm` replaces
    these modules by it, with the same parameters.
    """

    def forward(self, x: Tensor) -> Tensor:
        if not (self.training and dist.is_initialized()):
            return super().forward(x)
        count = x.numel() // x.shape[1] * dist.get_world_size()
        total = all_reduce(x.float().sum(dim=(0, 2, 3)))
        mean = total / count
        centred = x.float() - mean[:, None, None]
        squares = all_reduce(centred.square().sum(dim=(0, 2, 3)))
        var = squares / count
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            self.running_mean.lerp_(mean, self.momentum)
            unbiased = var * count / max(1, count - 1)
            self.running_var.lerp_(unbiased, self.momentum)
        scale = (var + self.eps).rsqrt()
        out = centred * scale[:, None, None]
        if self.affine:
            out = out * self.weight[:, None, None]
            out = out + self.bias[:, None, None]
        return out.to(x.dtype)
