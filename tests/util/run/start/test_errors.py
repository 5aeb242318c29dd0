"""What a user reads when an error ends a run."""

import pytest
import torch

from tests.runs import pretrain
from util.run.start.errors import is_full_gpu


def test_a_full_gpu_ends_a_run_with_one_sentence(photos, tmp_path, capsys, before_step):
    def fill():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 1")

    before_step(1, fill)
    message = pretrain.refused(capsys, photos, tmp_path / "out")
    assert "CUDA out of memory, in micro-batches of 8 images: lower --batch_size" in message
    assert len(message.strip().splitlines()) == 1


def test_a_bug_in_training_is_no_error_of_the_user(photos, tmp_path, before_step):
    def fail():
        raise ValueError("a bug")

    before_step(1, fail)
    with pytest.raises(RuntimeError, match="a bug"):
        pretrain(photos, tmp_path / "out")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        ("NCCL error in: ProcessGroupNCCL.cpp: Cuda failure 2 'out of memory'", True),
        ("CUDA error: out of memory", True),
        ("CUDA error: an illegal memory access was encountered", False),
        ("shape '[2, 3]' is invalid for input of size 5", False),
    ],
)
def test_memory_that_a_library_of_a_gpu_did_not_get_is_told_from_bugs(text, expected):
    assert is_full_gpu(RuntimeError(text)) == expected
    assert not is_full_gpu(ValueError(text))
