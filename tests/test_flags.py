"""The flags of the mains, and what another value of each changes, as tests/flags.json has them.

Users' scripts depend on the names, and resuming on the changes: a wrong one lets a run resume with other results, or
refuses to resume it. After a deliberate change, which CHANGELOG.md names: `python -m tests.test_flags`.
"""

import importlib
import json
from pathlib import Path

PATH = Path(__file__).with_name("flags.json")
COMMANDS = [
    "main_pretrain",
    "main_pretrain --model greenmim_swin_base_patch4_window7",
    "main_pretrain --model crossmae_vit_micro_patch4",
    "main_pretrain --model tec_vit_micro_patch4",
    "main_pretrain --sampling attention",
    "main_finetune",
    "downstream.segmentation.main_segmentation",
    "downstream.detection.main_detection",
]


def changes_of_flags():
    """Returns {command: {flag: what it changes}}; of the first command all flags, of its variants what differs."""
    found = {}
    for command in COMMANDS:
        program, *flags = command.split()
        parser, _ = importlib.import_module(program).parse_args(flags)
        changes = parser.changes
        if flags:
            changes = {name: change for name, change in changes.items() if found[program].get(name) != change}
        found[command] = changes
    return found


def test_flags_are_frozen():
    assert changes_of_flags() == json.loads(PATH.read_text())


if __name__ == "__main__":
    PATH.write_text(json.dumps(changes_of_flags(), indent=1, sort_keys=True) + "\n")
