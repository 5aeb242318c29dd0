"""Which pre-trained encoder a run began with, and whether a resumed run still means the same one.

The flag is --finetune of fine-tuning, or --pretrained of pre-training.
"""

from pathlib import Path
from typing import Any

from util.run import checkpoint
from util.run.start import Start


def find_encoder(given: str | None, is_resumed: bool, flag: str = "finetune") -> dict[str, Any] | None:
    """Returns the identity of the checkpoint that is `given` by a flag, or None.

    A resumed run no longer needs the file: the result is None if it is gone. ValueError if a new run does not find it.
    """
    if given is None or (is_resumed and not Path(given).exists()):
        return None
    try:
        path = checkpoint.find_checkpoint_file(given)
    except checkpoint.CheckpointError:  # an empty folder
        if is_resumed:
            return None
        raise
    if not path.is_file():
        raise ValueError(f"--{flag} {given!r} does not exist: give a checkpoint, or the folder of a run")
    return identify_encoder(path, read_meta(path))


def identify_encoder(path: Path, meta: dict[str, Any]) -> dict[str, Any]:
    """Returns path, SHA-256 and progress of the checkpoint at `path`, whose meta is given."""
    encoder = {"path": str(path.resolve()), "sha256": checkpoint.recorded_sha256(path), "step": meta.get("step")}
    if meta.get("settings", {}).get("epochs") and "epoch" in meta:
        encoder |= {"epoch": meta["epoch"], "epochs": meta["settings"]["epochs"]}
    return encoder


def read_meta(path: str | Path) -> dict[str, Any]:
    """Returns the meta of a checkpoint, from its record if there is one."""
    return checkpoint.read_record(Path(path)) or checkpoint.meta_of(checkpoint.read_checkpoint(path))


def warn_if_unfinished(encoder: dict[str, Any]) -> list[str]:
    """Returns a warning if the pre-training of the encoder has not reached its end."""
    if encoder.get("epochs") is None or encoder["epoch"] >= encoder["epochs"]:
        return []
    return [
        f"warning: the training of {encoder['path']} is not finished: it is at step {encoder['step']}, "
        f"epoch {encoder['epoch']:.4g} of {encoder['epochs']}"
    ]


def resume_encoder(
    meta: dict[str, Any], now: dict[str, Any] | None, start: Start, flag: str = "finetune"
) -> tuple[dict[str, Any] | None, list[str]]:
    """Returns (the encoder that a resumed run began with, remarks).

    meta: of the run's checkpoint. now: what `flag` means now. ValueError if that is another encoder.

    If the pre-training run has saved newer checkpoints since, an unfinished fine-tuning run keeps its first encoder and
    ignores them. A finished run is refused instead, because its results would look like those of the newer checkpoint.
    """
    before = meta.get("encoder") or {"path": meta["settings"].get(flag)}
    is_over = meta["epoch"] >= meta["settings"]["epochs"]
    holder, advice = repr(str(start.output_dir)), "choose another --output_dir"
    if start.began_elsewhere:
        holder = f"--resume {str(start.resume_path)!r}"
        advice = (
            f"--resume and --{flag} exclude each other unless the run began with that encoder: leave one of them out"
        )
    remarks = _compare(before, now, is_over, holder, advice)
    return (before if before["path"] else None), remarks


def _compare(before: dict[str, Any], now: dict[str, Any] | None, is_over: bool, holder: str, advice: str) -> list[str]:
    """Returns remarks on the encoder `now`.

    Raises ValueError if the run began with another encoder; the message contains `holder` and `advice`.
    """
    if now is None or now["sha256"] == before.get("sha256"):
        return []
    was = Path(before["path"]).resolve() if before["path"] else None
    new = Path(now["path"]).resolve()
    if "sha256" not in before and was in (new, new.parent):
        return []  # records of older versions hold only a path, of a file or a folder
    then, later = before.get("step"), now.get("step")
    has_grown = then is not None and later is not None and then < later
    same_run = was is not None and was.parent == new.parent and has_grown
    if same_run and not is_over:
        return [f"warning: this run continues from {was}; {new}, which is newer, is ignored"]
    what = "the results" if is_over else "a run"
    if was == new:
        changed = f"{str(new)!r}, which has changed since"
        raise ValueError(f"{holder} holds {what} of an earlier {changed}; {advice}")
    origin = "training from scratch" if was is None else repr(str(was))
    raise ValueError(f"{holder} holds {what} of {origin}, not of {str(new)!r}; {advice}")
