"""Suggestions for mistyped keys, options and commands, and that every suggestion exists."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

import eval_pipeline.__main__
import verl_ext.checkpoint.__main__
import verl_ext.health.__main__
import verl_ext.monitor.__main__
import verl_ext.plan.__main__
from eval_pipeline.config import EvalConfig
from eval_pipeline.recipe import load_eval_config
from verl_ext.cli import CommandParser
from verl_ext.config.schema import keys
from verl_ext.data.prepare import build_parser as build_prepare_parser
from verl_ext.errors import UserError
from verl_ext.launch.__main__ import make_parser, parse_arguments
from verl_ext.plan.__main__ import PlanOptions, known_words
from verl_ext.suggestions import COMMANDS, KEYS, OPTIONS, meant_key
from verl_ext.trainer.stages import STAGES, known_keys, load_config

SFT = {
    "--lr": "optim.lr",
    "--learning-rate": "optim.lr",
    "lr": "optim.lr",
    "learning_rate": "optim.lr",
    "lerning_rate": "optim.lr",
    "trainer.learning_rate": "optim.lr",
    "optm.lr": "optim.lr",
    "lr_scheduler_type": "optim.lr_scheduler",
    "batch_size": "data.train_batch_size",
    "per_device_train_batch_size": "data.micro_batch_size_per_gpu",
    "num_train_epochs": "trainer.total_epochs",
    "num_train_epoch": "trainer.total_epochs",
    "epochs": "trainer.total_epochs",
    "max_steps": "trainer.total_training_steps",
    "save_steps": "trainer.save_freq",
    "eval_steps": "trainer.test_freq",
    "output_dir": "trainer.default_local_dir",
    "model": "model.partial_pretrain",
    "model_name_or_path": "model.partial_pretrain",
    "max_seq_length": "data.max_length",
    "--config": "recipe",
    "--recipe": "recipe",
    "-n": "trainer.n_gpus_per_node",
    "--nproc_per_node": "trainer.n_gpus_per_node",
    "data.use_shm": "model.use_shm",
    "colour": None,
}
GRPO: dict[str, str | None] = {
    "actor_rollout_ref.rollout.n": "rollout.n",
    "actor_rollout_ref.model.path": "model.partial_pretrain",
    "actor_rollout_ref.actor.optim.lr": "optim.lr",
    "rollout.temp": "rollout.temperature",
    "rollout.temprature": "rollout.temperature",
    "rollout.val_kwargs.n": None,
    "actor_rollout_ref.rollout.val_kwargs.temperature": None,
    "rollout.stop": None,
    "rollout.seed": "trainer.seed",
    "trainer.chekpoint.async_save": "trainer.checkpoint.async_save",
    "trainer.chekpoint.async_sav": "trainer.checkpoint.async_save",
    "algorithm.filter_groups.enable": "algorithm.dynamic_sampling.max_rounds",
    "algorithm.filter_groups.max_num_gen_batches": "algorithm.dynamic_sampling.max_rounds",
    "scale_rewards": "algorithm.norm_adv_by_std_in_grpo",
    "actor.grad_clip": "optim.clip_grad",
    "actor_rollout_ref.actor.grad_clip": "optim.clip_grad",
    "num_generations": "rollout.n",
    "max_completion_length": "data.max_response_length",
    "reward_funcs": "reward.functions",
    "beta": "actor.kl_loss_coef",
    "eval_steps": "data.eval_every_steps",
}


@pytest.mark.parametrize(
    ("stage", "typed", "meant"),
    [("sft", *item) for item in SFT.items()] + [("grpo", *item) for item in GRPO.items()],
)
def test_suggests_key_for_key_of_another_program(stage: str, typed: str, meant: str | None) -> None:
    assert meant_key(typed, known_keys(stage, [])) == meant


@pytest.mark.parametrize("stage", STAGES)
def test_every_suggested_key_belongs_to_stage(stage: str) -> None:
    known = {name for name, key in keys(STAGES[stage].root).items() if not key.setting.unused}
    suggested = {name: meant_key(name, known) for name in KEYS}
    assert {key for key in suggested.values() if key is not None} <= known


def test_every_suggested_key_exists() -> None:
    everywhere = {key for stage in STAGES.values() for key in keys(stage.root)} | keys(PlanOptions).keys()
    everywhere |= keys(EvalConfig).keys()
    assert {key for targets in KEYS.values() for key in targets} <= everywhere


def programs() -> list[CommandParser]:
    """The parsers with their own sub-commands or options."""
    modules = (eval_pipeline.__main__, verl_ext.checkpoint.__main__, verl_ext.health.__main__)
    modules = (*modules, verl_ext.monitor.__main__, verl_ext.plan.__main__)
    return [*(module.build_parser() for module in modules), build_prepare_parser(), make_parser("sft")]


def test_every_suggested_command_and_option_exists() -> None:
    commands = {name for program in programs() for name in program._commands()}
    assert {name for names in COMMANDS.values() for name in names} <= commands
    every = [*programs(), *(child for program in programs() for child in dict(program._commands() or {}).values())]
    options = {option for parser in every for option in parser._option_string_actions}
    assert {f"--{name}" for names in OPTIONS.values() for name in names} <= options


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["2", "--lr", "1e-5"], "optim.lr=1e-5?"),
        (["2", "--lr=1e-5"], "optim.lr=1e-5?"),
        (["2", "--gradient_checkpointing"], "model.enable_gradient_checkpointing=VALUE?"),
        (["2", "--config", "my.yaml"], "recipe=my.yaml?"),
        (["2", "my.yaml"], "recipe=my.yaml?"),
        (["quickstart"], "recipe=quickstart?"),
        (["--nproc_per_node", "4"], "`bash run_sft.sh 4`?"),
        (["-n", "8"], "`bash run_sft.sh 8`?"),
        (["2", "--restart", "3"], "--restarts?"),
        (["2", "--print_config"], "--print-config?"),
    ],
)
def test_suggests_training_argument(words: list[str], meant: str) -> None:
    with pytest.raises(UserError) as refusal:
        parse_arguments(["sft", *words])
    assert f"did you mean {meant}" in str(refusal.value)


def test_suggests_keys_of_recipe_stage() -> None:
    with pytest.raises(UserError, match="controller.max_new_tokens=8"):
        parse_arguments(["grpo", "2", "recipe=budget_controller", "--max_new_tokens", "8"])
    with pytest.raises(UserError, match="the number of ranks as the first argument"):
        load_config("sft", ["num_gpus=2"])


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["eval_pipeline/run.sh", "wach", "x"], "'watch'"),
        (["eval_pipeline/run.sh", "evaluate"], "'run'"),
        (["eval_pipeline/run.sh", "list", "x"], "'status'"),
        (["eval_pipeline/run.sh", "run", "--reciepe", "humaneval"], "--recipe"),
        (["eval_pipeline/run.sh", "run", "--model", "x"], "--checkpoint"),
        (["eval_pipeline/run.sh", "run", "--temperature", "0.2"], "sampling.temperature=0.2"),
        (["verl_ext.checkpoint", "list", "x"], "'ls'"),
        (["verl_ext.checkpoint", "delete", "x"], "'prune'"),
        (["verl_ext.checkpoint", "prune", "x", "--keep", "3"], "--max-to-keep"),
        (["verl_ext.health", "--jsn", "x"], "--json"),
        (["verl_ext.data.prepare", "alpaca", "x"], "'chat'"),
        (["verl_ext.data.prepare", "quickstart", "--num_samples", "4"], "--samples"),
        (["verl_ext.plan", "--gpus", "8"], "gpus=8"),
        (["verl_ext.monitor", "checkpoints/x"], "--root checkpoints/x"),
        (["verl_ext.monitor", "--prot", "8"], "--port"),
        (["verl_ext.monitor", "plt", "x"], "'plot'"),
    ],
)
def test_suggests_command_argument(words: Sequence[str], meant: str) -> None:
    [program] = [parser for parser in programs() if parser.prog.split()[-1] == words[0]]
    with pytest.raises(UserError) as refusal:
        program.parse_args(words[1:])
    assert f"did you mean {meant}?" in str(refusal.value)


def test_run_directory_in_place_of_command_is_explained() -> None:
    with pytest.raises(UserError, match="specify a command before 'checkpoints/x'; choose one of ls, verify"):
        verl_ext.checkpoint.__main__.build_parser().parse_args(["checkpoints/x"])


def test_values_resembling_options_are_accepted() -> None:
    parser = CommandParser(prog="x", description="", examples=[])
    parser.add_argument("--n", type=float)
    parser.add_argument("rest", nargs="*")
    assert parser.parse_args(["--n", "-1.5", "a", "--", "--b"]).rest == ["a", "--b"]


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("num_gpus=8", "gpus=8"),
        ("hardwere=h100", "hardware=h100"),
        ("gpu=a100", "hardware=a100"),
        ("gpu=8,64", "gpus=8,64"),
    ],
)
def test_suggests_planner_setting(word: str, meant: str) -> None:
    with pytest.raises(UserError, match=f"did you mean {meant}"):
        PlanOptions.parse([word])
    assert {"gpus", "optim.lr"} <= {*known_words([])}


def test_suggests_evaluation_key() -> None:
    for word, meant in {"max_new_tokens=5": "sampling.max_tokens", "n=4": "sampling.num_samples"}.items():
        with pytest.raises(UserError, match=f"did you mean '{meant}'"):
            load_eval_config("humaneval", [word])
