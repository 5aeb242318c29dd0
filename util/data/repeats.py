"""Several crops of an image in one step, so that it is read once (`--repeat_aug`)."""

from collections.abc import Iterator
from dataclasses import dataclass

from util.data.datasets import Address, StepBatchSampler, permutation


@dataclass
class RepeatedStepSampler(StepBatchSampler):
    """The addresses of micro-batches in which R crops of an image lie beside each other.

    repeats: R, which divides `batch_size`. R epochs make a group, see `epoch_groups`: they share the permutation of the
    first one, and a step has `total_batch / R` images, each at its addresses in all of these epochs. So the steps of a
    group have the samples that its epochs have without repeats (if `total_batch` divides `num_samples`; else as many),
    in another order. epochs: those that groups are made of.
    """

    repeats: int
    epochs: range

    def batches(self, steps: range) -> Iterator[list[Address]]:
        """Yields the addresses of each micro-batch of these steps. To resume, they start later."""
        for group in epoch_groups(self.epochs, self.repeats):
            first_step = group.start * self.steps_per_epoch
            steps_of_group = range(max(first_step, steps.start), min(group.stop * self.steps_per_epoch, steps.stop))
            if not steps_of_group:
                continue
            order = permutation(self.seed, group.start, self.num_samples)
            for step in steps_of_group:
                for micro in range(self.accum_iter):
                    place_in_step = (micro * self.world_size + self.rank) * self.batch_size
                    first = ((step - first_step) * self.total_batch + place_in_step) // len(group)
                    indices = order[first : first + self.batch_size // len(group)].tolist()
                    yield [(member, index) for index in indices for member in group]


def with_repeats(sampler: StepBatchSampler, repeats: int, epochs: range) -> StepBatchSampler:
    """Returns the sampler of `--repeat_aug repeats`, which puts these epochs into groups."""
    if repeats == 1:
        return sampler
    return RepeatedStepSampler(
        sampler.num_samples,
        sampler.batch_size,
        sampler.accum_iter,
        sampler.rank,
        sampler.world_size,
        sampler.seed,
        repeats,
        epochs,
    )


def epoch_groups(epochs: range, repeats: int) -> list[range]:
    """Returns the groups of `repeats` epochs that share their images.

    The rest of `epochs` makes smaller groups, the largest first, whose sizes divide `repeats`: 7 epochs with 4 repeats
    are 4 + 2 + 1.
    """
    groups = []
    start = epochs.start
    while start < epochs.stop:
        fitting = range(1, min(epochs.stop - start, repeats) + 1)
        size = max(size for size in fitting if repeats % size == 0)
        groups.append(range(start, start + size))
        start += size
    return groups
