"""How a run ends that needs no error message: at its last step, or after a signal."""

import signal

from util.data.workers import kill_workers
from util.run import distributed
from util.run.loop import TrainLoop
from util.run.supervise import StopSignal


def finish_run(loop: TrainLoop, stop: StopSignal, summary: str) -> None:
    """Prints the summary of a finished run and leaves the process group."""
    stop.finish()
    loop.notify_listener(loop.exchange().numbers)
    loop.log.info(summary)
    loop.log.close()
    distributed.shut_down()


def end_after_signal(loop: TrainLoop, stop: StopSignal) -> None:
    """Ends a run that a signal has stopped, after its checkpoint is saved.

    Our signal handlers stay installed meanwhile: the previous ones might requeue the job or kill the process. After
    Ctrl-C it raises KeyboardInterrupt, so that the shell stops its script, too.
    """
    name = stop.name or "a signal to another process"
    progress = f"after step {loop.step} of {loop.last_step}"
    loop.log.info(f"stopped by {name} {progress}; the same command goes on from there")
    loop.log.close()
    stop.settle()
    distributed.shut_down()
    if stop.name == signal.SIGINT.name:
        kill_workers()  # a program that dies of SIGINT runs no exit handlers
        raise KeyboardInterrupt
