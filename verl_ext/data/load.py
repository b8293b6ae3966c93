"""Opens the data sets that a configuration names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from transformers import PreTrainedTokenizerBase

from verl_ext.config.schema import as_dict
from verl_ext.data.chat import ChatDataset
from verl_ext.data.config import ChatDataConfig, DataConfig, ImageDataConfig, TextDataConfig, file_list
from verl_ext.data.dataset import TokenDataset, files_digest
from verl_ext.data.prompts import PromptDataset
from verl_ext.data.question_sources import QuestionSource, local_files
from verl_ext.data.questions import QuestionDataset
from verl_ext.data.tokenise import cache_directory
from verl_ext.errors import UserError, first_line_of


def training_data_digest(data: DataConfig) -> str:
    """Digest that identifies the training data; empty if they are not in files on this machine.

    Args:
        data: the section of the configuration.
    """
    if isinstance(data, ImageDataConfig):
        sources = {name: QuestionSource(**source) for name, source in data.datasets.items()}
        local = {name: source.source for name, source in sources.items() if source.source and source.train}
        paths = [path for name, folder in local.items() for path in local_files(name, folder, "train")]
    else:
        assert isinstance(data, TextDataConfig)
        paths = [Path(name).expanduser() for name in file_list(data.train_files)]
    try:
        return files_digest(paths) if paths else ""
    except OSError:  # a data set of the user's own may take its files from elsewhere
        return ""


def load_datasets(
    config: Any, tokenizer: PreTrainedTokenizerBase, progress: bool = False, now: datetime | None = None
) -> tuple[TokenDataset, TokenDataset | None]:
    """Training and validation set of a run; the second is None when `data.val_files` is null.

    Args:
        config: the resolved configuration.
        tokenizer: as loaded for the model.
        progress: show progress bars (rank 0).
        now: see `ChatEncoder`.
    """
    data = config.data
    train = load_dataset(data.train_files, data, tokenizer, data.train_max_samples, progress, now)
    if not file_list(data.val_files):
        return train, None
    return train, load_dataset(data.val_files, data, tokenizer, data.val_max_samples, progress, now)


def load_prompts(
    config: Any, tokenizer: PreTrainedTokenizerBase, progress: bool = False, now: datetime | None = None
) -> tuple[PromptDataset, PromptDataset | None]:
    """Prompts to learn from and to measure on; the first arguments are those of `load_datasets`.

    Args:
        config: the resolved configuration.
        tokenizer: as loaded for the model.
        progress: show progress bars (rank 0).
        now: see `PromptDataset`.
    """
    data = config.data
    train = PromptDataset(data.train_files, tokenizer, data, data.train_max_samples, progress, now)
    if not file_list(data.val_files):
        return train, None
    return train, PromptDataset(data.val_files, tokenizer, data, data.val_max_samples, progress, now)


def load_questions(
    config: Any, tokenizer: PreTrainedTokenizerBase, progress: bool = False
) -> tuple[QuestionDataset, QuestionDataset | None]:
    """Questions about images to learn from and to measure on; the arguments are those of `load_datasets`.

    Raises:
        UserError: they cannot be read, or there are fewer than a batch to learn from.
    """
    data = config.data
    sources = {name: QuestionSource(**source) for name, source in data.datasets.items()}
    further = data.question_suffix, data.max_unreadable_images, progress
    train = QuestionDataset(sources, "train", *further)
    has_val = any(source.size("val") for source in sources.values())
    val = QuestionDataset(sources, "val", *further) if has_val else None
    if len(train) < data.train_batch_size:
        raise UserError(
            f"there are {len(train)} questions to learn from, fewer than data.train_batch_size="
            f"{data.train_batch_size}; lower it, or give more"
        )
    return train, val


def load_dataset(
    files: Any,
    config: ChatDataConfig,
    tokenizer: PreTrainedTokenizerBase,
    max_samples: int,
    progress: bool,
    now: datetime | None,
) -> TokenDataset:
    """A `ChatDataset`, or the class that `data.custom_cls` names, as in verl."""
    if config.custom_cls.path is None:
        return ChatDataset(files, tokenizer, config, max_samples, progress, cache_directory(config.token_cache), now)
    from verl.utils.import_utils import load_extern_object

    try:
        dataset_class: Any = load_extern_object(str(config.custom_cls.path), str(config.custom_cls.name))
    except (OSError, ImportError, AttributeError, SyntaxError) as error:
        raise UserError(
            f"data.custom_cls cannot be loaded: {first_line_of(error)}; correct its path or name"
        ) from error
    names = OmegaConf.create(file_list(files))  # verl tells one file from several by this type
    dataset = dataset_class(
        parquet_files=names, tokenizer=tokenizer, config=OmegaConf.create(as_dict(config)), max_samples=max_samples
    )
    unpadded = Unpadded(dataset)
    if not unpadded.has_loss:
        raise UserError(
            f"{config.custom_cls.name} of data.custom_cls has no token to train on in {', '.join(file_list(files))}; "
            "correct its loss_mask, or raise data.max_length"
        )
    return unpadded


class Unpadded(TokenDataset):
    """A data set of the user's own, whose samples verl wants padded to `max_length`, with the padding taken off.

    Args:
        dataset: yields `input_ids`, `attention_mask` and `loss_mask`, each (max_length,).

    Attributes:
        has_loss: whether any token counts in the loss; the first of a sample is predicted from nothing.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.ends: Counter[int] = Counter()
        self.has_loss = False
        lengths = []
        for sample in (self[index] for index in range(len(dataset))):
            lengths.append(len(sample["input_ids"]))
            self.has_loss = self.has_loss or bool(sample["loss_mask"][1:].any())
            self.ends.update(sample["input_ids"][sample["loss_mask"].bool()][-1:].tolist())
        self.lengths = np.array(lengths, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = self.dataset[index]
        real = sample["attention_mask"].bool()
        tokens = {name: torch.as_tensor(sample[name])[real].long() for name in ("input_ids", "loss_mask")}
        return {**tokens, "row": index}

    def final_tokens(self) -> Counter[int]:
        """See `TokenRows`."""
        return self.ends

    def describe(self, indices: Iterable[int]) -> str:
        """How messages name samples."""
        return f"{type(self.dataset).__name__} rows {', '.join(map(str, indices))}"
