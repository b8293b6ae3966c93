"""Which vision-language model a controller decides about, and how that is asked; kept in the controller's export."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from verl_ext.controller.adapters.base import VLMAdapter
from verl_ext.controller.execution import Executor
from verl_ext.controller.loading import is_of_model, load_adapter
from verl_ext.controller.network import BudgetController
from verl_ext.errors import UserError, first_line_of
from verl_ext.plugins import Plugin


@dataclass(frozen=True)
class ControlledModel:
    """A vision-language model as a controller's training had it.

    Attributes:
        path: directory or hub name.
        fingerprint: of its weights; None before it was loaded.
        tier_sizes: see `VLMAdapter`.
        max_new_tokens: of an answer.
        question_suffix: put behind every question.
        trust_remote_code: whether it brings its own code.
        num_threads: that it runs with on the CPU, by which latencies differ; None for as many as torch takes.
        adapter: of the user's own, as `model.adapter` named it; None where the model's type says which.
        num_blocks: that the controller chooses from; None before there was one.
        topk: the most experts that it chooses, 0 for a model without; None before there was one.
    """

    path: str
    tier_sizes: tuple[int, ...]
    max_new_tokens: int
    question_suffix: str = ""
    trust_remote_code: bool = False
    fingerprint: str | None = None
    num_threads: int | None = None
    adapter: str | None = None
    num_blocks: int | None = None
    topk: int | None = None

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> ControlledModel:
        """What `to_dict` gave."""
        return cls(**{**content, "tier_sizes": tuple(content["tier_sizes"])})

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**asdict(self), "tier_sizes": list(self.tier_sizes)}

    def executor(self, device: str, dtype: torch.dtype, own_adapter: Plugin | None = None, **sizes: int) -> Executor:
        """What answers by the model as it was asked in the controller's training; the arguments are those of `load`.

        Args:
            sizes: see `Executor`.
        """
        return Executor(self.load(device, dtype, own_adapter), self.max_new_tokens, **sizes)

    def load(self, device: str, dtype: torch.dtype, own_adapter: Plugin | None = None) -> VLMAdapter:
        """The model's adapter; on the CPU it also sets the number of torch's threads, where that is known.

        Args:
            device: cpu or cuda.
            dtype: of the weights.
            own_adapter: see `adapter_of`. What an export says of one is not enough to run its code.

        Raises:
            UserError: it cannot be loaded, or is another one than the controller was trained for.
        """
        if self.adapter is not None and own_adapter is None:
            raise UserError(
                f"the controller was trained with the adapter {self.adapter}; name it (--adapter {self.adapter}) to "
                "have its code run"
            )
        if device == "cpu" and self.num_threads is not None:
            torch.set_num_threads(self.num_threads)
        arguments: dict[str, Any] = {"device": device, "dtype": dtype, "trust_remote_code": self.trust_remote_code}
        arguments["own_adapter"] = own_adapter
        adapter = load_adapter(self.path, self.tier_sizes, **arguments)
        if not is_of_model(self.fingerprint, adapter, "the controller's export", self.num_blocks, self.topk):
            raise UserError(
                f"{self.path} is another model than the one that the controller was trained for; give that one"
            )
        return adapter


def load_controller(
    directory: Path, vlm: str | None = None, trust_remote_code: bool = False
) -> tuple[BudgetController, ControlledModel]:
    """An exported controller in evaluation mode, and the model that it was trained for.

    Args:
        directory: an export, with `config.json`.
        vlm: where the vision-language model is by now; None where it was.
        trust_remote_code: whether the model's own code may be run; what the export says of that does not count, since
            it names the model too.

    Raises:
        UserError: it is no controller's export.
    """
    try:
        controller = BudgetController.from_pretrained(directory, dtype=torch.float32).eval()
        space = controller.space
        numbers = {"num_blocks": space.num_blocks, "topk": space.topk_choices[-1] if space.topk_choices else 0}
        model = ControlledModel.of({**controller.config.vlm, **numbers})
    except Exception as error:  # each part of a damaged export raises an exception of its own kind
        raise UserError(
            f"{directory} is no export of a budget controller ({first_line_of(error)}); give the huggingface folder "
            "of a checkpoint of the stage budget"
        ) from error
    return controller, replace(model, path=vlm or model.path, trust_remote_code=trust_remote_code)
