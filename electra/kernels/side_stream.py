"""A stream for the generator: what autograd does there later runs beside the discriminator's backward pass."""

import torch


class Detour:
    """A way that part of the work on a GPU goes; the rest waits for it in the forward pass, and not in the backward.

    Backward passes run on the stream of their forward pass, and the two models only meet where gradients of what they
    share are added. The generator's many small kernels then fill what the discriminator's leave free.
    """

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.main = torch.cuda.current_stream()
        torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)  # where tables are shared they meet

    @torch.compiler.disable
    def leave(self) -> None:
        """Work goes on here."""
        self.main = torch.cuda.current_stream()
        self.stream.wait_stream(self.main)
        torch.cuda.set_stream(self.stream)

    @torch.compiler.disable
    def rejoin(self) -> None:
        """Work goes on where it was before, after what was done here."""
        self.main.wait_stream(self.stream)
        torch.cuda.set_stream(self.main)
