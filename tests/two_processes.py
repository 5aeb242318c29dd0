"""Runs a function in two gloo processes on this machine.

They are forks of a server process that has imported the libraries and the project once, so they start at once. A fork
of the test process itself would not do: it has threads, and autograd refuses to run in such a fork.
"""

import os
import queue
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_in_two_processes(function, *args, timeout_s=120):
    """Returns [function(rank, *args) for rank in (0, 1)], each computed in its own process of a gloo group.

    If a result is a dict, its tensors come back as arrays. An exception in a process is raised again here.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["main_robustness"])  # it imports the other mains, too
    queues = [context.Queue(), context.Queue()]
    shared = function, args, dict(os.environ)
    processes = [context.Process(target=_child, args=(rank, port, queues[rank], *shared)) for rank in range(2)]
    for process in processes:
        process.start()
    try:
        results = [_wait(*pair, timeout_s) for pair in zip(queues, processes, strict=True)]
    finally:
        for process in processes:
            process.join(timeout=30)
            process.kill()
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def _wait(results, process, timeout_s):
    """Returns a process's result, or raises RuntimeError as soon as the process ends without one."""
    for _ in range(timeout_s):
        ended = not process.is_alive()
        try:
            return results.get(timeout=1)
        except queue.Empty:
            if ended:
                raise RuntimeError(f"{process.name} ended with exit code {process.exitcode} and no result") from None
    raise TimeoutError(f"{process.name} gave no result in {timeout_s} s")


def _child(rank, port, results, function, args, environment):
    os.environ.clear()  # it is the server's
    os.environ.update(environment)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo")
        results.put(_to_numpy(function(rank, *args)))
        dist.barrier()
        dist.destroy_process_group()
    except Exception as error:  # the parent raises it again
        results.put(error)


def _to_numpy(result):
    """Replaces the tensors in a dict by arrays. The shared memory of tensors would end with the process."""
    if isinstance(result, dict):
        return {key: value.numpy() if torch.is_tensor(value) else value for key, value in result.items()}
    return result
