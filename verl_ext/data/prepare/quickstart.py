"""`quickstart`: creates a toy instruction-to-code task, held-out problems, and a tiny model to train on the task.

With these, the whole pipeline runs on a CPU in minutes.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_ext.cli import IntArg
from verl_ext.console import staged_progress
from verl_ext.data.prepare.command import PrepareCommand, PrepareResult, write_model
from verl_ext.data.prepare.quickstart_families import FAMILIES, FunctionFamily, Parameters
from verl_ext.data.prepare.tables import TRAIN_NAME, VAL_NAME, Row, rl_prompt_row, write_jsonl, write_parquet

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, Qwen2ForCausalLM, Qwen2TokenizerFast

EXPECTED_S = {"sampling problems": 1, "creating the model": 8, "measuring lengths": 3}
PROBLEMS_NAME = "problems.jsonl"
PROMPTS_NAME, VAL_PROMPTS_NAME = "prompts.parquet", "val_prompts.parquet"
MODEL_NAME = "model"
MIN_SAMPLES, MAX_SAMPLES = 500, 200_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `quickstart`."""
    parser.add_argument(
        "--samples",
        type=IntArg(MIN_SAMPLES, MAX_SAMPLES),
        default=12_000,
        help=f"training samples, {MIN_SAMPLES} to {MAX_SAMPLES}; plus 2%% for validation",
    )
    parser.add_argument("--seed", type=IntArg(0), default=0, help="seed of the data and of the weights")


def prepare_quickstart(arguments: argparse.Namespace) -> PrepareResult:
    """Write `train.parquet`, `val.parquet`, `prompts.parquet`, `val_prompts.parquet`, `problems.jsonl` and `model/`.

    Raises:
        UserError: the output directory cannot be written to.
    """
    output = Path(arguments.output)
    with staged_progress(EXPECTED_S) as begin:
        begin("sampling problems")
        data = sample_quickstart(arguments.samples, arguments.seed)
        tables = {
            TRAIN_NAME: data.train,
            VAL_NAME: data.val,
            PROMPTS_NAME: [to_prompt(*problem) for problem in data.prompts],
            VAL_PROMPTS_NAME: [to_prompt(*problem) for problem in data.val_prompts],
        }
        for name, rows in tables.items():
            write_parquet(output / name, rows)
        write_jsonl(output / PROBLEMS_NAME, [to_problem(*problem) for problem in data.held_out])
        model_files, model_counts = _write_model(output / MODEL_NAME, data, arguments.seed, begin)
    counts: dict[str, float] = {
        "train": len(data.train),
        "val": len(data.val),
        "prompts": len(data.prompts),
        "problems": len(data.held_out),
        "families": len({row["family"] for row in data.train}),
    }
    return PrepareResult([*tables, PROBLEMS_NAME, *model_files], {**counts, **model_counts})


def _write_model(
    directory: Path, data: QuickstartData, seed: int, begin: Callable[[str], None]
) -> tuple[list[str], dict[str, float]]:
    begin("creating the model")
    conversations = [row["messages"] for row in data.train]
    tokenizer = train_tokenizer(conversations)
    model = build_model(tokenizer, seed)
    files = [f"{MODEL_NAME}/{name}" for name in write_model(directory, model, tokenizer)]
    begin("measuring lengths")
    lengths = [len(tokenizer.apply_chat_template(messages, return_dict=False)) for messages in conversations]
    return files, {
        "vocabulary": len(tokenizer),
        "parameters": model.num_parameters(),
        "mean_tokens": round(sum(lengths) / len(lengths), 1),
        "max_tokens": max(lengths),
    }


# Sampling: held-out problems are in no other set

ProblemSpec = tuple[FunctionFamily, Parameters]
HELD_OUT_PER_FAMILY = 6
PROMPTS_PER_FAMILY = 60
VAL_PROMPTS_PER_FAMILY = 4
VAL_FRACTION = 0.02
MAX_VAL_PER_FAMILY = 100
"""Limits the validation set, so that problems for training remain."""
BUGGY_FRACTION = 0.75
"""Share of wrong answers in a family with a mistake. Greedy decoding repeats the mistake, but sampling still finds
correct answers, which GRPO needs."""


@dataclass(frozen=True)
class QuickstartData:
    """Chats for training and validation, and problems.

    Attributes:
        train: chats for SFT.
        val: validation chats for SFT.
        held_out: problems for the evaluation of checkpoints, in no other set.
        prompts: distinct problems for GRPO, none of them held out.
        val_prompts: validation problems for GRPO, neither in `prompts` nor held out.
    """

    train: list[Row]
    val: list[Row]
    held_out: list[ProblemSpec]
    prompts: list[ProblemSpec]
    val_prompts: list[ProblemSpec]


def sample_quickstart(num_train: int, seed: int) -> QuickstartData:
    """Sample all data; the same arguments give the same rows in the same order.

    Args:
        num_train: number of training rows, divided equally among the families; plus 2% for validation.
    """
    generator = random.Random(seed)
    train: list[Row] = []
    val: list[Row] = []
    held_out: list[ProblemSpec] = []
    num_val = min(max(round(num_train * VAL_FRACTION), 1), MAX_VAL_PER_FAMILY * len(FAMILIES))
    for index, family in enumerate(FAMILIES):
        seen: set[str] = set()
        held_out += [(family, item) for item in _sample_new(family, HELD_OUT_PER_FAMILY, seen, generator)]
        items = _sample_new(family, _share(num_val, index), seen, generator)
        val += [_answered(family, item, generator) for item in items]
        items = _sample(family, _share(num_train, index), seen, generator)
        train += [_answered(family, item, generator) for item in items]
    generator.shuffle(train)
    generator.shuffle(val)
    return QuickstartData(train, val, held_out, *_sample_prompts(held_out, generator))


def _sample_prompts(
    held_out: list[ProblemSpec], generator: random.Random
) -> tuple[list[ProblemSpec], list[ProblemSpec]]:
    prompts: list[ProblemSpec] = []
    val_prompts: list[ProblemSpec] = []
    for family in FAMILIES:
        seen = {problem_id(other, item) for other, item in held_out}
        prompts += [(family, item) for item in _sample_new(family, PROMPTS_PER_FAMILY, seen, generator)]
        val_prompts += [(family, item) for item in _sample_new(family, VAL_PROMPTS_PER_FAMILY, seen, generator)]
    generator.shuffle(prompts)
    generator.shuffle(val_prompts)
    return prompts, val_prompts


def _share(total: int, index: int) -> int:
    """Number of items out of `total` for a family."""
    return len(range(index, total, len(FAMILIES)))


def _sample_new(family: FunctionFamily, count: int, seen: set[str], generator: random.Random) -> Iterator[Parameters]:
    """Sample distinct parameters and add them to `seen`."""
    for _ in range(count):
        (parameters,) = _sample(family, 1, seen, generator)
        seen.add(problem_id(family, parameters))
        yield parameters


def _sample(family: FunctionFamily, count: int, seen: set[str], generator: random.Random) -> Iterator[Parameters]:
    """Sample parameters that are not in `seen`; they may repeat."""
    while count > 0:
        parameters = family.sample(generator)
        if problem_id(family, parameters) not in seen:
            yield parameters
            count -= 1


def _answered(family: FunctionFamily, parameters: Parameters, generator: random.Random) -> Row:
    """A chat whose answer has the family's mistake, if any, with probability `BUGGY_FRACTION`."""
    buggy = family.buggy_solution(parameters)
    is_buggy = buggy is not None and generator.random() < BUGGY_FRACTION
    messages = [
        {"role": "user", "content": family.prompt(parameters)},
        {"role": "assistant", "content": buggy if is_buggy else family.solution(parameters)},
    ]
    return {"messages": messages, "family": family.name, "problem_id": problem_id(family, parameters)}


# Problems


def problem_id(family: FunctionFamily, parameters: Parameters) -> str:
    """The id of a problem, unique for a family and its parameters."""
    return "/".join(["quickstart", family.name, *map(str, parameters.values())])


def to_problem(family: FunctionFamily, parameters: Parameters) -> Row:
    """A held-out problem; its tests compare with the results of the correct solution."""
    solution = family.solution(parameters)
    return {
        "problem_id": problem_id(family, parameters),
        "family": family.name,
        "prompt": family.prompt(parameters),
        "entry_point": family.function_name(parameters),
        "tests": _assertions(solution, family.expressions(parameters)),
        "canonical_solution": solution,
    }


def to_prompt(family: FunctionFamily, parameters: Parameters) -> Row:
    """A row in verl's RL format; its ground truth holds the tests in the format of the reward `code_tests`."""
    problem = to_problem(family, parameters)
    tests = {"entry_point": problem["entry_point"], "tests": problem["tests"]}
    info = {"problem_id": problem["problem_id"], "family": family.name}
    return rl_prompt_row("quickstart", problem["prompt"], "code", json.dumps(tests), info)


def _assertions(solution: str, expressions: list[str]) -> list[str]:
    namespace: dict[str, Any] = {}
    exec(solution, namespace)
    return [f"assert {expression} == {eval(expression, namespace)!r}" for expression in expressions]


# Tokenizer

MAX_VOCABULARY = 1000
PAD, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def train_tokenizer(conversations: list[list[dict[str, str]]]) -> Qwen2TokenizerFast:
    """Train a byte-level BPE tokenizer like Qwen2's on conversations, including the roles.

    Args:
        conversations: lists of messages with role and content.

    Returns:
        A tokenizer with a ChatML template without a default system prompt. Turns end with its EOS token `<|im_end|>`.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from tokenizers.trainers import BpeTrainer
    from transformers import Qwen2TokenizerFast
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated"),
            # One token per digit, so that the model can copy numbers that it has never seen.
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=MAX_VOCABULARY,
        min_frequency=2,
        special_tokens=[PAD, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    turns = (f"{message['role']}\n{message['content']}" for messages in conversations for message in messages)
    tokenizer.train_from_iterator(turns, trainer)
    return Qwen2TokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=PAD,
        unk_token=PAD,
        additional_special_tokens=[TURN_START, TURN_END],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


# Model

HIDDEN_SIZE = 192
NUM_LAYERS = 4
NUM_HEADS = 6
"""Gives a head size of 32: vLLM's CPU attention supports 32 and 64, but not 48, the size with four heads."""
NUM_KV_HEADS = 2
INTERMEDIATE_SIZE = 576
CONTEXT_LENGTH = 1024


def build_model(tokenizer: PreTrainedTokenizerBase, seed: int) -> Qwen2ForCausalLM:
    """Build a Qwen2 model with about two million parameters and random weights.

    Args:
        tokenizer: provides the vocabulary size and the EOS and padding tokens.
        seed: seed of the weights; the global random state does not change.
    """
    import torch
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN_SIZE,
        intermediate_size=INTERMEDIATE_SIZE,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_KV_HEADS,
        max_position_embeddings=CONTEXT_LENGTH,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    return model


COMMAND = PrepareCommand(
    name="quickstart",
    help="Create a toy instruction-to-code task, held-out problems, and a 2M-parameter model to train on the task.",
    example="quickstart --output data/quickstart",
    next_command="sft 2",
    version=2,
    add_arguments=add_arguments,
    run=prepare_quickstart,
)
