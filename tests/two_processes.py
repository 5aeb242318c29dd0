"""Runs a function in two or more gloo processes on this machine."""

import os
import queue

import torch
import torch.distributed as dist

from tests.warm import reserve_port, server


def run_in_two_processes(function, *args, timeout_s=900):
    return run_in_processes(2, function, *args, timeout_s=timeout_s)


def run_in_processes(num, function, *args, timeout_s=900):
    """Returns [function(rank, *args) for rank in range(num)], each computed in its own process of a gloo group.

    If a result is a dict, its tensors come back as arrays. An exception in a process is raised again here.
    """
    context = server()
    port = reserve_port()
    queues = []
    processes = []
    for rank in range(num):
        results_of_rank = context.Queue()
        child_args = (rank, num, port, results_of_rank, function, args, dict(os.environ))
        process = context.Process(target=_child, args=child_args)
        process.start()
        queues.append(results_of_rank)
        processes.append(process)
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


def _child(rank, num, port, results, function, args, environment):
    os.environ.clear()  # it is the server's
    os.environ.update(environment)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num), LOCAL_WORLD_SIZE=str(num))
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
