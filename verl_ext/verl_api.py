"""The names of verl 0.7.0 that the product uses; no other module of it imports verl.

docs/design/verl.md lists the use of each name, and its place in later releases.
"""

# ruff: noqa: F401 - other modules import these names

from verl.models.transformers.monkey_patch import apply_monkey_patch
from verl.trainer.fsdp_sft_trainer import FSDPSFTTrainer
from verl.trainer.ppo.core_algos import (
    agg_loss,
    compute_grpo_outcome_advantage,
    get_policy_loss_fn,
    kl_penalty,
)
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights
from verl.utils import hf_tokenizer
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
from verl.utils.device import get_device_name
from verl.utils.flops_counter import FlopsCounter
from verl.utils.fs import copy_to_local
from verl.utils.fsdp_utils import apply_fsdp2, fsdp2_clip_grad_norm_, fsdp2_load_full_state_dict
from verl.utils.import_utils import load_extern_object
from verl.utils.py_functional import convert_to_regular_types
from verl.utils.torch_dtypes import PrecisionType
from verl.utils.torch_functional import (
    entropy_from_logits,
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
    get_wsd_schedule_with_warmup,
    logprobs_from_logits,
)
from verl.utils.tracking import Tracking
from verl.workers.config import ActorConfig as VerlActorConfig
from verl.workers.config import PolicyLossConfig
from verl.workers.config.optimizer import build_optimizer as build_verl_optimizer
from verl.workers.sharding_manager.fsdp_ulysses import FSDPUlyssesShardingManager
