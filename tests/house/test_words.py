"""Words that we do not write, in the pages and in the comments, docstrings and messages of the code.

Each is exact for its author and a riddle for a reader whose English is a second language. The second column says what
to write instead. Code spans of the pages, and blocks of code in them, may say what they like.
"""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    {*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "tests/README.md", ROOT / "benchmarks/README.md"}
)
WITH_SUCH_WORDS = {"tests/house/test_words.py", "tests/benchmarks/test_end_to_end.py"}
"""They test these words, and a command that has one as an option."""
PYTHON = sorted(
    path
    for folder in ("deepoffload", "examples", "csrc", "tests")
    for path in (ROOT / folder).rglob("*.py")
    if str(path.relative_to(ROOT)) not in WITH_SUCH_WORDS
)
NATIVE = sorted(path for path in (ROOT / "csrc").rglob("*") if path.suffix in (".c", ".h", ".cpp"))

WORDS = (
    (r"who(?:m|so)?ever|whichever", "name who or which it is"),
    (r"whatever", "any, every, everything that"),
    (r"wherever", "where, if"),
    (r"go(?:es|ne|ing)? on with", "continue, resume"),
    (r"anew", "again"),
    (r"besides?", "next to, in addition to, without"),
    (r"(?:is|are|was|were) to be", "present tense and active: who does it?"),
    (r"ma(?:ke|kes|de|king) (?:its|their) step", "is updated, updates"),
    (r"nor (?:has|have|is|are|does|do)", "a sentence with not"),
    (r"of (?:its|their) own(?=\s*(?:[.,;:)]|$|and\b|from\b|is\b|tells\b|which\b|that\b))", "its own X, a separate X"),
    (r"hence|thus|thereby|lest|shall", "so"),
    (r"for ever", "always, without end"),
)
SAY = re.compile(r",\s+say\s*[,;:.)]|,\s+say$")
"""``say`` where it means: for example."""

_ALL = re.compile("|".join(rf"\b(?:{words})(?!\w)".replace(" ", r"\s+") for words, _ in WORDS), re.I)
_CODE = re.compile(r"^```.*?^```|``[^`]+``|`[^`]+`|\]\([^)]*\)", re.S | re.M)


def found_in(text: str) -> list[tuple[int, str]]:
    """Line number and words of what should be said in another way."""
    hits = [*_ALL.finditer(text), *SAY.finditer(text)]
    return [(text.count("\n", 0, hit.start()) + 1, " ".join(hit.group().split())) for hit in hits]


def without_code(page: str) -> str:
    """The page with its code as blanks, so that lines keep their numbers."""
    return _CODE.sub(lambda code: re.sub(r"[^\n]", " ", code.group()), page)


def texts_of_python(source: str) -> str:
    """Comments and strings of a file, with all else as blanks; comments of following lines make one text."""
    kept = [[" "] * len(line) for line in source.split("\n")]
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING) or tokenize.tok_name[token.type] == "FSTRING_MIDDLE":
            for offset, line in enumerate(token.string.split("\n")):
                start = token.start[1] if offset == 0 else 0
                kept[token.start[0] - 1 + offset][start : start + len(line)] = line
    return without_code("\n".join("".join(line).replace("#", " ") for line in kept))


def texts_of_c(source: str) -> str:
    """The same of C and C++."""
    comments = re.finditer(r"/\*.*?\*/|//[^\n]*|\"(?:[^\"\\\n]|\\.)*\"", source, re.S)
    kept = list(re.sub(r"[^\n]", " ", source))
    for comment in comments:
        kept[comment.start() : comment.end()] = re.sub(
            r"^\s*(?://|\*)", lambda m: " " * len(m[0]), comment[0], flags=re.M
        )
    return "".join(kept)


def all_texts() -> Iterator[tuple[Path, str]]:
    for path in PAGES:
        yield path, without_code(path.read_text(encoding="utf-8"))
    for path in PYTHON:
        yield path, texts_of_python(path.read_text(encoding="utf-8"))
    for path in NATIVE:
        yield path, texts_of_c(path.read_text(encoding="utf-8"))


def test_texts_are_in_plain_words() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {words}" for path, text in all_texts() for line, words in found_in(text)
    ]
    instead = "\n".join(f"  {words}: {plain}" for words, plain in WORDS)
    assert not found, "\n".join(found) + "\nwrite instead:\n" + instead + "\n  say: for example, such as"


@pytest.mark.parametrize(
    "text",
    [
        "Whoever comes next waits.",
        "it is gone on\nwith later",
        "the scales beside them",
        "a block that is to be read",
        "units make their step here",
        "not said, nor has anyone asked",
        "a thread of its own.",
        "in memory of their own, and",
        "large ones (fp16, say) are",
        "a function found in a dictionary, say.",
        "read anew",
    ],
)
def test_each_rule_finds_its_words(text: str) -> None:
    assert found_in(text)


@pytest.mark.parametrize(
    "text",
    [
        "the weights of its own module",
        "They take parameters side by side.",
        "The docs say, in one line, what it does.",
        "a new one, says the log",
        without_code("`beside` and\n```\nwhoever\n```\n"),
        texts_of_python("beside = whoever  # a name\n"),
        texts_of_c("int beside; // a name"),
    ],
)
def test_ordinary_texts_are_left_alone(text: str) -> None:
    assert not found_in(text)


def test_texts_of_code_are_read() -> None:
    assert found_in(texts_of_python("x = 1\n# gone on\n# with\n")) == [(2, "gone on with")]
    assert found_in(texts_of_python('def f():\n    """Beside."""\n')) == [(2, "Beside")]
    assert found_in(texts_of_c("/* next\n * whoever */ int x; // anew\n")) == [(2, "whoever"), (2, "anew")]
