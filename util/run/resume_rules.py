"""Rules for what may differ between two starts of one run: the `meta` of its checkpoint against that of the new start.

A changed setting that changes results is refused on resume, unless --allow_changes is given. Machine flags may change.
If a changed machine flag affects rounding or random draws, a note says so.
"""

from collections.abc import Mapping, Set
from typing import Any

Meta = Mapping[str, Any]

# Flags that may differ between two starts of one run: they do not change what it computes.
MACHINE_FLAGS = frozenset(
    (
        *("recipe", "batch_size", "accum_iter", "num_workers", "data_path", "output_dir", "resume", "device"),
        *("attention", "compile", "recompute", "shard", "max_steps", "save_every", "save_steps", "print_freq"),
        *("allow_changes", "max_bad_fraction", "dist_timeout", "image_column", "label_column"),
    )
)
# Flags that split the total batch. Each step sees the same images with any split.
SPLIT_FLAGS = ("batch_size", "accum_iter")
# Machine flags that change results by rounding errors.
ROUNDING_FLAGS = ("attention", "compile", "device", "shard")
# Flags that may differ between the processes of one start: paths and resources of a node.
PROCESS_FLAGS = frozenset(("num_workers", "data_path"))


def find_changes(
    before: Meta,
    now: Meta,
    machine_flags: Set[str],
    fixed_flags: Set[str] = frozenset(),
    files: Mapping[str, str] | None = None,
) -> list[str]:
    """Returns a sentence for each difference between a checkpoint's meta and this start's that changes results.

    machine_flags: flags that may differ. fixed_flags: those of them that may not. files: {flag: fingerprint} of files
    with weights that the model reads. A setting that only one of the two has is no change. The default of a new flag
    keeps the former behaviour.
    """
    was, settings = before["settings"], now["settings"]
    names = sorted(was.keys() & settings.keys() - (machine_flags - fixed_flags))
    changes = [f"--{name} was {was[name]} and now is {settings[name]}" for name in names if was[name] != settings[name]]
    for what, count, fingerprint, consequence in (
        ("data", "num_images", "data", "the images would come in another order"),
        ("validation data", "num_val_images", "val_data", "the accuracies would not be comparable"),
    ):
        if any(before.get(key, now.get(key)) != now.get(key) for key in (count, fingerprint)):
            prints = [str(meta.get(fingerprint, "?"))[:8] for meta in (before, now)]
            had = f"{before[count]} images (names and labels {prints[0]})"
            has = f"{now[count]} images (names and labels {prints[1]})"
            paths = was.get("data_path"), settings.get("data_path")
            moved = f" (--data_path was {paths[0]} and now is {paths[1]})" if paths[0] != paths[1] else ""
            changes.append(f"the {what} had {had} and now has {has}: {consequence}{moved}")
    was_stored, is_stored = (meta.get("pixels", "uint8") for meta in (before, now))
    if was_stored != is_stored:
        changes.append(f"the images had pixels of {was_stored} and now have {is_stored}")
    for name, fingerprint in (files or {}).items():
        if before.get(name) != fingerprint:
            changes.append(f"the {name}'s weights have changed")
    return changes


def find_notes(before: Meta, now: Meta, has_dropout: bool, split_changes_draws: bool) -> list[str]:
    """Returns a note for each difference that is allowed and may affect rounding, random draws or the code.

    has_dropout: whether the model draws random numbers in its forward pass. split_changes_draws: whether random draws
    or statistics depend on how the total batch is split.
    """
    was, settings, notes = before["settings"], now["settings"], []
    split = {name: (was[name], settings[name]) for name in sorted(SPLIT_FLAGS)}
    split["world_size"] = before["world_size"], now["world_size"]
    changed = [f"{name} was {old} and now is {new}" for name, (old, new) in split.items() if old != new]
    if changed:
        draws = "; random draws and statistics within a step differ" if split_changes_draws else ""
        notes.append(f"note: each step has the same images, but is split otherwise ({', '.join(changed)}){draws}")
    known = [name for name in ROUNDING_FLAGS if name in was and name in settings]
    flags = [f"--{name} was {was[name]} and now is {settings[name]}" for name in known if was[name] != settings[name]]
    if flags:
        draws = ""
        if has_dropout and was.get("compile") != settings.get("compile"):
            draws = "; compiled code draws other random numbers, so drop path differs"
        notes.append(f"note: {', '.join(flags)}: results agree to rounding, not to the last bit{draws}")
    # Only the hash of the files is compared: a commit may change other files.
    files = [str(meta.get("code", "")).rpartition("files ")[2] for meta in (before, now)]
    if files[0] not in ("", files[1]):
        versions = f"{before['code']} then, {now['code']} now"
        notes.append(f"note: the code has changed since this checkpoint was written: {versions}")
    return notes
