"""Numbers, lists and tables as text, for messages and results."""


def format_count(count: int, noun: str, plural: str | None = None) -> str:
    """A number with its noun, for messages and results: 1 row, 2,000 rows."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def join_first_names(names: list[str], count: int = 3) -> str:
    """Join the first names, and the number of the others."""
    return ", ".join(names[:count]) + (f" and {len(names) - count:,} more" if len(names) > count else "")


def format_duration(minutes: float) -> str:
    for unit, size in (("days", 24 * 60), ("hours", 60)):
        if minutes > 2 * size:
            return f"{minutes / size:.1f} {unit}"
    return f"{minutes:.1f} minutes"


def markdown_table(cells: list[list[str]]) -> str:
    """An aligned Markdown table; the first row is the header."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in cells]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    rows = [
        "| " + " | ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) + " |" for row in cells
    ]
    return "\n".join([rows[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *rows[1:]])
