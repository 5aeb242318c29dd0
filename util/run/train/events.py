"""TensorBoard's event file, written by the thread that reports.

The thread of torch's SummaryWriter opens its file by name for each event. If the run's folder is deleted or the disk is
full, it ends with a traceback on the console, some time after the report. Here the file stays open, and the report
itself gets the error.
"""

import itertools
import os
import socket
import time
from pathlib import Path

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from torch.utils.tensorboard import RecordWriter, summary

NUMBERS = itertools.count()  # a process may make several files in one second


class EventFile:
    """A new event file in `folder`. Its methods raise OSError if it cannot be written.

    purge_step: TensorBoard ignores what older files hold of this step and of later ones. None: of no step.
    """

    def __init__(self, folder: Path, purge_step: int | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time():010.0f}.{socket.gethostname()}.{os.getpid()}.{next(NUMBERS):06}"
        self.file = open(folder / name, "xb")
        self.records = RecordWriter(self.file)
        self._write(Event(file_version="brain.Event:2"))
        if purge_step is not None:
            self._write(Event(step=purge_step, session_log=SessionLog(status=SessionLog.START)))

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self._write(Event(step=step, summary=summary.scalar(name, value)))

    def add_picture(self, name: str, picture: np.ndarray, step: int) -> None:
        """Adds a picture, uint8 [H, W, 3]."""
        self._write(Event(step=step, summary=summary.image(name, picture, dataformats="HWC")))

    def close(self) -> None:
        self.file.close()

    def _write(self, event: Event) -> None:
        event.wall_time = time.time()
        self.records.write(event.SerializeToString())
        self.file.flush()
