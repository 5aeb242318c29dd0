"""Finds what would make the host wait for a GPU, on a machine that has none."""

import sys
from contextlib import contextmanager

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# Operators whose results, or the shapes of them, the host must know.
READS = {"_local_scalar_dense", "equal", "allclose", "is_nonzero", "nonzero", "masked_select", "bincount"}
READS |= {"_unique2", "unique_dim", "unique_consecutive"}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
# Methods that on the CPU come to no operator.
TO_HOST = {"tolist", "numpy", "__array__", "cpu"}
# They copy numbers of the host to the device and wait; `torch.full` does not.
CONSTRUCTORS = {"tensor", "as_tensor", "new_tensor"}


class _Operators(TorchDispatchMode):
    def __init__(self, found):
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = operator.overloadpacket.__name__
        device = kwargs.get("device") or args[0].device if name == "_to_copy" else None
        moves = name == "_to_copy" and torch.device(device) != args[0].device and not kwargs.get("non_blocking")
        # A mask as an index is turned into the places where it is true.
        masks = name in INDEXING and any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
        repeats = name == "repeat_interleave" and kwargs.get("output_size") is None
        if moves or masks or repeats or name in READS:
            self.found.append(name)
        return operator(*args, **kwargs)


class _Methods(TorchFunctionMode):
    def __init__(self, found):
        super().__init__()
        self.found = found

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, getattr(function, "__name__", "")
        moves = name == "to" and any(isinstance(a, (str, torch.device)) for a in [*args[1:], kwargs.get("device")])
        # torch's own utilities (the norm of all gradients) say by it on which device their tensors already are.
        moves = moves and not sys._getframe(1).f_globals.get("__name__", "").startswith("torch.")
        makes = name in CONSTRUCTORS and not (args and torch.is_tensor(args[0]) and name != "new_tensor")
        if name in TO_HOST or makes or (moves and not kwargs.get("non_blocking")):
            self.found.append(name)
        return function(*args, **kwargs)


@contextmanager
def reads():
    """A list that the names of all reads go to inside."""
    found = []
    with _Methods(found), _Operators(found):
        yield found
