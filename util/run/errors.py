"""What cannot be used."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be used for its purpose. The message is meant for the user."""
