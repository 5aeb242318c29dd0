"""The Hugging Face Hub, where timm has its weights, on machines without a network."""

from collections.abc import Iterator
from contextlib import contextmanager

TIMEOUT = 10  # seconds


def can_reach_hub() -> bool:
    """Whether one request reaches the Hub."""
    from huggingface_hub import constants, utils

    try:
        utils.get_session().head(constants.ENDPOINT, timeout=TIMEOUT)
    except Exception:  # of requests or httpx, which the library has used, or of its offline mode
        return False
    return True


@contextmanager
def hub_or_cache() -> Iterator[None]:
    """Inside, only the cache is read if the Hub cannot be reached: each missing file would be tried for 25 seconds."""
    from huggingface_hub import constants

    was_offline = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = was_offline or not can_reach_hub()
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = was_offline
