"""The step of a pre-training as CUDA graphs: the host launches two graphs instead of some 1,400 kernels.

A graph repeats the kernels that were captured, on the same memory. So batches are copied into tensors that stay, the
learning rates are tensors that are filled before each replay, and gradients stay where the first backward pass has put
them, which overwrites them. What Python decides in a step is decided once, at the capture.
A replay reads the state of the random generator: seeds hold.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

WARM_UP = 3  # steps of a start before the capture; they compile, choose kernels and make the optimizer's state

ForwardBackward = Callable[..., None]  # (model, batch, micro, loop): computes the gradient of a micro-batch
Update = Callable[[Any], dict[str, torch.Tensor]]  # (loop): steps the optimizer, and returns values to log
Replay = Callable[[], None]


class StepGraphs:
    """Captures an engine's `forward_backward` and `update` after some steps, and replays them from then on.

    Everything else of a step, such as sums for reports, is computed as without graphs.
    """

    def __init__(
        self,
        forward_backward: ForwardBackward,
        update: Update,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
    ) -> None:
        """Makes the rates of the optimizer tensors, and one stream for all that this process computes from now on."""
        self.compute = forward_backward
        self.update_weights = update
        self.optimizer = optimizer
        self.num_steps = 0  # of this start
        self.batch: list[Any] = []
        self.losses: dict[str, torch.Tensor] = {}
        self.values: dict[str, torch.Tensor] = {}  # what the update returns
        # By whether the pass is the first of its step: the others add to its gradients.
        self.passes: dict[bool, Replay] = {}
        self.replay_update: Replay | None = None
        self.capture = make_capture(device)
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(float(group["lr"]), device=device)

    def forward_backward(self, model: torch.nn.Module, batch: list[Any], micro: int, loop: Any) -> None:
        """Calls or replays the engine's. Batches have the same shapes."""
        if self.num_steps < WARM_UP:
            self.compute(model, batch, micro, loop)
            return
        self._keep(batch)
        is_first = micro == 0
        if is_first not in self.passes:
            self.passes[is_first] = self.capture(lambda: self.compute(model, list(self.batch), micro, loop))
            self.losses = loop.losses
        loop.losses = self.losses
        self.passes[is_first]()

    def update(self, loop: Any) -> dict[str, torch.Tensor]:
        """Calls or replays the engine's."""
        self.num_steps += 1
        if self.num_steps <= WARM_UP:
            return self.update_weights(loop)
        if self.replay_update is None:
            for group in self.optimizer.param_groups:
                group["capturable"] = True

            def run() -> None:
                self.values = self.update_weights(loop)

            self.replay_update = self.capture(run)
        self.replay_update()
        return self.values

    def _keep(self, batch: Sequence[Any]) -> None:
        """Copies a batch into the tensors that the graphs read."""
        if not self.batch:
            self.batch = [part.clone() if torch.is_tensor(part) else part for part in batch]
            return
        for place, part in zip(self.batch, batch, strict=True):
            if torch.is_tensor(part):
                place.copy_(part)


def make_capture(device: torch.device) -> Callable[[Callable[[], None]], Replay]:
    """Returns a function that captures what a function does on the device, without doing it, and returns its replay.

    The graphs share their memory, so they must be replayed in the order of their captures. A capture needs a stream
    that is not the default one. Autograd adds a gradient on the stream where it met the parameter first, so that stream
    is that of all steps from now on.
    """
    stream = torch.cuda.current_stream(device)
    if stream == torch.cuda.default_stream(device):
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        torch.cuda.set_stream(stream)
    pool = torch.cuda.graph_pool_handle()

    def capture(work: Callable[[], None]) -> Replay:
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as the one that pins batches, may call CUDA meanwhile.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            work()
        return graph.replay

    return capture
