"""What `tyro` complains of, in our words: what came, what is allowed, what to do."""

import re
from collections.abc import Callable

Helps = dict[str, str]  # what is said of each flag; of what is given by its place, under its name without dashes


def in_our_words(box: str, command: str, helps: Helps) -> str:
    """One sentence for a box of tyro's; where it says something new, in its own words."""
    return "; ".join(reworded(sentence, command, helps) for sentence in sentences_of(box))


def sentences_of(box: str) -> list[str]:
    """What a box says, in whichever characters it is drawn, without its title and excerpts of the help."""
    _, *sections = re.split(r"^.*[─-]{5,}.*$", box, flags=re.MULTILINE)
    sections = [re.sub(r"^│? {9}.*$", "", section, flags=re.MULTILINE) for section in sections]  # a flag's help
    said = [" ".join(section.replace("│", " ").split()) for section in sections]
    told = [part for part in said if part and not part.startswith(("For full", "Argument helptext"))]
    return [re.sub(r" Got errors: .*", "", part) for part in told]


def reworded(sentence: str, command: str, helps: Helps) -> str:
    """A sentence of tyro's in our words."""
    for pattern, words in OURS.items():
        if found := re.fullmatch(pattern, sentence):
            return words(found, command, helps)
    return sentence


def no_whole_number(found: re.Match[str], command: str, helps: Helps) -> str:
    """For --steps 1e4, 10,000 or 2.5."""
    flag, came = found.groups()
    plain = came.replace(",", "")
    is_whole = re.fullmatch(r"\d+(\.\d*)?([eE]\+?\d)?", plain) is not None and float(plain).is_integer()
    return f"{flag} is {came!r}; it must be a whole number, in digits{f': {int(float(plain))}' if is_whole else ''}"


def no_number(found: re.Match[str], command: str, helps: Helps) -> str:
    """For --minutes 1,5."""
    return f"{found[1]} is {found[2]!r}; it must be a number, such as 3, 0.5 or 1e-4"


def no_choice(found: re.Match[str], command: str, helps: Helps) -> str:
    """For --size huge."""
    came, flag, choices = found.groups()
    allowed = re.findall("'(.*?)'", choices)
    return f"{flag} is {came!r}; choose from {', '.join(allowed)}"


def no_value(found: re.Match[str], command: str, helps: Helps) -> str:
    """For --steps with nothing behind it."""
    return f"{found[1]} came without a value; write behind it what it is: {explained(found[1], helps)}"


def no_place(found: re.Match[str], command: str, helps: Helps) -> str:
    """For --steps 1 2."""
    return f"{found[1]!r} belongs to no flag of electra {command}; leave it out, or put in quotes what goes together"


def missing(found: re.Match[str], command: str, helps: Helps) -> str:
    """For a command without what it needs: flags with what they take (--data PATH), and what stands by itself."""
    flags = [flag for flag, _ in re.findall(r"(--\S+) \S+|(\S+)", found[1])]
    told = [f"{flag}: {explained(flag, helps)}" if flag else explained(by_place(helps), helps) for flag in flags]
    return f"electra {command} needs {'; and '.join(told)}"


def by_place(helps: Helps) -> str:
    """What a command is given without a flag."""
    return next(name for name in helps if not name.startswith("--"))


def explained(flag: str, helps: Helps) -> str:
    """The first sentence that is said of a flag, as a part of another."""
    first = helps[flag].split(". ")[0].rstrip(".")
    return first if first[1:2].isupper() else first[:1].lower() + first[1:]


OURS: dict[str, Callable[[re.Match[str], str, Helps], str]] = {
    r"Error parsing (\S+): invalid literal for int\(\) with base 10: ['\"](.*)['\"]": no_whole_number,
    r"Error parsing (\S+): could not convert string to float: ['\"](.*)['\"]": no_number,
    r"invalid choice '(.*)' for argument '(\S+)'\. Expected one of \((.*)\)\.": no_choice,
    r"Missing value for argument '(\S+)'\. Expected 1 values\.": no_value,
    r"Unrecognized options: (.*)": no_place,
    r"Missing from electra \S+: (.*)": missing,
}
