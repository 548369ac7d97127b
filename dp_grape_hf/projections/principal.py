"""Principal directions of the inputs of layers, computed on public inputs.

The gradient of a linear layer for one example is ``rows^T cols``, where rows are the gradients of
its outputs and cols its inputs. So the rows of the gradient lie in the span of the inputs, which
have most of their energy in few directions. The README of this subpackage describes the method.
With orthonormal columns, the lifted noise has the energy ``sigma^2 m r`` instead of
``sigma^2 m n``.

The second moment M of a layer's inputs (n x n) is formed only if P has all n directions. Otherwise,
M acts on a block Q of directions: ``M Q = sum_t x_t (x_t^T Q)``. The model runs once on each batch.
The inputs of layers are kept for half of the batches, and turn a random block towards the first
eigenvectors twice. The sum over all batches then finds the eigenvectors by the Nystroem
approximation ``(M Q) (Q^T M Q)^-1 (M Q)^T`` (Halko et al. 2011; Tropp et al. 2017). Each turn costs
4 n k operations for each token. Each layer needs n k numbers of memory, and about 1,000 n more
until the turns: a layer with 1,024 inputs has its turns at once.

Shapes: n the width of a layer's input, r the rank, k = 2 r + 16 the directions in a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn

from dp_grape_hf.phases import advance, progress
from dp_grape_hf.projections.probes import TOKENS, chooses, first_texts, on_inputs
from dp_grape_hf.projections.seeds import projection_generator
from dp_grape_hf.projections.targets import MATRIX_LAYERS
from dp_grape_hf.sharding import is_sharded

Batches = Callable[[], Iterable[Mapping[str, Any]]]
"""A function that makes the inputs of a model, the same in every call."""

_TURNS = 2  # number of times that the kept half of the inputs turns a block
_MOST_KEPT = 1024  # inputs of a layer that are kept before the turns; bounds the memory
_SHIFT = 1e-7  # share of the trace, added so that a block with small energy is not singular
_LEAST = 0.1  # share of the mean energy, added so that P is bounded in directions of small energy


class Principal(NamedTuple):
    """The principal directions of one layer."""

    directions: Tensor  # (n, r), orthonormal columns in order of decreasing energy; float32
    energies: Tensor  # (r,), the mean of (x^T v)^2 over the tokens
    total: float  # the mean of |x|^2

    def whitened(self) -> Tensor:
        """Return a square P, (n, n), that partially whitens the inputs; r must be n.

        P is the symmetric matrix ``M^(-1/4)`` of the second moments M, so coordinates still
        correspond to features. The energies of ``x P`` are about the square roots of the energies
        of x. Updates are multiplied by ``P P^T``, as in full-matrix Adagrad (Duchi et al. 2011)
        on public inputs.
        """
        mean = max(self.total / len(self.directions), 1e-30)
        scaled = self.directions * (self.energies / mean + _LEAST).pow(-0.25)
        return scaled @ self.directions.T


@torch.no_grad()
def principal_directions(
    model: nn.Module, ranks: Mapping[str, int], batches: Batches, seed: int = 0
) -> dict[str, Principal]:
    """Return the principal directions of linear layers' inputs and of embeddings' outputs.

    The rows of a weight's gradient (in ``Conv1D``, its columns) lie in the span of these inputs. If
    several modules share a weight, their inputs count together. Layers that read the same tensor,
    such as the queries, keys and values of attention, have the same directions, in one tensor. A
    layer that did not run has random orthonormal directions.

    Args:
        model: the model, in evaluation mode. If the body of a transformers model has all these
            layers, only the body runs.
        ranks: weight name -> r, at most n.
        batches: makes the inputs. Their tensors are moved to the device of the weights, and inputs
            without a parameter of ``forward`` are left out. Positions that an ``attention_mask`` of
            the same shape excludes do not count. In layers that read tokens, the first 144 tokens
            of each batch count, as whole texts. In a head whose P has all n directions, all texts
            count.
        seed: the public seed of the first block. The result hardly depends on it.

    Guarantee:
        The directions are a function of the weights, the inputs and the seed. If these are public
        or already private, so are the directions.
    """
    weights = dict(model.named_parameters())
    names = {id(weights[name]): name for name in ranks}
    blocks: dict[str, _Block] = {}
    readers: list[tuple[nn.Module, _Block, bool]] = []
    for module in model.modules():
        embeds = isinstance(module, nn.Embedding)
        if (embeds or isinstance(module, MATRIX_LAYERS)) and id(module.weight) in names:
            name = names[id(module.weight)]
            if name not in blocks:
                place = weights[name].device
                blocks[name] = _Block(_width(module), ranks[name], place, seed, name)
            readers.append((module, blocks[name], embeds))
    body = _body(model, [module for module, _, _ in readers])
    mask: list[Tensor | None] = [None]
    sharing = _Sharing()
    hooks = [
        module.register_forward_hook(_reader(block, embeds, mask, sharing), with_kwargs=True)
        for module, block, embeds in readers
    ]
    every = list(batches())
    kept, others = every[2::4] + every[3::4], every[0::4] + every[1::4]
    try:
        with progress("Measuring input directions"):
            for number, batch in enumerate(kept + others, 1):
                if not any(block.complete for block in blocks.values()):
                    batch = first_texts(batch, TOKENS)
                mask[0] = batch.get("attention_mask")
                on_inputs(body, batch)
                advance(of=len(every))
                if number == len(kept):
                    for block in {sharing.leader(block) for block in blocks.values()}:
                        block.turn()
    finally:
        for hook in hooks:
            hook.remove()
    principal = {block: block.principal() for block in {sharing.leader(b) for b in blocks.values()}}
    return {name: principal[sharing.leader(blocks[name])] for name in ranks}


def _width(module: Any) -> int:
    """Return n, also if the weight is packed."""
    if isinstance(module, nn.Linear):
        return module.in_features
    return int(module.weight.shape[1 if isinstance(module, nn.Embedding) else 0])  # or Conv1D


def _body(model: nn.Module, modules: list[nn.Module]) -> nn.Module:
    """Return the body of a model if it has these modules, otherwise the model.

    The body of a multiple-choice model would need other inputs, and a model whose weights are
    sharded gathers them only when it runs itself.
    """
    needs_model = chooses(model) or is_sharded(model)
    body: Any = model if needs_model else getattr(model, "base_model", model)
    inside = set(body.modules())
    return body if inside.issuperset(modules) else model


class _Sharing:
    """The blocks that represent several layers, because these layers read the same tensor.

    The first pass determines them.
    """

    def __init__(self) -> None:
        self._leaders: dict[_Block, _Block] = {}
        self._readers: dict[int, tuple[ref[Tensor], int, _Block]] = {}
        """The id of a tensor -> the tensor, its version, and the block of its first reader."""

    def leader(self, block: _Block) -> _Block:
        """Return the block that represents this block; by default itself."""
        return self._leaders.get(block, block)

    def reads(self, block: _Block, given: Tensor) -> bool:
        """Return whether a block must add the input of its layer."""
        if block in self._leaders:
            return False
        reader = self._readers.get(id(given))
        if reader is not None and reader[0]() is given and reader[1] == given._version:
            other = reader[2]
            if block.untouched and other is not block and other.rank == block.rank:
                self._leaders[block] = other
                return False
        else:
            self._readers[id(given)] = ref(given), given._version, block
        return True


def _reader(
    block: _Block, embeds: bool, mask: list[Tensor | None], sharing: _Sharing
) -> Callable[..., None]:
    def read(module: nn.Module, args: tuple[Any, ...], kwargs: Any, output: Any) -> None:
        given = next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        if not embeds and not sharing.reads(block, given):
            return
        features: Tensor = output if embeds else given
        counted = mask[0]
        if counted is not None and counted.shape == features.shape[:-1]:
            if not block.complete:  # only heads use the other texts
                texts = max(1, TOKENS // counted.shape[-1])
                features, counted = features[:texts], counted[:texts]
            features = features[counted.bool()] if not counted.all() else features
        block.add(features.reshape(-1, features.shape[-1]).float())

    return read


class _Block:
    """A block Q of directions of one layer, and its product M Q with the second moment."""

    def __init__(self, width: int, rank: int, device: torch.device, seed: int, name: str) -> None:
        self.rank, self._width, self._device = rank, width, device
        self._seed, self._name = seed, name
        self.untouched = True  # no input was added
        self.complete = rank == width  # the block has all directions, and M is formed
        self._kept: list[Tensor] | None = None if self.complete else []  # inputs until the turns
        if self.complete:
            self._begin(torch.eye(width, dtype=torch.float64))

    def _begin(self, basis: Tensor) -> None:
        self._basis = basis
        # M is not refined by later passes, so it needs more bits.
        exact = torch.float64 if self.complete else torch.float32
        self._used = self._basis.to(self._device, exact)
        self._image = torch.zeros_like(self._used)
        self._total, self._count = torch.zeros((), device=self._device), 0

    def add(self, features: Tensor) -> None:
        """Add features (T, n) to the second moment."""
        self.untouched = False
        if self._kept is None:
            self._sum(features)
        else:
            self._kept.append(features.clone())
            if sum(map(len, self._kept)) >= _MOST_KEPT:
                self.turn()

    def turn(self) -> None:
        """Turn a random block to the first directions of the inputs so far, and add these inputs.

        It does so once; later calls have no effect.
        """
        if self._kept is None:
            return
        size = min(self._width, 2 * self.rank + 16)
        generator = projection_generator(self._seed, 0, self._name)
        basis = torch.randn(self._width, size, generator=generator).double()
        inputs, self._kept = self._kept, None
        for number in range(_TURNS + 1):
            self._begin(torch.linalg.qr(basis)[0])
            for features in inputs:
                self._sum(features)
            if number < _TURNS:
                basis = self._shifted()[0]

    def _sum(self, features: Tensor) -> None:
        features = features.to(self._used.dtype)
        self._image.addmm_(features.T, features @ self._used)
        self._total += features.square().sum()
        self._count += len(features)

    def _shifted(self) -> tuple[Tensor, float]:
        """Return ``(M + s) Q`` in float64 on the CPU, and the shift s."""
        shift = _SHIFT * float(self._total) or 1.0
        return self._image.cpu().double() + shift * self._basis, shift

    def _first(self) -> tuple[Tensor, Tensor]:
        """Return the first r directions and the sums of their energies.

        They are exact if M is formed, otherwise from the Nystroem approximation of ``M + s``.
        """
        image, shift = self._shifted()
        inner = self._basis.T @ image
        if self.complete:
            sums, vectors = torch.linalg.eigh((inner + inner.T) / 2)
            return vectors.flip(1), sums.flip(0) - shift
        factor = torch.linalg.cholesky((inner + inner.T) / 2)
        root = torch.linalg.solve_triangular(factor, image.T, upper=False).T
        left, scales, _ = torch.linalg.svd(root, full_matrices=False)
        return left[:, : self.rank], scales[: self.rank].square() - shift

    def principal(self) -> Principal:
        """Return the first r directions, with a sign that depends only on their elements."""
        self.turn()
        directions, sums = self._first()
        largest = directions.abs().argmax(0, keepdim=True)
        directions = directions * directions.gather(0, largest).sign()
        count = max(1, self._count)
        return Principal(
            directions.float().contiguous(),
            (sums.clamp(min=0) / count).float(),
            float(self._total) / count,
        )
