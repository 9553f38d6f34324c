"""The studies: settings of pre-training, the paper's numbers, and the orderings that the paper reports.

The study `compare` is made from the settings that a user names.

Sections, tables and figures are those of arXiv 2003.10555. Its scores are means of GLUE's dev sets, after far longer
training than a study usually has: orderings compare, values do not.
"""

from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from electra.config import parse_named_settings
from electra.errors import ConfigError
from electra.model.config import Size
from electra.pretraining.config import BUDGETS, COMMAND_SETTINGS, PretrainConfig
from electra.studies.config import StudyConfig, StudyName

BERT = {"objective": "mlm", "mask_token_probability": 0.8, "random_token_probability": 0.1}
EQUAL_GENERATOR = {"generator_width": Fraction(1)}
TWO_STAGE = {"phases": ("objective=mlm", "objective=frozen-rtd"), "sharing": "none"} | EQUAL_GENERATOR
ADVERSARIAL_SECOND = {  # the first phase keeps its peak learning rate; the second has its own schedule and optimizer
    "phases": ("objective=rtd,schedule=wsd,decay-fraction=0", "objective=adversarial")
}


@dataclass(frozen=True)
class StudySetting:
    """One setting of a study: a row of its table and a point of its figure."""

    label: str
    settings: dict[str, Any]  # of electra pretrain; a Fraction is of the discriminator's width
    paper: float | None = None  # GLUE score
    series: str = ""  # line of the figure
    x: float | None = None  # place on the figure's axis; None with an axis of FLOPs: those of the run
    budget: Fraction = Fraction(1)  # of the study's
    rows_of: Size | None = None  # the size whose recipe sets rows and masks, unless --pretraining does


@dataclass(frozen=True)
class Study:
    """A question, the settings that answer it, and the paper's answer."""

    question: str
    source: str  # in the paper; empty for settings of the user's own
    settings: list[StudySetting]
    orderings: list[tuple[str, str]] = field(default_factory=list)  # labels: the first is better in the paper
    xlabel: str = ""  # of a figure with lines; empty: a figure with a row for each setting
    is_log: bool = False
    paper_lines: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """By label: lines of the paper's figures or tables that have no equal among our settings."""

    def own_settings(self) -> set[str]:
        """The names that rows of the study set, which --pretraining must not change, except for the masking of BERT,
        which the other objectives may have as well."""
        if not self.source:  # settings of the user's own
            return set()
        return {name for setting in self.settings for name in setting.settings} - (BERT.keys() - {"objective"})


def above(better: list[str], worse: list[str]) -> list[tuple[str, str]]:
    return [(first, second) for first in better for second in worse]


def compute_setting(name: str, settings: dict[str, Any], size: str, budget: Fraction) -> StudySetting:
    """The recipe of tiny has rows for CPUs; here all sizes have those of small."""
    label, series = f"{name}, {size}, {budget}", f"{name}, {size}"
    return StudySetting(label, settings | {"size": size}, series=series, budget=budget, rows_of="small")


SET_BY_STUDY = ("data", "seed", "device", *COMMAND_SETTINGS, *BUDGETS)  # not by settings
COMPUTE_SIZES, COMPUTE_BUDGETS = ("small", "tiny"), (Fraction(1), Fraction(1, 2), Fraction(1, 4))

STUDIES: dict[StudyName, Study] = {
    "objectives": Study(
        question="Which part of the objective helps: learning from all tokens, or no [MASK] in the input?",
        source="Table 5 (section 3.5)",
        settings=[
            StudySetting("ELECTRA", {}, 85.0),
            StudySetting("All-Tokens MLM", {"objective": "all-tokens-mlm"}, 84.3),
            StudySetting("Replace MLM", {"objective": "replace-mlm"}, 82.4),
            StudySetting("ELECTRA 15 %", {"objective": "electra-15"}, 82.4),
            StudySetting("BERT", BERT, 82.2),
        ],
        orderings=[
            ("ELECTRA", "All-Tokens MLM"),
            *above(["ELECTRA", "All-Tokens MLM"], ["Replace MLM", "ELECTRA 15 %", "BERT"]),
            *above(["Replace MLM", "ELECTRA 15 %"], ["BERT"]),
        ],
    ),
    "generator-size": Study(
        question="How large should the generator be?",
        source="Figure 3, left (section 3.2); its values are not printed",
        settings=[
            StudySetting("1/4", {"generator_width": Fraction(1, 4)}, x=0.25),
            StudySetting("unigram", {"generator": "unigram"}, x=0.0),
            StudySetting("1/8", {"generator_width": Fraction(1, 8)}, x=0.125),
            StudySetting("1/2", {"generator_width": Fraction(1, 2)}, x=0.5),
            StudySetting("1", EQUAL_GENERATOR, x=1.0),
        ],
        orderings=above(["1/4", "1/2"], ["1", "unigram"]),
        xlabel="width of the generator / width of the discriminator (0: samples by token frequency)",
    ),
    "algorithms": Study(
        question="Is joint training better than training in two stages or adversarially?",
        source="Figure 3, right (section 3.2); its values are not printed",
        settings=[
            StudySetting("joint", {}),
            StudySetting("joint, equal sizes, nothing shared", EQUAL_GENERATOR | {"sharing": "none"}),
            StudySetting("two-stage", TWO_STAGE),
            StudySetting("adversarial", {"objective": "adversarial"}),
            StudySetting("joint, then adversarial", ADVERSARIAL_SECOND),
            StudySetting("BERT", BERT),
        ],
        orderings=[
            ("joint, equal sizes, nothing shared", "two-stage"),
            *above(["joint"], ["adversarial", "BERT"]),
            ("adversarial", "BERT"),
        ],
    ),
    "sharing": Study(
        question="Which weights should generator and discriminator share, if they have the same size?",
        source="section 3.2; disentangled sharing is DeBERTa-v3's (arXiv 2111.09543)",
        settings=[
            StudySetting("embeddings", EQUAL_GENERATOR, 84.3),
            StudySetting("none", EQUAL_GENERATOR | {"sharing": "none"}, 83.6),
            StudySetting("all", {"sharing": "all"}, 84.4),
            StudySetting("disentangled", EQUAL_GENERATOR | {"sharing": "disentangled"}),
        ],
        orderings=[("embeddings", "none"), ("all", "none")],
    ),
    "compute": Study(
        question="How does the score grow with compute, for ELECTRA and for BERT?",
        source="Figures 1 and 4, Table 1",
        settings=[
            compute_setting(name, settings, size, budget)
            for size in COMPUTE_SIZES
            for budget in COMPUTE_BUDGETS
            for name, settings in (("ELECTRA", {}), ("BERT", BERT))
        ],
        orderings=[
            (f"ELECTRA, {size}, {budget}", f"BERT, {size}, {budget}")
            for size in COMPUTE_SIZES
            for budget in COMPUTE_BUDGETS
        ],
        xlabel="FLOPs of pre-training",
        is_log=True,
        paper_lines={
            "ELECTRA-Small": [(8.9e16, 74.1), (1.8e17, 76.0), (3.6e17, 77.7), (7.1e17, 79.0), (1.4e18, 79.9)],
            "BERT-Small": [(1.4e18, 75.1)],
            "ELECTRA-Base": [(6.4e19, 85.1)],
            "BERT-Base": [(6.4e19, 82.2)],
        },
    ),
    "mask-fraction": Study(
        question="How many tokens should be masked?",
        source="no figure: the paper masks 15 %, and 25 % for large (Table 6)",
        settings=[
            StudySetting(f"{fraction:.0%}", {"mask_fraction": fraction}, x=fraction)
            for fraction in (0.15, 0.1, 0.25, 0.4)
        ],
        xlabel="fraction of masked tokens",
    ),
    "sizes": Study(
        question="Which size is best in equal time?",
        source="not in the paper, whose sizes have different budgets",
        settings=[StudySetting(size, {"size": size}) for size in ("small", "tiny", "base")],
    ),
    "styles": Study(
        question="Is ModernBERT's encoder better than BERT's with about as many parameters?",
        source="not in the paper",
        settings=[StudySetting("classic", {}), StudySetting("modern", {"style": "modern"})],
    ),
}


def find_study(config: StudyConfig) -> Study:
    """The study that a config names, or that of its own settings."""
    if config.name != "compare":
        return STUDIES[config.name]
    by_label = parse_named_settings(PretrainConfig, config.settings)
    for name in (name for settings in by_label.values() for name in settings if name in SET_BY_STUDY):
        raise ConfigError(f"has {name}, which electra study sets for all runs; leave it out", field="settings")
    settings = [StudySetting(label, settings) for label, settings in by_label.items()]
    return Study(question="Which settings are best?", source="", settings=settings)
