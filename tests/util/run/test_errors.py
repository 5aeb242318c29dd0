"""What a user reads when an error ends a run."""

import argparse
import sys

import pytest
from torch._utils import ExceptionWrapper

from util.data.images import ImageError
from util.run.errors import refuse


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("'a.jpg' cannot be decoded: it is empty", "'a.jpg' cannot be decoded: it is empty"),
        ("'a.npy' has a large header.\n Give max_header_size.", "'a.npy' has a large header. Give max_header_size."),
        ("'a.jpg' is no image (OSError: broken)", "'a.jpg' is no image (OSError: broken)"),
    ],
)
def test_an_error_of_a_worker_is_its_whole_message_in_one_line(capsys, message, said):
    try:
        try:
            raise KeyError("before")
        except KeyError as error:
            raise ImageError(message) from error
    except ImageError:
        wrapper = ExceptionWrapper(sys.exc_info(), where="in DataLoader worker process 0")
    with pytest.raises(ImageError, match="Traceback") as from_worker:
        wrapper.reraise()
    with pytest.raises(SystemExit) as stop:
        refuse(argparse.ArgumentParser("main.py"), from_worker.value)
    assert stop.value.code == 2 and capsys.readouterr().err == f"main.py: error: {said}\n"
