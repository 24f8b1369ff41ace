"""Every method in the straightforward way, as public implementations go it: what ours is held to.

    TENT, EATA    one pass with gradient over all rows; a loss over those that are selected
    SAR           and a second one over the selected rows, where SAM has climbed to
    DeYO          and a gradient-free one over the reliable rows, their patches shuffled
    + FATA        a hook behind one layer hands on z and z' of all rows: the tail runs on 2 B rows
    SAR + FATA    three passes: all rows at theta; at theta + eps the selected rows, and all rows

The updates are the engine's (`tests/benchmarks/test_plain.py`). With BatchNorm, clean and augmented
rows are normalised together here, as by `Fata(bn_stats="joint")`. EATA has no Fisher penalty.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fata.methods import parse
from fata.methods.selection import shuffle_patches
from fata.network.norms import batch_norms
from fata.network.parameters import choose
from fata.network.structure import auto_layer


class Plain:
    """A model that adapts to the batches it is called with; the model is changed for good."""

    def __init__(self, model: nn.Module, spec: str, lr: float, **fields: Any) -> None:
        self.method, self.plus = parse(spec, **fields)
        self.model = model.eval().requires_grad_(False)
        for norm in batch_norms(model):
            norm.track_running_stats, norm.running_mean, norm.running_var = False, None, None
        self.theta = list(choose(model, self.method.params or "norm-truncated").values())
        for parameter in self.theta:
            parameter.requires_grad_(True)
        self.optimizer = torch.optim.SGD(self.theta, lr, momentum=0.9)
        self.source = copy.deepcopy((model.state_dict(), self.optimizer.state_dict()))
        self.mean_probs: Tensor | None = None
        self.mean_entropy: float | None = None
        self.delta: Tensor | None = None
        self.noise: tuple[Tensor, Tensor] | None = None
        self.augmenting = False
        if self.plus:
            model.get_submodule(auto_layer(model)).register_forward_hook(self._augment)

    def __call__(self, images: Tensor) -> Tensor:
        """Logits of the images; learns from them."""
        self.noise = None
        logits, augmented = self._forward(images)
        if self.method.name == "sar":
            self._sar(images, logits)
        else:
            losses = [*getattr(self, f"_{self.method.name}")(images, logits)]
            self._step([*losses, *self._fata(augmented, logits)])
        return logits.detach()

    def _forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of all rows, and of all augmented rows."""
        self.augmenting = self.plus is not None
        logits = self.model(images)
        self.augmenting = False
        return logits[: len(images)], logits[len(images) :]

    def _tent(self, images: Tensor, logits: Tensor) -> list[Tensor]:
        return [entropy(logits).mean()]

    def _eata(self, images: Tensor, logits: Tensor) -> list[Tensor]:
        found, probs = entropy(logits), logits.detach().softmax(1)
        margin = self.method.threshold * math.log(logits.shape[1])
        keep = found < margin
        if self.mean_probs is not None:
            alike = F.cosine_similarity(probs, self.mean_probs[None], dim=1)
            keep &= alike.abs() < self.method.redundancy
        if not keep.any():
            return []
        now = probs[keep].mean(0)
        self.mean_probs = now if self.mean_probs is None else 0.9 * self.mean_probs + 0.1 * now
        return [((margin - found[keep].detach()).exp() * found[keep]).mean()]

    def _deyo(self, images: Tensor, logits: Tensor) -> list[Tensor]:
        found, classes = entropy(logits), logits.shape[1]
        rows = (found < self.method.threshold * math.log(classes)).nonzero()[:, 0]
        if not len(rows):
            return []
        draw = self.method.shuffle or _orders
        order = draw(len(rows), self.method.patches).to(images.device)
        with torch.no_grad():
            shuffled = self.model(shuffle_patches(images[rows], order, self.method.patches))
        label = logits[rows].argmax(1, keepdim=True)
        before, after = (o.detach().softmax(1).gather(1, label) for o in (logits[rows], shuffled))
        plpd = (before - after)[:, 0]
        keep = plpd > self.method.plpd_threshold
        if not keep.any():
            return []
        found, plpd = found[rows][keep], plpd[keep]
        weights = (self.method.scale * math.log(classes) - found.detach()).exp() + plpd.exp()
        return [(weights * found).mean()]

    def _sar(self, images: Tensor, logits: Tensor) -> None:
        margin = self.method.threshold * math.log(logits.shape[1])
        found, there, losses = entropy(logits), [p.detach().clone() for p in self.theta], []
        keep = found < margin
        if keep.any():
            found[keep].mean().backward()
            self._climb()
            second = entropy(self.model(images[keep]))
            second = second[second < margin]
            if len(second):
                losses.append(second.mean())
        if self.plus and self._sure(logits).any():
            losses += self._fata(self._forward(images)[1], logits)
        self._step(losses, there)
        if keep.any() and len(second):
            now, old = second.mean().item(), self.mean_entropy
            self.mean_entropy = now if old is None else 0.9 * old + 0.1 * now
        if self.mean_entropy is not None and self.mean_entropy < self.method.recovery:
            self.model.load_state_dict(self.source[0])
            self.optimizer.load_state_dict(self.source[1])
            self.mean_entropy = None

    @torch.no_grad()
    def _climb(self) -> None:
        norm = torch.stack([p.grad.norm() for p in self.theta if p.grad is not None]).norm()
        for parameter in self.theta:
            if parameter.grad is not None:
                parameter += self.method.rho * parameter.grad / (norm + 1e-12)

    def _step(self, losses: list[Tensor], theta: list[Tensor] | None = None) -> None:
        """Descend on the sum of the terms that have a row; from theta, if that is elsewhere."""
        self.optimizer.zero_grad()
        if losses:
            torch.stack(losses).sum().backward()
        if theta is not None:
            with torch.no_grad():
                for parameter, value in zip(self.theta, theta, strict=True):
                    parameter.copy_(value)
        if losses:
            self.optimizer.step()
        self.optimizer.zero_grad()

    def _sure(self, logits: Tensor) -> Tensor:
        return entropy(logits.detach()) < self.plus.threshold * math.log(logits.shape[1])

    def _fata(self, augmented: Tensor, logits: Tensor) -> list[Tensor]:
        """The term of the plug-in: from z', predict what z predicts."""
        if self.plus is None or not self._sure(logits).any():
            return []
        keep, clean = self._sure(logits), logits.detach()
        scale = self.plus.scale * math.log(clean.shape[1])
        weights = (scale - entropy(clean[keep])).exp()
        losses = F.cross_entropy(augmented[keep], clean[keep].argmax(1), reduction="none")
        return [(weights * losses).mean()]

    def _augment(self, layer: nn.Module, given: Any, z: Tensor) -> Tensor:
        """All rows of z, then of z'; noise and delta are those of the batch's first pass."""
        if not self.augmenting:
            return z
        mu = z.mean((2, 3) if z.ndim == 4 else 1, keepdim=True)
        if self.noise is None:
            self.noise = self._draw(mu)
            self.delta = self._spread(mu.detach().flatten(1))
        alpha, beta = self.noise
        delta = self.delta.view(mu.shape[1:])
        return torch.cat((z, alpha * z + delta * (beta - alpha) * mu))

    def _spread(self, mu: Tensor) -> Tensor:
        if len(mu) == 1:  # it has no deviation
            return torch.full_like(mu[0], 0.5)
        spread = mu.std(0)
        now = spread / spread.max().clamp(min=1e-12)
        return now if self.delta is None else torch.lerp(now, self.delta, self.plus.ema)

    def _draw(self, mu: Tensor) -> tuple[Tensor, Tensor]:
        rows, channels = mu.flatten(1).shape
        if self.plus.noise:
            alpha, beta = self.plus.noise(rows, channels)
        else:
            alpha, beta = 1 + self.plus.sigma * torch.randn(2, rows, channels, device=mu.device)
        return alpha.view_as(mu), beta.view_as(mu)


def entropy(logits: Tensor) -> Tensor:
    """H of each row."""
    return -(logits.softmax(1) * logits.log_softmax(1)).sum(1)


def _orders(rows: int, patches: int) -> Tensor:
    return torch.rand(rows, patches**2).argsort(1)
