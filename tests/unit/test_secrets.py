"""Secrets are rejected in configurations, masked in messages, and kept from processes that do not need them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from eval_pipeline.engines.vllm_engine import VllmChild
from eval_pipeline.judge import ProgramCase, ProgramTests, ResourceLimits, Submission
from eval_pipeline.recipe import load_eval_config
from tests.helpers import ROOT
from tests.helpers.judge import serving
from verl_ext.config.schema import as_dict
from verl_ext.config.secrets import HIDDEN, masked, require_no_secrets, without_secrets
from verl_ext.errors import UserError
from verl_ext.trainer.stages import load_config

KEY = "sk-PLANTED0123456789"
PROXY = "http://user:PLANTED@proxy.example:3128"
RECIPES = sorted((ROOT / "recipes").glob("*/*.yaml"))
LOOK_AROUND = """
found = []
import os
for pid in range(1, 1 << 16):
    try:
        found.append(open(f'/proc/{pid}/environ', 'rb').read())
    except OSError:
        pass
text = b' '.join([*found, repr(dict(os.environ)).encode()])
print('seen' if b'PLANTED' in text else 'not seen')
"""


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Secrets in the environment, as users have them."""
    for name in ("OPENAI_API_KEY", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, KEY)
    monkeypatch.setenv("FTP_PROXY", PROXY)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("+engine.api_key=" + KEY, "engine.api_key seems to hold a secret, judging by its name"),
        ("+data.apply_chat_template_kwargs.password=" + KEY, "password seems to hold a secret"),
        ("trainer.wandb_proxy='" + PROXY + "'", "trainer.wandb_proxy holds an address with a password"),
        ("trainer.logger=[console,'" + PROXY + "']", "trainer.logger holds an address with a password"),
        ("trainer.experiment_name=run_" + KEY, "holds the value of the variable OPENAI_API_KEY"),
        ("trainer.experiment_name='${oc.env:OPENAI_API_KEY}'", "holds the value of the variable OPENAI_API_KEY"),
    ],
)
@pytest.mark.usefixtures("planted")
def test_training_rejects_secrets_without_repeating_them(words: str, why: str) -> None:
    with pytest.raises(UserError) as refused:
        load_config("sft", [words])
    assert why in str(refused.value) and "environment variable" in str(refused.value)
    assert "PLANTED" not in str(refused.value)


@pytest.mark.usefixtures("planted")
def test_evaluation_rejects_secrets_without_repeating_them() -> None:
    for words in (f"engine.vllm.hf_token={KEY}", f"engine.vllm.download_dir='{PROXY}'", f"engine.model={KEY}"):
        with pytest.raises(UserError, match="configurations are written to files") as refused:
            load_eval_config("quickstart", [words])
        assert "PLANTED" not in str(refused.value)


@pytest.mark.parametrize(
    "words", [f"engine.api_key={KEY} and", f"+model.password=[{KEY}", f"data.max_length='{PROXY}'", f"optim.lr={KEY}"]
)
@pytest.mark.usefixtures("planted")
def test_error_messages_mask_typed_secrets(words: str) -> None:
    with pytest.raises(UserError) as refused:
        load_config("sft", [words])
    assert "PLANTED" not in str(refused.value)
    assert masked(words) != words and HIDDEN in masked(words)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_shipped_settings_are_not_taken_for_secrets(recipe: Path) -> None:
    require_no_secrets(yaml.safe_load(recipe.read_text()))
    if recipe.parent.name != "eval":
        config = load_config(recipe.parent.name, [f"recipe={recipe}"])
        names = {name: "x" * 40 for name in _names(as_dict(config), "")}
        require_no_secrets(names)


def _names(value: dict, prefix: str) -> list[str]:
    return [
        name
        for key, item in value.items()
        for name in (_names(item, f"{prefix}{key}.") if isinstance(item, dict) else [f"{prefix}{key}"])
    ]


def test_secrets_are_removed_from_environment() -> None:
    kept = {"PATH": "/bin", "TOKENIZERS_PARALLELISM": "true", "KEYBOARD": "de", "HF_TOKEN": KEY, "MONKEY": "m"}
    gone = {"WANDB_API_KEY": KEY, "aws_secret_access_key": KEY, "DB_PASSWORD": KEY, "all_proxy": PROXY}
    assert without_secrets({**kept, **gone}, keep=("HF_TOKEN",)) == kept


@pytest.mark.usefixtures("planted")
def test_vllm_process_gets_no_secret_but_hub_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_needed")
    child = VllmChild(1.0)
    path, environment = Path(f"/proc/{child.pid}/environ"), b""
    while not environment:  # the kernel fills it a moment after the exec has closed what Popen waits for
        environment = path.read_bytes()
    child.end()
    assert b"PLANTED" not in environment and b"HF_TOKEN=hf_needed" in environment


@pytest.mark.parametrize("isolation", ["bwrap", "sandlock"])
@pytest.mark.usefixtures("planted")
def test_answers_see_no_secret_of_any_process(isolation: str) -> None:
    with serving(isolation, 1, ResourceLimits(cpu_s=5, wall_s=20)) as server:
        assert b"PLANTED" not in Path(f"/proc/{server._process.pid}/environ").read_bytes()
        looked = server.submit(Submission(LOOK_AROUND, ProgramTests((ProgramCase("", "not seen\n"),)))).result(
            timeout=60
        )
    assert looked.error_type == "success", looked.message
    assert b"PLANTED" in os.environb[b"OPENAI_API_KEY"]
