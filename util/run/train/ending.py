"""How a run ends that needs no error message: at its last step, or after a signal."""

import signal
from typing import NoReturn

from util.data.images import ImageError
from util.data.loader import TooLittleMemory
from util.data.workers import kill_workers
from util.run.cli import Parser
from util.run.files.reports import STATE, write_state
from util.run.processes import distributed
from util.run.processes.supervise import StopSignal, write_error_to_log
from util.run.start.errors import is_full_gpu, message_of, refuse
from util.run.train.loop import TrainLoop
from util.run.train.saving import CheckpointSaver
from util.text import count_of


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


def describe_full_gpu(error: Exception, batch_size: int) -> ValueError:
    """Returns the error of a GPU whose memory is full, with the next smaller micro-batch that fits the total batch."""
    remedies = "--recompute"
    for smaller in range(batch_size // 2, 0, -1):
        if batch_size % smaller == 0:
            remedies = f"--batch_size {smaller}, or {remedies}"
            break
    cause = str(error).partition(". ")[0]
    return ValueError(f"{cause}, in micro-batches of {count_of(batch_size, 'image')}: give {remedies}")


def refuse_training_error(parser: Parser, error: Exception, saver: CheckpointSaver, batch_size: int) -> NoReturn:
    """Ends a training run after unreadable data, values that are not finite, an I/O error, or too little memory.

    Other errors are bugs and are raised. Rank 0 writes its error to log and run.json. The other ranks may hang in a
    collective, so the process group is left as it is. batch_size: of a micro-batch.
    """
    reason = message_of(error)
    is_bug = False
    if is_full_gpu(error):
        error = describe_full_gpu(error, batch_size)
        reason = str(error)
    elif not isinstance(error, (ImageError, FloatingPointError, TooLittleMemory, OSError)):
        reason = f"{type(error).__name__}: {reason}"
        is_bug = True
    if saver.start.process.is_main:
        write_error_to_log(saver.output_dir, reason)
        if (saver.output_dir / STATE).exists():  # the folder may have gone
            write_state(saver.output_dir, "failed", step=saver.loop.step, why=reason)
    if is_bug:
        raise error
    refuse(parser, error, saver.advice(error))
