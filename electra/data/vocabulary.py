"""What later stages need to know of a vocabulary: its size, its special tokens, and which tokens continue a word."""

from dataclasses import dataclass

from electra.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """Size and special token ids. The defaults are BERT's and ELECTRA's uncased English vocabulary."""

    size: int = 30522
    pad_id: int = 0
    unk_id: int = 100
    cls_id: int = 101
    sep_id: int = 102
    mask_id: int = 103
    is_continuation: tuple[bool, ...] = ()  # of each id: whether it is a word's second or later piece

    def __post_init__(self) -> None:
        for name in ("pad_id", "unk_id", "cls_id", "sep_id", "mask_id"):
            if not 0 <= getattr(self, name) < self.size:
                raise ConfigError(f"{name} {getattr(self, name)} is not in the vocabulary of {self.size:,} entries")
        if len(self.is_continuation) not in (0, self.size):
            raise ConfigError(f"is_continuation tells of {len(self.is_continuation):,} ids, not of {self.size:,}")

    def unmaskable(self) -> tuple[int, ...]:
        """The ids that are never masked: [PAD], [CLS], [SEP], [MASK]."""
        return self.pad_id, self.cls_id, self.sep_id, self.mask_id
