"""The encoder that a run begins with: which checkpoint it is, and whether a resumed run still means the same one."""

from pathlib import Path

from util import collectives
from util.run.errors import CheckpointError
from util.run.files import checkpoint
from util.run.files.record import CheckpointInfo, EncoderSource


def find_first_weights(
    path: str | None, flag: str, resumed: CheckpointInfo | None
) -> tuple[EncoderSource | None, list[str]]:
    """Returns (the checkpoint that the run begins with, or began with, notes). All ranks must call it.

    path: the value of `flag`.
    """
    given = collectives.run_on_rank0(lambda: find_encoder(path, resumed is not None, flag))
    if resumed is None:
        return given, []
    return choose_encoder(resumed, given, flag)


def find_encoder(path: str | None, is_resumed: bool, flag: str) -> EncoderSource | None:
    """Returns the checkpoint at the `path` that a flag gives, or None.

    A resumed run no longer needs the file: the result is None if it is gone. ValueError if a new run does not find it.
    """
    if path is None or (is_resumed and not Path(path).exists()):
        return None
    try:
        file = checkpoint.find_checkpoint_file(path)
    except CheckpointError:  # an empty folder
        if is_resumed:
            return None
        raise
    if not file.is_file():
        raise ValueError(f"--{flag} {path!r} does not exist: give a checkpoint, or the folder of a run")
    if not Path(path).is_dir():  # whose checkpoint is verified
        checkpoint.refuse_damage(file)
    return identify_encoder(file)


def identify_encoder(path: Path) -> EncoderSource:
    """Returns path, SHA-256, and progress of the checkpoint at `path`, if it lies beside its sidecar."""
    named = path.parent.resolve() / path.name  # the file itself may be a link to a name that tells nothing
    sha256 = checkpoint.recorded_sha256(path)
    info = checkpoint.read_sidecar(path)
    if info is None or info.run is None:
        return EncoderSource(str(named), sha256)
    return EncoderSource(str(named), sha256, info.run.step, info.run.epoch, info.settings["epochs"])


def choose_encoder(
    resumed: CheckpointInfo, given: EncoderSource | None, flag: str
) -> tuple[EncoderSource | None, list[str]]:
    """Returns (the encoder that the resumed run began with, notes).

    given: what `flag` means now. ValueError if that is another encoder.

    If the pre-training run has saved newer checkpoints since, an unfinished fine-tuning run keeps its first encoder and
    ignores them. A finished run is refused instead, because its results would look like those of the newer checkpoint.
    """
    assert resumed.run is not None
    first = resumed.run.encoder
    if given is None or (first is not None and given.sha256 == first.sha256):
        return first, []
    if first is not None and given.is_newer_save_of(first) and not resumed.is_finished:
        old = Path(first.path).resolve()
        new = Path(given.path).resolve()
        return first, [f"warning: this run continues from {old}; {new}, which is newer, is ignored"]
    began_with = "random weights"
    if first is not None:
        began_with = f"{str(Path(first.path).resolve())!r}, SHA-256 {first.sha256[:8]}"
    raise ValueError(
        f"--{flag} {str(Path(given.path).resolve())!r} has SHA-256 {given.sha256[:8]}, but the resumed run began with "
        f"{began_with}: choose another --output_dir"
    )
