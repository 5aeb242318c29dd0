"""The end of a run: at its last step, or after a signal."""

import signal
from pathlib import Path

from util.run import checkpoint, distributed
from util.run.loop import TrainLoop
from util.run.signals import StopSignal, kill_workers
from util.text import count_of


def finish_run(loop: TrainLoop, stop: StopSignal, summary: str) -> None:
    """Prints the summary of a finished run and leaves the process group."""
    stop.settle()
    if loop.on_report is not None:
        loop.on_report()
    loop.log.info(summary)
    close(loop)
    distributed.shut_down()
    stop.finish()


def end_after_signal(loop: TrainLoop, stop: StopSignal) -> None:
    """Ends a run that a signal has stopped, after its checkpoint is saved.

    Our signal handlers stay installed until then: the previous ones might requeue the job or kill the process. After
    Ctrl-C it raises KeyboardInterrupt, so that the shell stops its script, too. If an error ahead has stopped the run,
    all ranks raise it.
    """
    errors = [error for error in distributed.gather_objects(stop.error) if error is not None]
    name = stop.name or "a signal to another process"
    progress = f"after step {loop.step} of {loop.last_step}"
    if errors:
        loop.log.info(f"stopped and saved {progress}, because an error ends the run")
    else:
        loop.log.info(f"stopped by {name} {progress}; the same command goes on from there")
    close(loop)
    stop.close()
    distributed.shut_down()
    if errors:
        raise errors[0]
    if stop.name == signal.SIGINT.name:
        kill_workers()  # a program that dies of SIGINT runs no exit handlers
        raise KeyboardInterrupt


def close(loop: TrainLoop) -> None:
    """Closes the log, and lets go of the saver, so that the folder is free once the program's main returns."""
    loop.log.close()
    loop.on_report = None  # it refers to the saver, which refers to the loop


def describe_progress(loop: TrainLoop, num_images: int, total: int) -> str:
    """Returns, for example, "for 100 steps on 24 images", and how to go on if --max_steps ended the run early.

    total: steps of the whole schedule.
    """
    done, images = count_of(loop.step, "step"), count_of(num_images, "image")
    if loop.step >= total:
        return f"for {done} on {images}"
    return f"for {done} of {total} on {images}; the same command without --max_steps goes on"


def closing_lines(output_dir: Path, is_main: bool) -> list[str]:
    """Returns where the newest checkpoint and TensorBoard's files are."""
    finished = checkpoint.list_finished(output_dir) if is_main else []  # unhashed: this run has just written the newest
    lines = [f"  checkpoint   {path}" for path in finished[-1:]]
    return [*lines, f"  TensorBoard  tensorboard --logdir {output_dir / 'tensorboard'}"]
