"""The configuration of an evaluation, which `recipe.py` loads.

Its checks depend neither on this machine nor on the metric registry.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

from eval_pipeline.judge import JudgeConfig
from eval_pipeline.problems.problem import DatasetSource
from verl_ext.config.schema import section, setting
from verl_ext.errors import UserError

TIERS = (1, 2, 3)
OWN_VLLM_ARGUMENTS = {
    "model": "the model is the evaluated checkpoint",
    "max_model_len": "set engine.max_model_len",
    "dtype": "set engine.dtype",
    "gpu_memory_utilization": "set engine.gpu_memory_utilization",
    "tensor_parallel_size": "set engine.tensor_parallel_size",
    "pipeline_parallel_size": "set engine.tensor_parallel_size",
    "data_parallel_size": "set executor.num_workers",
    "hf_token": "store the token in the environment variable HF_TOKEN",  # recipes are logged
}
"""Arguments of vllm.LLM that other settings determine, and how to set them."""
OWN_TEMPLATE_ARGUMENTS = (
    "add_generation_prompt",
    "continue_final_message",
    "return_dict",
    "return_tensors",
    "tokenize",
)
"""Arguments of `apply_chat_template` that are the same for every model."""
_SOURCE_KEYS = ("format", "path", "split", "subset", "limit", "system_prompt")


@dataclass(kw_only=True)
class TiersConfig:
    """`tiers`: which checkpoints are evaluated on which datasets."""

    tier1: list[str] = setting([], "Datasets for every checkpoint", quoted=True)
    tier2: list[str] = setting([], "Datasets for every N-th checkpoint", quoted=True)
    tier3: list[str] = setting([], "Datasets for the best checkpoint at the end", quoted=True)

    def of(self, tier: int) -> list[str]:
        """The datasets of a tier: 1, 2 or 3."""
        return (self.tier1, self.tier2, self.tier3)[tier - 1]

    @property
    def names(self) -> list[str]:
        """The datasets of all tiers."""
        return [*self.tier1, *self.tier2, *self.tier3]


@dataclass(kw_only=True)
class SamplingConfig:
    """`sampling`: how answers are sampled. The defaults are greedy decoding of one answer per problem."""

    temperature: float = setting(0.0, "Temperature; 0 is greedy", ge=0)
    top_p: float = setting(1.0, "Nucleus sampling threshold", gt=0, le=1)
    max_tokens: int = setting(2048, "Maximum new tokens", ge=1)
    num_samples: int = setting(1, "Answers per problem; above 1 adds pass@k", ge=1)
    seed: int = setting(0, "Seed of all answers")

    def check(self) -> None:
        """Refuse several greedy answers, which would all be equal."""
        if self.num_samples > 1 and self.temperature == 0:
            raise UserError(
                "sampling.num_samples is above 1, but greedy answers are all equal; set sampling.temperature above 0"
            )


@dataclass(kw_only=True)
class EngineConfig:
    """`engine`: what generates the answers."""

    kind: Literal["vllm", "openai"] = setting("vllm", "openai: a running server")
    max_model_len: int = setting(6144, "Maximum tokens of prompt and answer together", ge=1)
    dtype: Literal["auto", "float32", "float", "bfloat16", "float16", "half"] = setting(
        "auto",
        "auto: bfloat16 where supported, otherwise float16 on GPUs; float32 for float32 weights on CPUs",
    )
    gpu_memory_utilization: float = setting(0.9, "Fraction of GPU memory for vLLM", gt=0, le=1)
    tensor_parallel_size: int = setting(1, "GPUs per model", ge=1)
    vllm: dict[str, Any] = setting({}, "Arguments of vllm.LLM")
    chat_template_kwargs: dict[str, Any] = setting(
        {}, "Template arguments, such as enable_thinking; they extend the run's data.apply_chat_template_kwargs"
    )
    base_url: str | None = setting(None, "Server URL, such as http://localhost:8000/v1", quoted=True, hidden=True)
    model: str | None = setting(None, "Model on the server; null: its only one", quoted=True)
    api_key_env: str = setting("OPENAI_API_KEY", "Variable that holds the server's key", quoted=True, hidden=True)
    concurrency: int = setting(32, "Concurrent requests to the server", ge=1)
    timeout_s: float = setting(
        600.0,
        "openai: time per answer, with retries; vllm: time without a step",
        gt=0,
    )
    load_timeout_s: float = setting(7200.0, "vllm: time to load a model", gt=0)

    def check(self) -> None:
        """Refuse settings that contradict each other, or that would put a key into a file."""
        for name in self.vllm:
            if name in OWN_VLLM_ARGUMENTS:
                raise UserError(f"engine.vllm.{name} is set elsewhere; {OWN_VLLM_ARGUMENTS[name]}")
        for name in self.chat_template_kwargs:
            if name in OWN_TEMPLATE_ARGUMENTS:
                raise UserError(f"engine.chat_template_kwargs.{name} is not a template's argument; remove it")
        # the value is not shown, because it may be a key
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", self.api_key_env):
            raise UserError(
                "engine.api_key_env is not a variable name; store the key in an environment variable, and "
                "set engine.api_key_env to its name"
            )
        if self.kind == "openai":
            _require_url(self.base_url)

    def require_own_model(self, command: str) -> None:
        """Refuse a server for a command that loads its models itself.

        Raises:
            UserError: the engine is a server.
        """
        if self.kind == "openai":
            raise UserError(
                f"`{command}` loads every model itself, but engine.kind=openai serves only one model; remove "
                "engine.kind=openai, or use `run engine.kind=openai engine.base_url=...` to evaluate the server's model"
            )


@dataclass(kw_only=True)
class SelectionConfig:
    """`selection`: how the best checkpoint is selected."""

    metric: str | None = setting(
        None,
        "Metric that selects the best checkpoint; null: exec_success_rate for code, accepted_at_1 otherwise",
        quoted=True,
    )
    mode: Literal["max", "min"] = setting("max", "Whether higher or lower is better; costs need min")
    dataset: str | None = setting(None, "Dataset of that metric; null: all problems of tier 1", quoted=True)

    def check(self) -> None:
        """Refuse a mode that would select the most expensive checkpoint."""
        if self.metric is not None and self.metric.startswith("cost_per_solved_") and self.mode == "max":
            raise UserError(f"selection.metric={self.metric} is a cost, so lower is better; set selection.mode=min")


@dataclass(kw_only=True)
class ExecutorConfig:
    """`executor`: where the workers run."""

    kind: Literal["local", "ray"] = setting("local", "Processes on this machine, or a Ray cluster")
    num_workers: int | None = setting(None, "Workers; null: one per tensor_parallel_size GPUs, or one on CPUs", ge=1)
    address: str | None = setting(
        None,
        "Ray cluster; null: RAY_ADDRESS or this machine's",
        quoted=True,
    )


@dataclass(kw_only=True)
class EvalConfig:
    """The root of an evaluation's configuration."""

    datasets: dict[str, Any] = setting(
        {}, "NAME: {format, path, split, subset, limit, system_prompt}; see docs/guides/evaluation.md"
    )
    tiers: TiersConfig = section(TiersConfig)
    tier2_every: int = setting(4, "Evaluate tier 2 on every N-th checkpoint", ge=1)
    sampling: SamplingConfig = section(SamplingConfig)
    batch_size: int = setting(
        256,
        "Answers requested at once",
        ge=1,
    )
    engine: EngineConfig = section(EngineConfig)
    judge: JudgeConfig = section(JudgeConfig)
    selection: SelectionConfig = section(SelectionConfig)
    executor: ExecutorConfig = section(ExecutorConfig)
    max_attempts: int = setting(3, "Failures after which a job needs `retry`", ge=1)
    backoff_s: float = setting(30.0, "Delay before the second attempt; doubles each time", ge=0)
    poll_s: float = setting(10.0, "Time between scans for checkpoints", gt=0)
    qa_per_error_type: int = setting(10, "Answers per error type in qa_logs and W&B", ge=1)
    wandb: bool = setting(True, "Log to the run's W&B project")

    @property
    def sources(self) -> dict[str, DatasetSource]:
        """The datasets by name."""
        return {name: DatasetSource(name=name, **entry) for name, entry in self.datasets.items()}

    def datasets_up_to(self, tier: int) -> list[tuple[str, int]]:
        """The datasets of a tier and of the tiers before it, each with its own tier."""
        first: dict[str, int] = {}
        for number in TIERS[:tier]:
            for name in self.tiers.of(number):
                first.setdefault(name, number)
        return list(first.items())

    @property
    def selected_on(self) -> list[str]:
        """The datasets whose results select the best checkpoint."""
        return self.tiers.tier1 if self.selection.dataset is None else [self.selection.dataset]

    def check(self) -> None:
        """Refuse malformed datasets, and settings of several components that contradict each other."""
        for name, entry in self.datasets.items():
            _check_source(name, entry)
        for tier in TIERS:
            unknown = [name for name in self.tiers.of(tier) if name not in self.datasets]
            if unknown:
                known = ", ".join(self.datasets) or "none"
                raise UserError(f"tiers.tier{tier} names {unknown[0]!r}, which is not in `datasets`; use {known}")
        self._require_possible_selection()

    def _require_possible_selection(self) -> None:
        """Refuse tiers with which `watch` could never select a best checkpoint.

        A recipe without tiers is valid, because `judge` needs none.
        """
        selected_by, tiers = self.selection.dataset, self.tiers
        if selected_by is None:
            if tiers.names and not tiers.tier1:
                other = ", or set selection.dataset to one of tiers.tier2" if tiers.tier2 else ""
                raise UserError(
                    f"tiers.tier1 is empty, so no best checkpoint could be selected; add a dataset to it{other}"
                )
        elif selected_by not in self.datasets:
            raise UserError(f"selection.dataset is {selected_by!r}, which is not in `datasets`; specify one that is")
        elif selected_by not in (*tiers.tier1, *tiers.tier2):
            why = "tiers.tier3 is evaluated after the selection" if selected_by in tiers.tier3 else "no tier names it"
            raise UserError(
                f"selection.dataset is {selected_by!r}, but {why}, so no best checkpoint could be selected; add it to "
                "tiers.tier1 or tiers.tier2, or set selection.dataset to a dataset of these tiers"
            )


def _require_url(url: str | None) -> None:
    try:
        parts = urlsplit(url or "")
    except ValueError as error:
        raise UserError(f"engine.base_url is not a URL ({error}); set one such as http://localhost:8000/v1") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError("engine.kind=openai needs the server's URL; set engine.base_url=http://localhost:8000/v1")
    if parts.username or parts.password or parts.query:
        raise UserError(
            "engine.base_url must not hold credentials; store the key in the variable that engine.api_key_env names"
        )


def _check_source(name: str, entry: Any) -> None:
    if not isinstance(entry, Mapping) or not {"format", "path"} <= entry.keys():
        raise UserError(f"datasets.{name} lacks a key; set at least `format` and `path`")
    unknown = [key for key in entry if key not in _SOURCE_KEYS]
    if unknown:
        few_shot = "; for few-shot prompts, see docs/guides/evaluation.md" if "shot" in str(unknown[0]) else ""
        raise UserError(f"datasets.{name} has the unknown key {unknown[0]!r}; use {', '.join(_SOURCE_KEYS)}{few_shot}")
    if not name.replace("_", "").replace("-", "").isalnum():
        raise UserError(
            f"datasets has the name {name!r}, which becomes part of file names; use letters, digits, - and _"
        )
    for key, value in entry.items():
        if key != "limit" and not isinstance(value, str) and (value is not None or key in ("format", "path")):
            raise UserError(f"datasets.{name}.{key} is {value!r}; it must be a string")
    if (system_prompt := entry.get("system_prompt")) is not None and not system_prompt.strip():
        raise UserError(f"datasets.{name}.system_prompt is empty; write a text, or null for no system prompt")
    limit = entry.get("limit")
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
        raise UserError(f"datasets.{name}.limit is {limit!r}; it must be an integer of at least 1, or null for all")
