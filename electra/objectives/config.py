"""Settings of masking and of the objective; parsing flags needs them, so this imports no torch."""

from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from cyclopts import Parameter

from electra.errors import ConfigError, check_range
from electra.model.config import AuxiliaryHead

ObjectiveName = Literal["rtd", "electra-15", "replace-mlm", "all-tokens-mlm", "mlm", "adversarial", "frozen-rtd"]
GeneratorName = Literal["model", "uniform", "unigram"]
CorrectSampleLabel = Literal["original", "replaced"]
MaskCount = Literal["paper", "released"]


@dataclass(frozen=True, kw_only=True)
class MaskingConfig:
    """Masking."""

    mask_fraction: float = 0.15
    """Fraction p of the tokens to mask."""
    mask_count: MaskCount = "released"
    """Masked tokens of n tokens; paper: ceil(p·n); released: max(1, round(p·n)), at most int((p + .005)·length)."""
    whole_word_masking: bool = False
    """Mask all word pieces of a word or none."""
    mask_token_probability: float = 1.0
    """Probability that a masked position becomes [MASK] (released code: .85; BERT: .8)."""
    random_token_probability: float = 0.0
    """Probability that a masked position becomes a random token (BERT: .1); otherwise it keeps its token."""

    def __post_init__(self) -> None:
        check_range(self, "mask_fraction", above=0, below=1)
        probabilities = (self.mask_token_probability, self.random_token_probability)
        if min(probabilities) < 0 or sum(probabilities) > 1:
            raise ConfigError(
                "mask_token_probability is {} and random_token_probability is {}; both must be at least 0 and their "
                "sum at most 1".format(*probabilities)
            )


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """Pre-training objective."""

    name: Annotated[ObjectiveName, Parameter(name="--objective")] = "rtd"
    """rtd: replaced token detection, the generator and discriminator of the paper; electra-15: rtd at the masked
    positions only; replace-mlm: predict the masked tokens from text with generator samples; all-tokens-mlm: the same
    for all tokens, with a copy mechanism; mlm: a masked language model (BERT: --mask-token-probability 0.8
    --random-token-probability 0.1); adversarial: the generator maximises the discriminator's loss by REINFORCE;
    frozen-rtd: rtd without training the generator (second stage of two-stage training)."""
    generator: GeneratorName = "model"
    """What samples the replacements: the generator, or without one a uniform or unigram distribution over tokens."""
    discriminator_weight: float = 50.0
    """λ, the weight of the discriminator's loss."""
    corrective_lm_weight: float = 0.0
    """Weight of an auxiliary loss of the discriminator, corrective language modeling (COCO-LM): it also predicts the
    original tokens at the masked positions of the corrupted text. 0: no such loss."""
    bag_of_words_weight: float = 0.0
    """Weight of an auxiliary loss of the discriminator: from its [CLS] state it predicts which tokens were masked in
    the document. 0: no such loss."""
    temperature: float = 1.0
    """Temperature of the softmax that replacements are sampled from."""
    disallow_correct: bool = False
    """Never sample the original token."""
    correct_sample_label: CorrectSampleLabel = "original"
    """The discriminator's label for a sample that equals the original token; the paper's is original."""
    entropy_bonus: float = 0.0
    """adversarial: weight of the generator's entropy, in nats, which is added to its objective."""

    def __post_init__(self) -> None:
        check_range(self, "temperature", above=0)
        weights = ("discriminator_weight", "corrective_lm_weight", "bag_of_words_weight", "entropy_bonus")
        check_range(self, *weights, at_least=0)
        if self.generator != "model" and (self.disallow_correct or self.temperature != 1):
            raise ConfigError(
                f"--disallow-correct and --temperature change the samples of a generator, but --generator is "
                f"{self.generator}; leave them out or use --generator model"
            )

    def auxiliary_heads(self) -> tuple[AuxiliaryHead, ...]:
        """The heads of the auxiliary losses that have a weight."""
        weights = self.loss_weights()
        return tuple(head for head in get_args(AuxiliaryHead) if weights[head])

    def loss_weights(self) -> dict[str, float]:
        """The weights of the discriminator's losses, by name."""
        return {
            "discriminator": self.discriminator_weight,
            "corrective_lm": self.corrective_lm_weight,
            "bag_of_words": self.bag_of_words_weight,
        }
