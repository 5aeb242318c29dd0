"""Finds what would make the host wait for a GPU, on a machine that has none."""

import sys
from contextlib import contextmanager

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# Operators whose results, or the shapes of them, the host must know.
READS = {"_local_scalar_dense", "equal", "allclose", "is_nonzero", "nonzero", "masked_select", "bincount", "nms"}
READS |= {"_unique2", "unique_dim", "unique_consecutive"}
SETTING = {"index_put", "index_put_", "_index_put_impl_"}
# Methods that on the CPU come to no operator.
TO_HOST = {"tolist", "numpy", "__array__", "cpu"}
# With a device they copy numbers of the host to it and wait; `torch.full` does not.
CONSTRUCTORS = {"tensor", "as_tensor"}


def place(name):
    """ "NAME in FUNCTION", the innermost one outside of torch and the tests. The backward pass may have none."""
    frame = sys._getframe(2)
    while frame is not None:
        package, function = frame.f_globals.get("__name__", "").partition(".")[0], frame.f_code.co_name
        if package not in ("torch", "tests", "__main__") and not function.startswith("<"):  # a comprehension
            owner = frame.f_locals.get("self")
            return f"{name} in {function if owner is None else f'{type(owner).__name__}.{function}'}"
        frame = frame.f_back
    return name


def is_mask(index):
    return torch.is_tensor(index) and index.dtype in (torch.bool, torch.uint8)


class _Operators(TorchDispatchMode):
    def __init__(self, found):
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = operator.overloadpacket.__name__
        device = kwargs.get("device") or args[0].device if name == "_to_copy" else None
        moves = name == "_to_copy" and torch.device(device) != args[0].device and not kwargs.get("non_blocking")
        # A mask as an index is turned into the places where it is true. `x[mask] = number` fills without that.
        masks = name in {"index", *SETTING} and any(is_mask(index) for index in args[1])
        fills = name in SETTING and args[2].ndim == 0
        repeats = name == "repeat_interleave" and kwargs.get("output_size") is None
        if moves or (masks and not fills) or repeats or name in READS:
            self.found.append(place(name))
        return operator(*args, **kwargs)


class _Methods(TorchFunctionMode):
    def __init__(self, found):
        super().__init__()
        self.found = found

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, getattr(function, "__name__", "")
        # On the CPU nobody can say whether a tensor is on the device already.
        targets = [a for a in [*args[1:], kwargs.get("device")] if isinstance(a, (str, torch.device))]
        moves = name == "to" and targets and (args[0].is_cpu or torch.device(targets[0]) != args[0].device)
        # torch's own utilities (the norm of all gradients) say by it on which device their tensors already are.
        moves = moves and not sys._getframe(1).f_globals.get("__name__", "").startswith("torch.")
        makes = name in CONSTRUCTORS and kwargs.get("device") is not None and not torch.is_tensor(args[0])
        makes = makes or name == "new_tensor"
        sets = name == "__setitem__" and is_mask(args[1]) and torch.is_tensor(args[2]) and args[2].ndim == 0
        before = len(self.found)
        result = function(*args, **kwargs)
        if name in TO_HOST or makes or sets or (moves and not kwargs.get("non_blocking")):
            self.found[before:] = [place(name)]  # its operators are the same read
        return result


@contextmanager
def reads():
    """A list that the names of all reads, and the functions that read, go to inside."""
    found = []
    with _Methods(found), _Operators(found):
        yield found
