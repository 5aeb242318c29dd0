"""Command lines that speak plainly: short errors, and recipes as named defaults."""

import argparse
import difflib
import os


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one paragraph, without forty lines of usage before it."""

    def error(self, message):
        self.exit(2, f"{self.prog}: error: {message}\n(`{self.prog} --help` lists every flag)\n")


def parse_with_recipe(parser, recipes, argv=None):
    """Parses `argv`; `--recipe NAME` sets defaults from `recipes[NAME]`, and flags given explicitly win."""
    name = parser.parse_known_args(argv)[0].recipe
    if name is not None:
        if name not in recipes:
            near = difflib.get_close_matches(name, recipes, n=3, cutoff=0.3) or list(recipes)
            parser.error(f"unknown recipe {name!r}; close to it: {', '.join(near)} (all of them: recipes.py)")
        flags = {action.dest for action in parser._actions}
        unknown = [key for key in recipes[name] if key not in flags]
        if unknown:
            parser.error(f"recipe {name!r} sets {', '.join(unknown)}, which {parser.prog} does not know")
        parser.set_defaults(**recipes[name])
    return parser.parse_args(argv)


def why_not_writable(path):
    """Why no file can be written at `path`, asked before minutes of measuring; None if it can."""
    folder = path.resolve().parent
    if not folder.is_dir():
        return f"there is no folder {str(folder)!r}"
    if path.is_dir():
        return "it is a folder"
    return None if os.access(path if path.exists() else folder, os.W_OK) else "permission denied"
