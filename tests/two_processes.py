"""Runs a function in two gloo processes on this machine."""

import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_in_two_processes(function, *args):
    """[function(rank, *args) for rank in 0, 1], each in a process of its own with a gloo group; tensors come back as arrays."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("spawn")
    queues = [context.Queue(), context.Queue()]
    processes = [context.Process(target=_child, args=(rank, port, queues[rank], function, args)) for rank in range(2)]
    for process in processes:
        process.start()
    try:
        results = [queue.get(timeout=120) for queue in queues]
    finally:
        for process in processes:
            process.join(timeout=30)
            process.kill()
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def _child(rank, port, queue, function, args):
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo")
        queue.put(_on_numpy(function(rank, *args)))
        dist.barrier()
        dist.destroy_process_group()
    except Exception as error:  # the parent raises it again
        queue.put(error)


def _on_numpy(result):
    """Tensors in shared memory would die with the process that made them."""
    if isinstance(result, dict):
        return {k: v.numpy() if torch.is_tensor(v) else v for k, v in result.items()}
    return result
