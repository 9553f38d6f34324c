"""A linear-chain conditional random field over the words of a row, whose tags depend on the tag before them.

The score of a path is the sum of its emissions, of a transition between each word and the next, and of the scores of
its first and last tag. `conditional_logits` and `best_path_logits` have the shape of the emissions, so that loss and
predictions are those of a model without a CRF.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

Reduce = Callable[[Tensor, int], Tensor]  # logsumexp or amax over a dimension


class CRF(nn.Module):
    """Scores of transitions; rows may have tokens that are no words, which the chain skips."""

    def __init__(self, num_labels: int) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.zeros(num_labels))
        self.transitions = nn.Parameter(torch.zeros(num_labels, num_labels))  # [tag, next tag]
        self.end = nn.Parameter(torch.zeros(num_labels))

    def conditional_logits(self, emissions: Tensor, tags: Tensor, is_word: Tensor) -> Tensor:
        """Logits [B, L, K] of the tag of each word given `tags` [B, L] before it.

        Their cross-entropies with `tags`, added over the words of a row, are -log p(tags): by the chain rule
        p(tags) = Π p(tag | tags before it)."""
        positions = torch.arange(is_word.shape[1], device=is_word.device)
        latest = torch.where(is_word, positions, -1).cummax(1).values  # position of the latest word
        previous = functional.pad(latest[:, :-1], (1, 0), value=-1)  # of the word before
        previous_tags = tags.gather(1, previous.clamp(min=0))
        one_hot = (previous_tags[..., None] == torch.arange(len(self.start), device=tags.device)).to(emissions.dtype)
        incoming = torch.where(previous[..., None] < 0, self.start, one_hot @ self.transitions.to(emissions.dtype))
        after = backward_messages(emissions, is_word, self.transitions, self.end, torch.logsumexp)
        return emissions + incoming + after


def best_path_logits(emissions: Tensor, is_word: Tensor, start: Tensor, transitions: Tensor, end: Tensor) -> Tensor:
    """The score [B, L, K] of the best path of those with a tag at a word, up to a constant for each row.

    Their argmax is the best path (as found by the Viterbi algorithm)."""
    before = messages(emissions, is_word, start, transitions, torch.amax)
    return before + emissions + backward_messages(emissions, is_word, transitions, end, torch.amax)


def backward_messages(emissions: Tensor, is_word: Tensor, transitions: Tensor, end: Tensor, reduce: Reduce) -> Tensor:
    """For each tag of a word, all (logsumexp) or the best (amax) of the paths after it."""
    return messages(emissions.flip(1), is_word.flip(1), end, transitions.T, reduce).flip(1)


def messages(emissions: Tensor, is_word: Tensor, first: Tensor, transitions: Tensor, reduce: Reduce) -> Tensor:
    """For each tag of a word, all or the best of the paths before it [B, L, K]; `first` [K] where there are none."""
    message = first.expand_as(emissions[:, 0])
    result = []
    for emission, is_present in zip(emissions.unbind(1), is_word.unbind(1), strict=True):
        result.append(message)
        extended = reduce((message + emission)[..., None] + transitions, 1)
        message = torch.where(is_present[:, None], extended, message)
    return torch.stack(result, 1)
