"""What the command lines here have in common."""

import argparse
from collections.abc import Callable, Collection

from batch import Size


def some_of(allowed: Collection[str]) -> Callable[[str], list[str]]:
    """The type of an argument that is words with commas between them, each one of `allowed`."""

    def words(text: str) -> list[str]:
        found = [word.strip() for word in text.split(",") if word.strip()]
        if unknown := [word for word in found if word not in allowed]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(allowed)}")
        return found

    return words


def sizes(text: str) -> list[Size]:
    return [Size.parse(word) for word in text.split(",")]


def parser_of(description: str | None, sections: Collection[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    chosen = f"of {','.join(sections)}; default: all"
    parser.add_argument("--section", type=some_of(sections), default=list(sections), help=chosen)
    return parser
