"""Configuration of the data, one class per kind of data. Keys that verl has keep verl's names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from verl_ext.config.schema import section, setting, unused
from verl_ext.errors import UserError

ALL = (-1, "all")
VQA_METRICS = ("vqa", "cider")
"""Metrics that compare answers with references: VQA soft accuracy, or CIDEr for captions."""
RAW_SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".jsonl.gz", ".json.gz", ".csv.gz", ".tsv.gz")
MESSAGES_KEYS = ("messages", "conversation", "conversations")
PROMPT_KEYS = ("prompt", "instruction", "question", "query", "input")
RESPONSE_KEYS = ("response", "completion", "answer", "output")
"""Columns in which the conversion of chats looks for turns, prompts and answers, in this order."""
SYSTEM_KEYS = ("system", "system_prompt")
"""Text columns that the conversion turns into a system turn."""
PREFERENCE_KEYS = ("chosen", "rejected")
"""Columns of the two answers of preference data."""


@dataclass(kw_only=True)
class MultiturnConfig:
    """`data.multiturn`: chats instead of prompt and response columns."""

    enable: bool = setting(False, "Read chats, not prompt and response columns")
    messages_key: str = setting("messages", "Column of messages with role and content")
    tools_key: str = setting("tools", "Optional column of tools for the template")
    enable_thinking_key: str = setting("enable_thinking", "Optional column that sets the thinking mode")


@dataclass(kw_only=True)
class CustomClassConfig:
    """`data.custom_cls`: a custom dataset class."""

    path: str | None = setting(None, "File with a custom dataset class", path=True)
    name: str | None = setting(None, "Name of that class")


@dataclass(kw_only=True)
class DataConfig:
    """Settings that all stages share."""

    train_batch_size: int = setting(
        256,
        "Samples per step over all ranks (grpo: prompts, budget: questions)",
        ge=1,
    )
    micro_batch_size: int | None = unused(None, "verl dropped it; set data.micro_batch_size_per_gpu")
    micro_batch_size_per_gpu: int = setting(
        4, "Samples per forward pass (sft with packing: see `max_tokens_per_gpu`; budget: configurations)", ge=1
    )
    num_workers: int = setting(0, "DataLoader workers per rank; 0: load in a thread of the rank", ge=0, le=256)
    use_shm: bool = unused(False, "the data is always in memory")
    max_length: int = setting(1024, "Maximum tokens per sample", ge=1)

    def training_files(self) -> list[Path]:
        """The local files of the training data."""
        return []


@dataclass(kw_only=True)
class TextDataConfig(DataConfig):
    """`data` of the stages that train on text."""

    train_files: str | list[str] = setting("~/data/gsm8k/train.parquet", "Parquet, JSON or CSV files for training")
    val_files: str | list[str] | None = setting(
        "~/data/gsm8k/test.parquet", "The same for validation; null disables it"
    )
    train_max_samples: int = setting(-1, "Number of training rows to read, from the start of the data", ge=1, also=ALL)
    val_max_samples: int = setting(-1, "Number of validation rows to read, from the start of the data", ge=1, also=ALL)
    prompt_key: str = setting("question", "Prompt column (grpo: a list of messages)")
    chat_template: str | None = setting(
        None,
        "qwen2.5_training, qwen3_training, smollm2_training, smollm3_training, a Jinja file or its text; "
        "null uses the tokenizer's",
    )
    apply_chat_template_kwargs: dict[str, Any] = setting({}, "Template arguments, such as enable_thinking")

    def training_files(self) -> list[Path]:
        return [Path(name).expanduser() for name in file_list(self.train_files)]

    @property
    def columns(self) -> dict[str, str]:
        """The required columns of a data file, by the key that names them."""
        return {"data.prompt_key": self.prompt_key}

    def raw_files(self, commands: Iterable[str]) -> list[str]:
        """The data files that must be converted before they can be read.

        Args:
            commands: the recipe's preparation commands, whose outputs need no conversion and may not exist yet.
        """
        written = {word for command in commands for word in command.split()}
        names = file_list(self.train_files) + file_list(self.val_files)
        return [name for name in names if str(Path(name).parent) not in written and self.is_raw(name)]

    def is_raw(self, name: str) -> bool:
        """Whether a data file must be converted: JSON and CSV."""
        return name.lower().endswith(RAW_SUFFIXES) and "://" not in name


@dataclass(kw_only=True)
class ChatDataConfig(TextDataConfig):
    """`data` of SFT."""

    response_key: str = setting("answer", "Response column")
    prompt_dict_keys: list[str] | None = setting(None, "Keys to the prompt in a nested column")
    response_dict_keys: list[str] | None = setting(None, "The same for the response")
    multiturn: MultiturnConfig = section(MultiturnConfig)
    truncation: Literal["error", "left", "right"] = setting(
        "error", "error: reject longer samples; right: drop tokens at the end; left: drop tokens at the start"
    )
    balance_dp_token: bool = setting(False, "No effect: the loss is always the global token mean")
    custom_cls: CustomClassConfig = section(CustomClassConfig)
    packing: Literal["auto"] | bool = setting(
        "auto",
        "One row per micro-batch, without padding; auto pads if the model cannot pack",
    )
    max_tokens_per_gpu: int | None = setting(
        None, "Maximum tokens per micro-batch", ge=1, null="micro_batch_size_per_gpu * max_length when packing"
    )
    token_cache: str | None = setting(None, "Cache directory for tokens; null uses the user's cache")
    num_tokenizers: int | None = setting(None, "Tokenizer processes", ge=1, null="one per core")

    @property
    def columns(self) -> dict[str, str]:
        """Columns of the chats; none for a custom dataset class, which may read any column."""
        if self.custom_cls.path is not None:
            return {}
        if self.multiturn.enable:
            return {"data.multiturn.messages_key": self.multiturn.messages_key}
        return {"data.prompt_key": self.prompt_key, "data.response_key": self.response_key}

    def is_raw(self, name: str) -> bool:
        """Whether a data file must be converted: JSON, CSV, and parquet with system columns or in other layouts."""
        path = Path(name).expanduser()
        return (
            super().is_raw(name)
            or has_system_column(path, self.columns.values())
            or (self.multiturn.enable and self._has_other_layout(path))
        )

    def _has_other_layout(self, path: Path) -> bool:
        """Whether a parquet file cannot be trained on, but has the columns or the types of a layout to convert."""
        from pyarrow import types

        schema = read_schema(path)
        if schema is None:
            return False
        names, key = {*schema.names}, self.multiturn.messages_key
        if key not in names:
            has_prompt = not names.isdisjoint((*PROMPT_KEYS, self.prompt_key))
            has_pair = has_prompt and not names.isdisjoint((*RESPONSE_KEYS, self.response_key))
            is_known = has_pair or {*PREFERENCE_KEYS} <= names or not names.isdisjoint(MESSAGES_KEYS)
            return key == "messages" and is_known
        kind = schema.field(key).type
        if _is_text(kind):  # JSON text
            return True
        if not (types.is_list(kind) or types.is_large_list(kind)):
            return False
        turn = kind.value_type
        fields = {turn.field(index).name for index in range(turn.num_fields)}
        return types.is_map(turn) or (types.is_struct(turn) and "role" not in fields and {"from", "value"} <= fields)


@dataclass(kw_only=True)
class EvaluatedDataConfig(DataConfig):
    """`data` of the stages that evaluate rewards at intervals."""

    eval_split: Literal["test", "train"] = setting("test", "Data to evaluate; train: the first training rows")
    eval_batches: int = setting(1, "Batches of `data.train_batch_size` per evaluation", ge=0, also=ALL)
    eval_every_steps: int = setting(
        0, "Evaluate after every N steps, and after the last step (budget: of each epoch)", ge=1, also=(0, "never")
    )


@dataclass(kw_only=True)
class PromptDataConfig(EvaluatedDataConfig, TextDataConfig):
    """`data` of GRPO."""

    train_batch_size: int = setting(
        64,
        "Samples per step over all ranks (grpo: prompts, budget: questions)",
        ge=1,
    )
    prompt_key: str = setting("prompt", "Prompt column (grpo: a list of messages)")
    max_length: int = unused(1, "prompts and completions have separate limits")
    max_prompt_length: int = setting(512, "Maximum prompt tokens", ge=1)
    filter_overlong_prompts: bool = setting(False, "Skip longer prompts instead of failing")
    max_response_length: int = setting(512, "Maximum completion tokens; longer ones are truncated", ge=1)

    def is_raw(self, name: str) -> bool:
        """Whether a data file must be converted: JSON, CSV, and parquet with other columns than verl's RL format."""
        path = Path(name).expanduser()
        return (
            super().is_raw(name)
            or has_system_column(path, self.columns.values())
            or has_flat_columns(path, self.prompt_key)
        )


@dataclass(kw_only=True)
class ImageDataConfig(DataConfig):
    """`data` of the stages that train on questions about images."""

    train_files: None = unused(None, "set data.datasets")
    val_files: None = unused(None, "set data.datasets")
    max_length: int = unused(1, "questions have no length limit")
    datasets: dict[str, Any] = setting(
        {},
        "NAME: {train: SIZE, val: SIZE, source: FOLDER, metric: vqa or cider, images: FOLDER}; "
        "source defaults to NAME on the Hub",
    )
    question_suffix: str = setting("", "Appended to every question")
    max_unreadable_images: int = setting(0, "Maximum unreadable or extremely narrow images to skip", ge=0)

    def check(self) -> None:
        """Refuse entries of `data.datasets` with unknown keys or invalid values."""
        known = [each.name for each in fields(QuestionSource)]
        for name, entry in self.datasets.items():
            key = f"data.datasets.{name}"
            if not isinstance(entry, dict) or not set(entry) <= set(known):
                raise UserError(f"{key} is {entry!r}; it must be a mapping of {', '.join(known)}")
            if entry.get("metric") not in (None, *VQA_METRICS):
                raise UserError(f"{key}.metric is {entry['metric']!r}; choose one of {', '.join(VQA_METRICS)}")
            for split in ("train", "val"):
                size = entry.get(split, -1)
                if isinstance(size, bool) or not isinstance(size, int) or size < -1:
                    raise UserError(f"{key}.{split} is {size!r}; it must be a number of rows, or -1 for all")

    def sources(self) -> dict[str, QuestionSource]:
        """The datasets by name."""
        return {name: QuestionSource(**entry) for name, entry in self.datasets.items()}

    def training_files(self) -> list[Path]:
        """Find the training files of all datasets.

        Raises:
            UserError: the folder of a dataset has no training files.
        """
        used = {name: source for name, source in self.sources().items() if source.source and source.train}
        return [path for name, source in used.items() for path in source.files(name, "train")]


@dataclass(kw_only=True)
class ImageChatDataConfig(ImageDataConfig):
    """`data` of the SFT of a vision-language model."""

    questions_per_chat: int = setting(1, "Maximum questions per sequence", ge=1)


@dataclass(kw_only=True)
class QuestionDataConfig(ImageDataConfig, EvaluatedDataConfig):
    """`data` of the budget controller's GRPO."""

    train_batch_size: int = setting(
        8,
        "Samples per step over all ranks (grpo: prompts, budget: questions)",
        ge=1,
    )
    micro_batch_size_per_gpu: int = setting(
        64, "Samples per forward pass (sft with packing: see `max_tokens_per_gpu`; budget: configurations)", ge=1
    )
    eval_batches: int = setting(-1, "Batches of `data.train_batch_size` per evaluation", ge=1, also=ALL)
    eval_every_steps: int = setting(
        -1,
        "Evaluate after every N steps, and after the last step (budget: of each epoch)",
        ge=1,
        also=(-1, "the epochs' ends"),
    )


@dataclass(frozen=True)
class QuestionSource:
    """An entry of `data.datasets`.

    Attributes:
        train: number of training rows; -1 for all, 0 for none.
        val: number of validation rows; -1 for all, 0 for none.
        source: a folder with `train*.parquet` and `val*.parquet`; None for the Hub.
        metric: one of `VQA_METRICS`; None for the default of a public dataset, or vqa for other datasets.
        images: folder of the images that rows name by path; None for `source`.
    """

    train: int = -1
    val: int = -1
    source: str | None = None
    metric: str | None = None
    images: str | None = None

    @property
    def image_folder(self) -> Path | None:
        """The folder from which images may be read; None if rows must contain them."""
        folder = self.images or self.source
        return None if folder is None else Path(folder).expanduser()

    def size(self, split: str) -> int:
        """Number of rows of a split."""
        return self.train if split == "train" else self.val

    def files(self, name: str, split: str) -> list[Path]:
        """The parquet files of a split in the folder `source`.

        Args:
            split: train or val.

        Raises:
            UserError: the folder has no such file.
        """
        paths = sorted(Path(self.source or "").expanduser().glob(f"{split}*.parquet"))
        if not paths:
            raise UserError(
                f"data.datasets.{name}.source={self.source} has no {split}*.parquet; prepare it or correct the path"
            )
        return paths


def file_list(files: str | list[str] | None) -> list[str]:
    """`train_files` or `val_files` as a list; null is the empty list."""
    if files is None:
        return []
    return list(files) if isinstance(files, list) else [str(files)]


def has_flat_columns(path: Path, prompt_key: str) -> bool:
    """Whether a parquet file has columns for rewards that verl's RL format keeps in `reward_model` or `extra_info`."""
    schema = read_schema(path)
    if schema is None:
        return False
    columns = {*schema.names}
    return not columns & {"reward_model", "extra_info"} and not columns <= {prompt_key, "data_source", "ability"}


def has_system_column(path: Path, columns: Iterable[str]) -> bool:
    """Whether a parquet file has all the given columns, and system prompts in a column that training does not read."""
    schema = read_schema(path)
    if schema is None or not {*columns} <= {*schema.names}:
        return False
    return any(name in SYSTEM_KEYS and _is_text(schema.field(name).type) for name in schema.names)


def _is_text(kind: Any) -> bool:
    from pyarrow import types

    kind = kind.value_type if types.is_dictionary(kind) else kind
    return bool(types.is_string(kind) or types.is_large_string(kind))


def read_schema(path: Path) -> Any:
    """The schema of a parquet file; None if the file cannot be read, which the checks of the inputs report."""
    from pyarrow import ArrowException, parquet

    try:
        return parquet.read_schema(path) if path.is_file() else None
    except (ArrowException, OSError):
        return None
