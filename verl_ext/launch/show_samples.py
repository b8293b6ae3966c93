"""`run_sft.sh NUM_RANKS --show-samples N`: print training samples with the tokens in the loss marked."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from transformers import PreTrainedTokenizerBase

from verl_ext.console import print_line, print_marked
from verl_ext.data.chats import load_chat_files, warn_of_trained_header
from verl_ext.errors import UserError
from verl_ext.launch.configure import has_custom_class
from verl_ext.launch.preflight import check_inputs
from verl_ext.trainer.stages import RunConfig, SFTConfig
from verl_ext.trainer.tokenizer import check_end_tokens, load_tokenizer


def show_samples(config: RunConfig, num_samples: int) -> None:
    """Check the model and the data as for training, then tokenize and print samples as the trainer gets them.

    Args:
        config: configuration of an SFT run whose inputs are prepared.
        num_samples: number of samples, from the first row on.

    Raises:
        UserError: the stage trains on something else than chats, an input cannot be used, or a sample cannot be
            tokenized.
    """
    if not isinstance(config, SFTConfig):
        raise UserError(f"--show-samples shows chats, but the recipe's stage is {config.stage}; omit the option")
    check_inputs(config, fills_batch=False)  # a few rows are enough to look at
    tokenizer = load_tokenizer(config)
    if not has_custom_class(config):
        warn_of_trained_header(tokenizer, config.data)
    samples = load_chat_files(config.data.train_files, config.data, tokenizer, num_samples, progress=True)
    for row in range(len(samples)):
        sample = samples[row]
        token_ids, is_trained = sample["input_ids"].tolist(), sample["loss_mask"].bool().tolist()
        print_line(f"--- sample {row}: {len(token_ids)} tokens, {sum(is_trained)} in the loss")
        print_marked(decode_segments(token_ids, is_trained, tokenizer))
    check_end_tokens(config, tokenizer, samples.final_tokens())


def decode_segments(
    token_ids: Sequence[int], is_trained: Sequence[bool], tokenizer: PreTrainedTokenizerBase
) -> list[tuple[str, bool]]:
    """The text of a sample in runs of tokens with equal loss mask.

    Returns:
        (text, whether its tokens are in the loss) for each run. A run is decoded as a whole, because a character can
        have several tokens.
    """
    runs = groupby(zip(is_trained, token_ids), key=lambda pair: pair[0])
    return [(tokenizer.decode([token for _, token in run]), trained) for trained, run in runs]
