"""Whether the disk has space for the checkpoints of a run."""

import shutil

import torch

from util.run.start.folder import Start
from util.run.start.plan import RunSchedule


def checkpoint_bytes(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Returns the size of a checkpoint. Without a state yet, an optimizer is taken for one of two moments."""
    weights = sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
    moments = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if optimizer.state:
                values = [value for value in optimizer.state[parameter].values() if torch.is_tensor(value)]
            else:
                values = [parameter, parameter]
            moments += sum(value.numel() * value.element_size() for value in values)
    return weights + moments


def check_space(start: Start, schedule: RunSchedule, step: int, num_bytes: int) -> list[str]:
    """Returns a warning if the disk has no space for all checkpoints to come, which have `num_bytes` each.

    OSError if it has none for the next ones: each is complete before an older one is removed. For rank 0.
    """
    free = shutil.disk_usage(start.output_dir).free
    if step >= schedule.num_steps:
        return []
    needed = num_bytes
    if not start.continues_here:
        needed += num_bytes
    place = f"the disk of --output_dir {str(start.output_dir)!r} has {free / 1e6:.1f} MB free"
    if free < needed:
        raise OSError(
            f"{place}, but a checkpoint takes {num_bytes / 1e6:.1f} MB, and two have to be there at a time: free "
            f"{(needed - free) / 1e6:.1f} MB, or choose another folder"
        )
    num_kept = schedule.num_steps // schedule.keep_every - step // schedule.keep_every + 1  # and the last one
    if free < needed + num_kept * num_bytes:
        return [
            f"warning: {place}, and the run will keep {num_kept} more checkpoints of {num_bytes / 1e6:.1f} MB: free "
            "space, or raise --save_every"
        ]
    return []
