"""Reads the documents: their pages, fenced blocks, prose, tables, shell commands, and the programs that these run."""

import argparse
import importlib
import re
import shlex
import string
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from torch.distributed.run import get_args_parser as torchrun_parser

from downstream.recipes import DETECTION_RECIPES, SEGMENTATION_RECIPES
from recipes import FINETUNE_RECIPES
from submitit_launch import MAINS as MAINS_OF_THE_LAUNCHER
from tests.patches import MonkeyPatch
from tests.scripts.programs import MAINS, ROOT, SCRIPTS
from util.run.cli import Parser

DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RECIPES_OF = {
    "main_finetune.py": FINETUNE_RECIPES,
    "downstream/segmentation/main_segmentation.py": SEGMENTATION_RECIPES,
    "downstream/detection/main_detection.py": DETECTION_RECIPES,
}


def page_name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks_of(path: Path, *languages: str) -> list[str]:
    """Returns the fenced blocks of a page that are in one of the languages."""
    return [text for language, text in FENCE.findall(path.read_text()) if language in languages]


def prose_of(path: Path) -> str:
    """Returns a page without its fenced blocks."""
    return FENCE.sub("", path.read_text())


def slugs_of(path: Path) -> set[str]:
    """Returns the anchors of a page's headings, as GitHub makes them."""
    slugs = set()
    for heading in re.findall(r"^#+ (.+)$", prose_of(path), re.MULTILINE):
        slugs.add(re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-"))
    return slugs


# ------------------------------------------------------------------------------------------------------------ commands


@dataclass(frozen=True)
class Command:
    """A shell command of a page, as words."""

    page: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}: {shlex.join(self.words)}"


def commands_of(path: Path) -> list[Command]:
    """Returns the simple commands of a page's shell blocks. Variables that were set before are filled in."""
    variables: dict[str, str] = {}
    commands = []
    for block in blocks_of(path, "bash", "sh", "shell"):
        for line in block.replace("\\\n", " ").splitlines():
            for words in split_line(string.Template(line).safe_substitute(variables)):
                words = take_assignments(words, variables)
                if words:
                    commands.append(Command(page_name(path), tuple(words)))
    return commands


def split_line(line: str) -> list[list[str]]:
    """Splits a shell line at `;`, `&&`, `|` and the like, and drops comments and the operators of redirections."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    commands: list[list[str]] = [[]]
    for word in lexer:
        if set(word) <= set(";&|()<>"):
            commands.append([])
        else:
            commands[-1].append(word)
    return commands


def take_assignments(words: list[str], variables: dict[str, str]) -> list[str]:
    """Moves the assignments at the beginning of a command to `variables`; returns the rest."""
    for i, word in enumerate(words):
        assignment = re.fullmatch(r"(\w+)=(.*)", word)
        if assignment is None:
            return words[i:]
        variables[assignment[1]] = assignment[2]
    return []


@cache
def all_commands() -> list[Command]:
    commands = []
    for path in DOCUMENTS:
        commands += commands_of(path)
    return commands


def program_of(command: Command) -> tuple[str, list[str]] | None:
    """Returns (the project's program that a command runs, its arguments), or None for other programs."""
    for i, word in enumerate(command.words):
        name = word.removeprefix("./")
        if i > 0 and (name in MAINS or name in SCRIPTS):
            return name, list(command.words[i + 1 :])
    return None


# ------------------------------------------------------------------------------------------------------------- parsers


class ParserFound(BaseException):
    """Carries the parser that a program has built. No program catches it."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        super().__init__(parser)
        self.parser = parser


def parser_of(program: str) -> argparse.ArgumentParser:
    """Returns the parser that the program builds for its command line."""
    module = importlib.import_module(program.removesuffix(".py").replace("/", "."))

    def stop(parser: argparse.ArgumentParser, *_: object) -> None:
        raise ParserFound(parser)

    with MonkeyPatch.context() as patch:
        patch.setattr(Parser, "parse_known_args", stop)
        try:
            module.main([])
        except ParserFound as found:
            return found.parser
    raise AssertionError(f"{program} parses no command line")


def parse(command: Command) -> None:
    """Parses a command as its program does; ends with the program's own SystemExit if it is wrong."""
    found = program_of(command)
    if found is None:
        return
    if command.words[0] == "torchrun":
        torchrun_parser().parse_args(command.words[1:])
    program, arguments = found
    args = parse_arguments(program, arguments)
    if program == "submitit_launch.py":
        parse_arguments(MAINS_OF_THE_LAUNCHER[args.main].replace(".", "/") + ".py", args.argv)


def parse_arguments(program: str, arguments: list[str]) -> argparse.Namespace:
    module = importlib.import_module(program.removesuffix(".py").replace("/", "."))
    if program != "submitit_launch.py" and hasattr(module, "parse_args"):
        return module.parse_args(arguments)[1]
    return parser_of(program).parse_args(arguments)
