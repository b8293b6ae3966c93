"""Refuses what a configuration names by a mistyped name: metrics backends, optimizers, packages and files of code."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
from pathlib import Path
from typing import Any

from verl_ext.data.config import TextDataConfig
from verl_ext.data.training_templates import parse_chat_template, read_chat_template
from verl_ext.errors import UserError, first_line_of
from verl_ext.metrics.recorder import require_known_backends
from verl_ext.plugins import is_module
from verl_ext.processes import defer_gc, visible_gpus
from verl_ext.trainer.config import OptimConfig, TrainerConfig
from verl_ext.trainer.stages import RunConfig, SFTConfig


def check_components(config: RunConfig) -> None:
    """Refuse names that nothing has, in the settings that every stage reads.

    Raises:
        UserError: the first of them, and what was probably meant.
    """
    require_known_backends(list(config.trainer.logger))
    check_optimizer(config.optim)
    check_optional_packages(config)
    check_device(config.trainer)
    if isinstance(config.data, TextDataConfig) and config.data.chat_template is not None:
        parse_chat_template(read_chat_template(str(config.data.chat_template)))
    library = config.model.external_lib
    if library is not None and not is_module(str(library)):
        raise UserError(f"model.external_lib names the module '{library}', which is not installed; correct its name")
    path = config.data.custom_cls.path if isinstance(config, SFTConfig) else None
    if path is not None and not str(path).startswith("pkg://") and not Path(path).is_file():
        raise UserError(f"data.custom_cls.path={path} does not exist; correct the path")


def check_optional_packages(config: RunConfig) -> None:
    """Settings that need a package which the pipeline itself does without."""
    needed = {
        "liger_kernel": ("model.use_liger=true", config.model.use_liger, "liger-kernel", "model.use_liger=false"),
        "flash_attn": (
            "model.attn_implementation=flash_attention_2",
            config.model.attn_implementation == "flash_attention_2",
            "flash-attn",
            "model.attn_implementation=auto",
        ),
    }
    for module, (setting, is_set, package, instead) in needed.items():
        if is_set and importlib.util.find_spec(module) is None:
            raise UserError(f"{setting} needs the package {package} (and a GPU); install it, or set {instead}")
    if config.model.attn_implementation == "flash_attention_2" and config.model.mixed_precision == "fp32":
        raise UserError("model.attn_implementation=flash_attention_2 has no fp32; set model.mixed_precision=bf16")


def check_device(trainer: TrainerConfig) -> None:
    """`trainer.device` must be there, and where it is GPUs, one for each rank of this machine.

    torch, which imports slowly, is asked only where the answer could refuse the launch.

    Raises:
        UserError: it is not there, or there are fewer GPUs than ranks.
    """
    wanted, ranks, num_gpus = trainer.device, trainer.n_gpus_per_node, len(visible_gpus())
    has_too_few = wanted in ("auto", "cuda") and 0 < num_gpus < ranks
    if wanted == "npu" and importlib.util.find_spec("torch_npu") is None:
        raise UserError("trainer.device is npu, which needs the package torch_npu; set trainer.device=auto")
    if wanted == "npu" or (wanted == "auto" and not has_too_few):
        return
    with defer_gc():
        import torch

    available = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and available == "cpu":
        raise UserError("trainer.device is cuda, but torch finds no GPU here; set trainer.device=auto")
    if wanted == "cpu" and available == "cuda":
        raise UserError("trainer.device is cpu on a machine with GPUs; hide them instead, with CUDA_VISIBLE_DEVICES=''")
    if has_too_few and available == "cuda":
        raise UserError(
            f"{ranks} ranks need {ranks} GPUs, and {num_gpus} can be used here; start {num_gpus} ranks, or train on "
            "the CPU with CUDA_VISIBLE_DEVICES=''"
        )


def check_optimizer(optim: OptimConfig) -> None:
    """`optim.optimizer` must be a class of the module `optim.optimizer_impl` that takes its arguments.

    The default is known to exist, and torch is not imported for it.

    Raises:
        UserError: there is no such module or class, or the class refuses its arguments.
    """
    name, place, further = optim.optimizer, optim.optimizer_impl, dict(optim.override_optimizer_config or {})
    if (name, place) == ("AdamW", "torch.optim") and not further:
        return
    with defer_gc():
        import torch

        try:
            module = importlib.import_module(place)
        except ImportError as error:
            raise UserError(
                f"optim.optimizer_impl is '{place}', which cannot be imported ({first_line_of(error)}); install its "
                "package, or take torch.optim"
            ) from error
    kinds = {key: value for key, value in vars(module).items() if isinstance(value, type)}
    known = [key for key, value in kinds.items() if issubclass(value, torch.optim.Optimizer) and key != "Optimizer"]
    if not callable(getattr(module, name, None)):
        lower = {key.lower(): key for key in known}
        near = difflib.get_close_matches(name.lower(), lower, n=1)
        hint = f"did you mean '{lower[near[0]]}'?" if near else f"take one of {', '.join(sorted(known))}"
        raise UserError(f"optim.optimizer is '{name}', which {place} does not have; {hint}")
    # as verl's `build_optimizer` calls it
    arguments: dict[str, Any] = {"lr": optim.lr, "weight_decay": optim.weight_decay}
    if "adam" in name.lower() or "ademamix" in name.lower():
        arguments["betas"] = optim.betas
    try:
        getattr(module, name)([torch.nn.Parameter(torch.zeros(2, 2))], **{**arguments, **further})
    except (TypeError, ValueError) as error:
        raise UserError(
            f"optim.optimizer={name} refuses its arguments ({first_line_of(error)}); correct "
            "optim.override_optimizer_config, or take another optimizer"
        ) from error
    except RuntimeError:
        pass  # an argument such as fused=true may need the device that only the ranks use
