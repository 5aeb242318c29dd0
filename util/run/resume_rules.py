"""What may differ between two starts of one run: pure functions on the `meta` of its checkpoint and of the new start.

Settings that change results are refused on resume, unless --allow_changes. Machine flags may differ; where they change
rounding or random draws, that is said.
"""

# Flags that may differ between two starts of one run without changing what it computes.
MACHINE_FLAGS = frozenset(
    (
        *("recipe", "batch_size", "accum_iter", "num_workers", "data_path", "output_dir", "resume", "device"),
        *("attention", "compile", "recompute", "shard", "max_steps", "save_every", "save_steps", "print_freq"),
        *("allow_changes", "max_bad_fraction", "dist_timeout"),
    )
)
# Another split of the same total batch: the same images in the same steps.
SPLIT_FLAGS = ("batch_size", "accum_iter")
# Machine flags with which results agree to rounding, but not bit for bit.
ROUNDING_FLAGS = ("attention", "compile", "device", "shard")
# Flags that may differ between the processes of one start: paths that are local to a node, and what a node can do.
PROCESS_FLAGS = frozenset(("num_workers", "data_path", "teacher"))


def find_changes(before: dict, now: dict, machine_flags: frozenset[str] | set[str]) -> list[str]:
    """What differs between the run so far (`before`) and this start (`now`), and changes the results; one sentence each.

    Both are a checkpoint's meta. A setting that only one of them knows is no change: a flag that the program did not
    have yet has the default of what was done before.
    """
    was, settings = before["settings"], now["settings"]
    names = sorted(was.keys() & settings.keys() - machine_flags - set(SPLIT_FLAGS))
    changes = [f"--{name} was {was[name]} and now is {settings[name]}" for name in names if was[name] != settings[name]]
    for what, count, fingerprint in (("", "num_images", "data"), ("validation ", "num_val_images", "val_data")):
        if any(before.get(key, now.get(key)) != now.get(key) for key in (count, fingerprint)):
            had, has = (f"{meta[count]} images (names and labels {str(meta.get(fingerprint, '?'))[:8]})" for meta in (before, now))
            consequence = "an accuracy on them is not comparable" if what else "their order would be another"
            changes.append(f"the {what}data had {had} and now has {has}: {consequence}")
    if before.get("teacher") != now.get("teacher"):
        changes.append("the teacher's weights differ from those so far")
    return changes


def find_notes(before: dict, now: dict, machine_flags: frozenset[str] | set[str], has_dropout: bool) -> list[str]:
    """What differs between the run so far and this start, and may; one sentence each. `has_dropout`: the model draws
    random numbers in its forward pass."""
    was, settings, notes = before["settings"], now["settings"], []
    split = {name: (was[name], settings[name]) for name in sorted(SPLIT_FLAGS)}
    split["world_size"] = before["world_size"], now["world_size"]
    changed = [f"{name} was {old} and now is {new}" for name, (old, new) in split.items() if old != new]
    if changed:
        draws = "" if "batch_size" in machine_flags else "; random draws and statistics within a step differ"
        notes.append(f"note: the same images in each step, split otherwise ({', '.join(changed)}){draws}")
    known = [name for name in ROUNDING_FLAGS if name in was and name in settings]
    flags = [f"--{name} was {was[name]} and now is {settings[name]}" for name in known if was[name] != settings[name]]
    if flags:
        draws = ""
        if has_dropout and was.get("compile") != settings.get("compile"):
            draws = "; compiled code draws its own random numbers, so drop path differs"
        notes.append(f"note: {', '.join(flags)}: results agree to rounding, not to the last bit{draws}")
    files = [str(meta.get("code", "")).rpartition("files ")[2] for meta in (before, now)]  # the commit may be another
    if files[0] not in ("", files[1]):
        notes.append(f"note: the code has changed since this checkpoint was written: {before['code']} then, {now['code']} now")
    return notes
