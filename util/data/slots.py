"""The way of a batch from a worker to the trainer: shared memory, which the images of later batches use again."""

import math
import mmap
import os
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map
from torch.utils.data._utils.collate import default_collate_fn_map


def shared(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy that other processes can map. On Linux it takes no space in /dev/shm, which may be small."""
    storage = tensor.untyped_storage()
    size = storage.nbytes()
    if size == 0 or not hasattr(os, "memfd_create"):  # macOS
        return tensor.share_memory_()
    with os.fdopen(os.memfd_create("batch"), "wb") as file:
        file.truncate(size)
        storage = torch.UntypedStorage._new_shared_fd_cpu(file.fileno(), size).copy_(storage)
    return torch.empty(0, dtype=tensor.dtype).set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


class InSlot(NamedTuple):
    """Stands for a tensor in `Slots`, on its way from a worker."""

    dtype: torch.dtype
    offset: int  # in values
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Slots:
    """Memory that workers and trainer share, in which the images of a batch are written over those of an older one.

    New memory is zeroed by the kernel and mapped by both processes, for every batch. The slots are mapped once, before
    the workers are forked. Batch n lies in slot n % (number of slots). A worker gets it to do when batch n - `ahead` is
    taken, so there is no queue of free slots, and no lock that a killed worker holds.

    ahead: batches that are begun and not taken. lifetime: the trainer must have used a batch when it asks for the one
    that comes `lifetime` later; for a GPU this waits until it has. for_gpu: the memory is pinned.
    """

    def __init__(self, ahead: int, lifetime: int, batch_bytes: int, for_gpu: bool) -> None:
        number = ahead + lifetime
        self.memory = torch.frombuffer(mmap.mmap(-1, number * batch_bytes), dtype=torch.uint8).view(number, batch_bytes)
        self.lifetime = lifetime
        self.for_gpu = for_gpu
        self.is_pinned = False
        self.uses: deque[torch.cuda.Event] = deque()  # the GPU passes them when it has used the batches taken before
        self.free: torch.Tensor | None = None  # in a worker: the slot of its batch, until images lie there

    def begin(self, number: int) -> None:
        """From now on, `place` returns the slot of this batch, once."""
        self.free = self.memory[number % len(self.memory)]

    def place(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Returns where to stack the first tensors of a batch, the images, or None for later ones and larger ones."""
        shape = (len(tensors), *tensors[0].shape)
        dtype = tensors[0].dtype
        size = math.prod(shape) * dtype.itemsize
        slot = self.free
        if slot is None or size > len(slot):
            return None
        self.free = None
        return slot[:size].view(dtype).view(shape)

    def describe(self, tensor: torch.Tensor) -> InSlot | None:
        """Returns where a tensor lies, or None if it is not in these slots."""
        if tensor.untyped_storage().data_ptr() != self.memory.untyped_storage().data_ptr():
            return None
        return InSlot(tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride())

    def find(self, batch: Sequence[Any]) -> list[Any]:
        """Returns a batch with the tensors that its InSlots stand for."""
        found = []
        for part in batch:
            if isinstance(part, InSlot):
                storage = self.memory.untyped_storage()
                part = torch.empty(0, dtype=part.dtype).set_(storage, part.offset, part.shape, part.strides)
            found.append(part)
        return found

    def pin(self) -> None:
        """Registers the memory with the GPU, after the fork. Written without a GPU, and not tried on one yet."""
        if self.for_gpu:
            self.is_pinned = True
            error = torch.cuda.cudart().cudaHostRegister(self.memory.data_ptr(), self.memory.numel(), 0)
            torch.cuda.check_error(int(error))

    def unpin(self) -> None:
        """Ends what `pin` began. After an error of the GPU it does nothing."""
        if self.is_pinned:
            self.is_pinned = False
            torch.cuda.cudart().cudaHostUnregister(self.memory.data_ptr())

    def wait_for_gpu(self) -> None:
        """Waits until the GPU has used the batch whose slot is written when the next batch is taken."""
        if not self.for_gpu:
            return
        event = torch.cuda.Event(blocking=True)  # without it, the wait keeps a core busy
        event.record()
        self.uses.append(event)
        if len(self.uses) == self.lifetime:
            self.uses.popleft().synchronize()


class Batches(torch.utils.data.Dataset):
    """The batches of a data set: `batches[(number, addresses)]`. In a worker, their tensors lie in shared memory.

    Otherwise a thread of the worker would move them to /dev/shm. If it found no space there, the batch would be lost,
    and the trainer would wait for it without end.
    """

    def __init__(self, dataset: Any, collate: Callable[[Sequence[Any]], Any], slots: Slots | None) -> None:
        self.dataset = dataset
        self.collate = collate
        self.slots = slots

    def __getitem__(self, numbered: tuple[int, Sequence[Any]]) -> Any:
        number, addresses = numbered
        is_in_worker = torch.utils.data.get_worker_info() is not None
        if is_in_worker:
            default_collate_fn_map[torch.Tensor] = self.stack
        if self.slots is not None:
            self.slots.begin(number)
        if hasattr(self.dataset, "__getitems__"):
            samples = self.dataset.__getitems__(addresses)
        else:
            samples = [self.dataset[address] for address in addresses]
        batch = self.collate(samples)
        return tree_map(self.share, batch) if is_in_worker else batch

    def stack(self, tensors: Sequence[torch.Tensor], **_: Any) -> torch.Tensor:
        """For `default_collate`, whose own function stacks tensors in /dev/shm."""
        place = None if self.slots is None else self.slots.place(tensors)
        return torch.stack(list(tensors), out=place)

    def share(self, part: Any) -> Any:
        """Returns a part of a batch for the trainer: where it lies in the slots, or a tensor in shared memory."""
        if not torch.is_tensor(part):
            return part
        place = None if self.slots is None else self.slots.describe(part)
        return place or shared(part)
