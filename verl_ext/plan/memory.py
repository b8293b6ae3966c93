"""The memory of one rank in a training step: its parts at each moment that could be the peak.

What is sharded is after ZeRO stage 3 (Rajbhandari et al. 2020, arXiv 1910.02054, section 5). What FSDP2 holds beside
it, and when, is read in torch 2.9's `torch/distributed/fsdp/_fully_shard` for the groups that verl's `apply_fsdp2`
makes: every decoder layer, the input embedding, and the root with the output projection.
"""

from __future__ import annotations

from dataclasses import dataclass

from verl_ext.plan import activations
from verl_ext.plan.shape import Group, ModelShape
from verl_ext.plan.workload import Workload

PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "communication")
"""Weights, optimizer state and gradients are this rank's shards, with gradients that were not yet reduced; gathered
weights and the buffers of collectives are communication."""
Parts = dict[str, float]


@dataclass(frozen=True)
class Memory:
    """Bytes by part at each moment.

    Attributes:
        moments: name of the moment to its parts.
    """

    moments: dict[str, Parts]

    @property
    def peak_moment(self) -> str:
        """When most is held."""
        return max(self.moments, key=lambda name: sum(self.moments[name].values()))

    @property
    def peak(self) -> Parts:
        """The parts at the peak."""
        return self.moments[self.peak_moment]

    @property
    def peak_bytes(self) -> float:
        """Their sum."""
        return sum(self.peak.values())


class StepMemory:
    """The moments of a step."""

    def __init__(self, shape: ModelShape, work: Workload, num_ranks: int, is_gpu: bool) -> None:
        """Take down what all moments share.

        Args:
            shape: of the model.
            work: of one rank.
            num_ranks: that the model is sharded over.
            is_gpu: else gloo, which copies the input of a reduce-scatter.
        """
        self._shape, self._work, self._num_ranks, self._is_gpu = shape, work, num_ranks, is_gpu
        shard = work.master_bytes * shape.shard_numel(num_ranks)
        accumulates = work.num_micro_batches > 1
        self._sharded_before = shard if accumulates and not work.keeps_gathered else 0.0
        self._whole_before = work.reduce_bytes * shape.numel if accumulates and work.keeps_gathered else 0.0
        self._always: Parts = {"weights": shard, "optimizer": 2 * shard}
        self._always["gradients"] = self._sharded_before + self._whole_before
        self._kept = activations.kept_bytes(shape, work)
        self._root, self._embedding, self._layer = map(self._gathered, (shape.root, shape.embedding, shape.layer))
        self._stays_gathered = float(work.compute_bytes * shape.numel) if work.keeps_gathered else 0.0
        adds_up = self._whole_before and work.compute_bytes == work.reduce_bytes  # into what is there already
        self._root_waits = 0.0 if adds_up else self._root

    def memory(self) -> Memory:
        """All moments."""
        moments = {
            "first gathering": self._first_gathering(),
            "loss, forward": self._loss(activations.loss_forward_bytes(self._shape, self._work)),
            "loss, backward": self._loss(activations.loss_backward_bytes(self._shape, self._work)),
            "output projection, backward": self._output_projection(),
            "last layer, backward": self._last_layer(),
            "first layer, backward": self._first_layer(),
            "reduction of the root": self._reduction_of_root(),
            "reduction of the embedding": self._reduction_of_embedding(),
            "optimizer": self._update(),
        }
        return Memory(
            {
                name: {part: self._always.get(part, 0) + parts.get(part, 0) for part in PARTS}
                for name, parts in moments.items()
            }
        )

    def _gathered(self, group: Group) -> float:
        """A group's whole weights in the type of the forward pass."""
        return self._work.compute_bytes * group.numel

    def _buffer(self, gathered: float) -> float:
        """The all-gather's output, from which the weights are copied.

        One rank alone copies its own weights, by way of a cast where the types differ.
        """
        needs_none = self._num_ranks == 1 and self._work.compute_bytes == self._work.master_bytes
        return 0 if needs_none else gathered

    def _reduced(self, groups: list[Group]) -> float:
        """Shards of the gradient that this micro-batch has made so far, where none is there from one before."""
        if self._sharded_before:
            return 0
        return self._work.master_bytes * sum(group.shard_numel(self._num_ranks) for group in groups)

    def _first_gathering(self) -> Parts:
        """The root is gathered, its buffer stays until the next copy, and the embedding is gathered too."""
        gathered = self._root + self._embedding
        return {"communication": gathered + self._buffer(gathered), "gradients": -self._whole_before}

    def _loss(self, logits: float) -> Parts:
        """The root is sharded again when the model returns its logits, unless nothing is.

        A fused loss runs inside the root, while the last layer's buffer is not yet freed: it has the output projection,
        its gradient, below fp32 a chunk's part of it (in fp32 the product is added in place), and the hidden states of
        learnt tokens with their gradients.
        """
        if not self._work.fused_loss:
            return {"activations": self._kept, "logits": logits, "communication": self._stays_gathered}
        c = self._work.compute_bytes
        part = 0 if c == activations.FP32 else c * self._shape.vocab * self._shape.hidden
        return {
            "activations": self._kept + 2 * self._hidden(self._work.learnt_tokens),
            "logits": logits,
            "communication": self._stays_gathered or self._root + self._prefetched(self._layer),
            "gradients": activations.fused_gradient_bytes(self._shape, self._work) + part,
        }

    def _hidden(self, tokens: int) -> float:
        return tokens * self._shape.hidden * self._work.compute_bytes

    def _output_projection(self) -> Parts:
        """The root is gathered again, the last layer is on its way, and the projection's gradient is made."""
        return {
            "activations": self._kept + self._hidden(self._work.tokens),
            "logits": activations.logits_gradient_bytes(self._shape, self._work),
            "gradients": self._gradient_of_output(),
            "communication": self._stays_gathered or self._root + self._prefetched(self._layer),
        }

    def _gradient_of_output(self) -> float:
        """In the type of the forward pass, with the fused loss's own where that is another."""
        fused = activations.fused_gradient_bytes(self._shape, self._work)
        return self._root + (0 if self._work.compute_bytes == activations.FP32 else fused)

    def _prefetched(self, gathered: float) -> float:
        """The buffer of the next all-gather, which begins while a layer computes."""
        return gathered if self._num_ranks > 1 else 0

    def _last_layer(self) -> Parts:
        """The layer's backward pass while the one before it is on its way.

        The root's weights and gradient stay to the end: its inputs are whole numbers, so that no gradient reaches them,
        which would end its turn.
        """
        return {
            "activations": self._kept + self._again(),
            "gradients": self._root_waits,
            "communication": self._stays_gathered or self._root + self._layer + self._prefetched(self._layer),
        }

    def _again(self) -> float:
        """What a layer's backward pass adds: with checkpointing, its own forward pass once more."""
        again = activations.layer_bytes(self._shape, self._work) if self._work.checkpointing else 0
        return again + activations.backward_bytes(self._shape, self._work)

    def _first_layer(self) -> Parts:
        """The same at the other end: all other layers' gradients are there, and the last reduce-scatter's input.

        Gradients that stay whole are counted before their reduction: in a micro-batch that is not the last.
        """
        shape, work = self._shape, self._work
        gathered = self._layer + (self._embedding if work.keeps_gathered else self._prefetched(self._embedding))
        reduced = 0 if self._whole_before else self._reduced([shape.layer] * (shape.num_layers - 1))
        behind = 0 if self._whole_before else work.reduce_bytes * shape.layer.numel
        return {
            "activations": self._kept / shape.num_layers + self._again(),
            "gradients": self._root_waits + reduced,
            "communication": self._stays_gathered if self._whole_before else self._root + gathered + behind,
        }

    def _reducing(self, group: Group) -> float:
        """A reduce-scatter's input and output, and the gradient that its loop over the parameters leaves alive."""
        work = self._work
        whole, shard = work.reduce_bytes * group.numel, work.reduce_bytes * group.shard_numel(self._num_ranks)
        return whole * (1 if self._is_gpu else 2) + shard + self._gradient_bytes * group.last_numel

    @property
    def _gradient_bytes(self) -> int:
        """Of a number in a whole gradient that waits for its reduction."""
        return self._work.reduce_bytes if self._whole_before else self._work.compute_bytes

    def _reduction_of_root(self) -> Parts:
        """When all else is done; the embedding, next in line, has its weights gathered and its whole gradient."""
        reduced = self._reduced([self._shape.layer] * self._shape.num_layers) - self._whole_before
        waiting = self._gradient_bytes * self._shape.embedding.numel
        return {"communication": self._reducing(self._shape.root) + self._embedding, "gradients": waiting + reduced}

    def _reduction_of_embedding(self) -> Parts:
        if not self._shape.embedding.shapes:
            return {}
        reduced = self._reduced([self._shape.layer] * self._shape.num_layers + [self._shape.root])
        reducing = self._reducing(self._shape.embedding)
        return {"communication": reducing, "gradients": reduced - self._whole_before}

    def _update(self) -> Parts:
        """All gradients, and the optimizer's temporaries.

        AdamW keeps the square roots of all second moments at a time (foreach, `_multi_tensor_adam`), those of one
        parameter, before and after a division (for-loop), or none (fused).
        """
        groups, work, size = self._shape.groups, self._work, self._work.master_bytes
        shards = [Group((each,)).shard_numel(self._num_ranks) for group in groups for each in group.shapes]
        temporary = {"foreach": sum(shards), "for-loop": 2 * max(shards), "fused": 0}[work.optimizer_implementation]
        gradients = size * sum(shards) - self._sharded_before - self._whole_before
        return {"gradients": gradients, "optimizer": size * temporary}
