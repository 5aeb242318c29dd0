"""The life of a program that evaluates without training, and of `--eval` of a training program."""

import argparse
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from util import attention
from util.code_version import code_version
from util.data.transforms import Normalize
from util.data.workers import SIGNALS
from util.evaluate.loop import EvalContext
from util.evaluate.results import RESULTS, Evaluation
from util.pictures import save
from util.run.cli import Parser
from util.run.files.reports import STATE, read_json, write_json, write_state
from util.run.processes import distributed
from util.run.start.folder import exit_on_setup_errors, refuse_different_starts, take_folder
from util.run.start.plan import num_workers
from util.text import printable


class Session(NamedTuple):
    """One process of a program that evaluates without training."""

    process: distributed.Process
    output_dir: Path | None

    def print(self, *lines: str) -> None:
        """Prints lines on rank 0."""
        if self.process.is_main:
            for line in lines:
                print(printable(line), flush=True)

    def make_context(self, args: argparse.Namespace, normalize: Normalize, batch_size: int) -> EvalContext:
        """Returns the context of an evaluation on this process's device, with the flags' precision and workers."""
        device = self.process.device
        attention.prefer(vars(args).get("attention", "auto"), device)
        return EvalContext(
            normalize=normalize.to(device),
            autocast=distributed.precision(args.precision, device).autocast,
            batch_size=batch_size,
            num_workers=num_workers(args, self.process),
        )

    def num_pictures(self, args: argparse.Namespace) -> int:
        """Returns how many images are shown: none if there is no folder to write the picture to."""
        return 0 if self.output_dir is None else args.num_pictures

    def finish(self, result: Evaluation, line: str, checkpoint: str, step: int | None, picture_name: str = "") -> None:
        """Prints scores in one line, and writes them and the picture to the output folder.

        checkpoint, step: of the weights, for results.json.
        """
        self.print(line)
        if self.output_dir is None or not self.process.is_main:
            return
        last: dict[str, Any] = {"step": step}
        for name, value in result.scores.items():
            last[f"val_{name}"] = value
        content = {"last": last, "details": result.details, "checkpoint": checkpoint, "code": code_version()}
        write_json(self.output_dir / RESULTS, content)
        self.print(f"all scores: {self.output_dir / RESULTS}")
        if result.picture is not None:
            save(result.picture, self.output_dir / picture_name)
            self.print(f"pictures: {self.output_dir / picture_name}")


@contextmanager
def reported_state(folder: Path | None, program: str) -> Iterator[None]:
    """Writes to run.json that the program runs, and how it ends. folder: of the file; None: this process writes none.

    A signal that ends the program does so at once, as if it were not handled.
    """
    if folder is None:
        yield
        return
    previous: dict[int, Any] = {}  # handlers

    def report(number: int, frame: FrameType | None) -> None:
        write_state(folder, "stopped", why=signal.Signals(number).name)
        signal.signal(number, previous[number])
        signal.raise_signal(number)

    write_state(folder, "running", program=program)
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # as of HUP under nohup
            previous[number] = signal.signal(number, report)
    try:
        yield
    except Exception as error:
        write_state(folder, "failed", why=str(error))
        raise
    finally:
        for handled, handler in previous.items():
            signal.signal(handled, handler)
    write_state(folder, "finished")


@contextmanager
def evaluation_session(
    parser: Parser,
    args: argparse.Namespace,
    output_dir: str | Path | None,
    check: Callable[[argparse.Namespace], None] | None = None,
) -> Iterator[Session]:
    """Joins the processes, and takes the output folder if there is one. Errors of the user end the program.

    check: refuses the program's own flags before the folder is touched.
    """
    with exit_on_setup_errors(parser) as stack:
        # The other ranks wait while rank 0 counts up to four million files.
        process = distributed.init_process(args.device, timeout_minutes=240)
        if check is not None:
            check(args)
        refuse_different_starts(parser, args)
        state_folder: Path | None = None  # whose run.json this rank writes
        if output_dir is not None:
            output_dir = take_folder(output_dir, stack)
            is_own = read_json(output_dir / STATE).get("program", parser.prog) == parser.prog
            if process.is_main and is_own:
                state_folder = output_dir
        with reported_state(state_folder, parser.prog):
            yield Session(process, output_dir)
        distributed.shut_down()


def session_of_eval(
    parser: Parser,
    args: argparse.Namespace,
    given: set[str],
    origins: str,
) -> AbstractContextManager[Session]:
    """Returns the session of `--eval` of a training program, whose output folder is used only if it is named.

    given: names of the flags that were set explicitly. origins: whose models can be evaluated, for messages.
    """
    if args.resume in ("auto", "none"):
        parser.error(f"--eval needs --resume: a checkpoint of {origins}, or a run's folder")
    if args.check_data:
        parser.error("--check_data checks a training: leave out --eval")
    if "output_dir" not in given:
        return evaluation_session(parser, args, None)
    if (Path(args.output_dir) / "settings.json").exists():
        parser.error(f"--output_dir {args.output_dir} holds a run, whose results --eval would replace: choose another")
    before = read_json(Path(args.output_dir) / RESULTS)
    if before and before.get("checkpoint") != args.resume:
        parser.error(f"--output_dir {args.output_dir} holds results of {before.get('checkpoint')}: choose another")
    return evaluation_session(parser, args, args.output_dir)
