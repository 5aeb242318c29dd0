"""Uploads the folder that scripts/export.py writes to the Hugging Face Hub."""

from pathlib import Path
from typing import Any

# Files of a folder. PROCESSOR is for Transformers alone.
CONFIG, WEIGHTS, CARD, RECORD = "config.json", "model.safetensors", "README.md", "export.json"
PROCESSOR = "preprocessor_config.json"


def open_hub(name: str, overwrite: bool) -> tuple[Any, str]:
    """Returns (the Hub's client, the full name of the repository). ValueError if nothing can be uploaded there."""
    from huggingface_hub import HfApi  # comes with timm
    from huggingface_hub.errors import LocalTokenNotFoundError
    from huggingface_hub.utils import validate_repo_id

    validate_repo_id(name)  # its errors are ValueErrors
    api = HfApi()
    try:
        user = api.whoami()["name"]
        name = name if "/" in name else f"{user}/{name}"
        is_used = api.file_exists(name, CONFIG)
    except LocalTokenNotFoundError as error:
        raise ValueError("--push_to_hub needs a login: run `hf auth login`, or set HF_TOKEN") from error
    except Exception as error:  # many types: no network, a wrong token, errors of the server
        raise ValueError(f"--push_to_hub {name}: the Hub cannot be used: {error}") from error
    if is_used and not overwrite:
        raise ValueError(f"--push_to_hub {name} holds a model; give another name, or --overwrite to add a commit")
    return api, name


def push(api: Any, name: str, folder: Path, private: bool) -> str:
    """Uploads the files that this script has written into `folder`. Return a line that names the repository."""
    try:
        api.create_repo(name, private=private, exist_ok=True)
        if private and not api.model_info(name).private:
            raise ValueError("it exists and is public, but --private was given")
        patterns = [CONFIG, WEIGHTS, PROCESSOR, CARD, RECORD]
        api.upload_folder(
            repo_id=name, folder_path=str(folder), allow_patterns=patterns, commit_message="Export from PR-MIM"
        )
    except Exception as error:  # many types: no network, no permission, errors of the server
        raise ValueError(
            f"{str(folder)!r} is written, but it was not uploaded to {name}: {error}; upload it later with "
            f"`hf upload {name} {folder}`"
        ) from error
    return f"uploaded to https://huggingface.co/{name}"
