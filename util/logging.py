"""What a run tells: a progress bar or plain lines, `log.txt`, `log.jsonl` and TensorBoard."""

import json
import os
import sys
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm


class RunLog:
    """The run's voice. Only the main process speaks (`enabled`); on the others every method does nothing.

    On a terminal a progress bar shows the latest values; elsewhere, and always in `log.txt`, they are plain lines.
    `log.jsonl` holds one JSON object a report. A resumed run drops what was reported after its first step, so that each
    step stands there once.
    """

    def __init__(self, output_dir, start_step, end_step, enabled=True):
        self.enabled = enabled
        if not enabled:
            return
        output_dir = Path(output_dir)
        self.text = open(output_dir / "log.txt", "a", encoding="utf-8")
        self.reports = _continue_jsonl(output_dir / "log.jsonl", start_step)
        self.tensorboard = SummaryWriter(output_dir / "tensorboard", purge_step=start_step + 1)
        self.bar = tqdm(total=end_step, initial=start_step, unit="step", dynamic_ncols=True, disable=not sys.stderr.isatty())

    def info(self, message):
        """A sentence, on the console and in log.txt."""
        if self.enabled:
            self._write(message)
            self.bar.clear()
            print(message, flush=True)

    def _write(self, message):
        with suppress(OSError):  # a full disk, of which the console tells
            self.text.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {message}\n")
            self.text.flush()

    def advance(self):
        """One optimizer step is done."""
        if self.enabled:
            self.bar.update()

    def report(self, step, scalars, line, postfix):
        """Values at `step`: `scalars` to log.jsonl and TensorBoard, `line` to log.txt, `postfix` to the bar."""
        if not self.enabled:
            return
        self.reports.write(json.dumps({"step": step, **scalars}) + "\n")
        self.reports.flush()
        for name, value in scalars.items():
            if value is not None:
                self.tensorboard.add_scalar(name, value, step)
        if self.bar.disable:
            self.info(line)
        else:
            self._write(line)
            self.bar.set_postfix_str(postfix)

    def history(self):
        """All reports so far, those before a resume included."""
        if not self.enabled:
            return []
        return [json.loads(line) for line in Path(self.reports.name).read_text().splitlines()]

    def picture(self, name, picture, step):
        """uint8 array [H, W, 3] to TensorBoard."""
        if self.enabled:
            self.tensorboard.add_image(name, picture, step, dataformats="HWC")

    def close(self):
        if self.enabled:
            self.bar.close()
            self.tensorboard.close()
            self.reports.close()
            self.text.close()


def duration(seconds):
    """1:02:03, without fractions."""
    return str(timedelta(seconds=round(seconds)))


def _continue_jsonl(path, start_step):
    """Opens `path` for appending, less the reports after `start_step` and a line cut off by a crash."""
    kept = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            report = json.loads(line)
        except ValueError:
            continue
        if report["step"] <= start_step:
            kept.append(line)
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(line + "\n" for line in kept))
    os.replace(temporary, path)
    return open(path, "a", encoding="utf-8")
