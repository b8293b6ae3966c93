"""What supervised fine-tuning builds: batches that leave nobody waiting, a model that makes its loss in parts."""

from __future__ import annotations

import sys
from functools import cached_property

from peft import PeftModel
from transformers import PreTrainedModel

from verl_ext.console import print_line, warn
from verl_ext.data.batching import Collator, MicroBatchCollator
from verl_ext.data.dataset import SampleDataset, TokenDataset
from verl_ext.data.packing import MicroBatchPlan, attention_share
from verl_ext.distributed import gather_results, on_every_rank
from verl_ext.errors import UserError
from verl_ext.trainer.forward_check import LOSS_TOLERANCE, loss_heads_error, why_not_packed
from verl_ext.trainer.gathering import Gathering, keeps_gathered
from verl_ext.trainer.hardware import packs_samples, pick_precision
from verl_ext.trainer.loop import PipelineTrainer
from verl_ext.trainer.loss_head import install_loss_head
from verl_ext.trainer.model import build_model, compile_blocks, load_model_config
from verl_ext.trainer.packed_attention import PACKED_SDPA
from verl_ext.trainer.stages import SFTConfig, VLMSFTConfig
from verl_ext.trainer.token_loss import TokenLoss
from verl_ext.trainer.turn_end import stop_at_turn_end


class SFTSetup(PipelineTrainer):
    """The parts of a trainer of chats.

    Attributes:
        token_loss: the forward pass.
        gathering: of weights and gradients over the ranks.
    """

    config: SFTConfig | VLMSFTConfig
    batcher: Collator
    token_loss: TokenLoss
    gathering: Gathering

    def _build_model_optimizer(self) -> None:
        if isinstance(self.config, SFTConfig):
            # verl's loss under Ulysses must be the plain mean, which `summed_loss_over_sequence_ranks` weights
            self.config.data.balance_dp_token = False
        super()._build_model_optimizer()
        assert isinstance(self.train_dataset, TokenDataset)
        stop_at_turn_end(self.model, self.tokenizer, self.train_dataset.final_tokens(), self.is_main)
        self.gather_as_asked()
        self.check_forward()

    @cached_property
    def packs(self) -> bool:
        """Whether samples are packed into rows; set to false where the model cannot keep them apart."""
        return packs_samples(self.config)

    def make_batcher(self) -> Collator:
        """See `TrainerSetup.make_batcher`."""
        return MicroBatchCollator(self.tokenizer.pad_token_id, self.packs)

    def plan_for(self, dataset: SampleDataset) -> MicroBatchPlan | None:
        """See `TrainerSetup.plan_for`."""
        return self.plan_by_tokens(dataset)

    def plan_by_tokens(self, dataset: SampleDataset) -> MicroBatchPlan:
        """Samples whose tokens fit into a micro-batch together."""
        assert isinstance(self.config, SFTConfig) and isinstance(dataset, TokenDataset)
        data, packs = self.config.data, self.packs
        most = data.max_tokens_per_gpu or (data.micro_batch_size_per_gpu * data.max_length if packs else sys.maxsize)
        most_samples = None if packs or data.max_tokens_per_gpu else data.micro_batch_size_per_gpu
        return MicroBatchPlan(dataset.lengths, packs, most, most_samples, self.attention_share)

    @cached_property
    def attention_share(self) -> float:
        """`MicroBatchPlan.quadratic` of the model.

        Read once, on all ranks together: a validation must not depend on the model's directory, and a rank that failed
        alone would leave the others waiting in the forward pass.
        """
        config = self.config
        return on_every_rank(lambda: attention_share(load_model_config(config).get_text_config().hidden_size))

    def make_model(self) -> PreTrainedModel:
        """See `TrainerSetup.make_model`."""
        return build_model(self.config, self.device_mesh, self.device_name, self.prepare_loss)

    def prepare_loss(self, model: PreTrainedModel) -> None:
        """Change what must be changed before the model is sharded: its output layer, its blocks."""
        config = self.config
        whole_rows = config.sequence_parallel_size == 1
        by_liger = config.model.use_liger and self.device_name == "cuda"
        head = install_loss_head(model, by_liger) if config.model.fused_loss and whole_rows else None
        if isinstance(config, SFTConfig) and config.model.compile:
            compile_blocks(model)
        precision = pick_precision(config.model.mixed_precision, self.device_name)
        self.token_loss = TokenLoss(model, head, precision, self.device_name)

    def gather_as_asked(self) -> None:
        """Settle what stays gathered between micro-batches."""
        setting = self.config.model.fsdp_config.keep_gathered
        keeps = keeps_gathered(setting, self.fsdp_model, self.token_loss.precision, self.device_name)
        self.gathering = Gathering(self.fsdp_model, keeps)

    def check_forward(self) -> None:
        """Have the model itself say whether it can be packed, and whether its loss can be fused; collective."""
        loss, vocab_size = self.token_loss, self.model_config.get_text_config().vocab_size
        self.fsdp_model.eval()
        if self.packs:
            self.pack_if_possible(vocab_size)
        if loss.head is not None:
            error = loss_heads_error(loss.logits, loss, self.batcher.micro_batch, vocab_size)
            if not error < LOSS_TOLERANCE[loss.precision]:
                loss.head = None
                if self.is_main:
                    warn(f"model.fused_loss is off: it differs by {error:.2g} from the loss of this model's logits")
        self.gathering.release()

    def pack_if_possible(self, vocab_size: int) -> None:
        """Fall back to padding where the model cannot keep packed samples apart; collective.

        The answer depends on the weights that the run began with, which are loaded before a checkpoint is: a resumed
        run packs if it did before. The order of the data does not depend on it.

        Raises:
            UserError: it cannot, and the configuration insists.
        """
        model: PreTrainedModel = self.model.get_base_model() if isinstance(self.model, PeftModel) else self.model
        attention = model.config._attn_implementation
        if attention == "sdpa":
            model.config._attn_implementation = PACKED_SDPA
        reason: str | None
        if self.config.model.attn_implementation == "eager":
            reason = "runs with eager attention, which takes padded samples only"
        elif attention == "eager":
            reason = "does not support sdpa, which packing needs here"
        else:
            reason = why_not_packed(self.token_loss.logits, vocab_size, self.token_loss.precision)
        reason = next(filter(None, gather_results(lambda: reason)), None)  # the same on every rank
        if reason is None:
            return
        name = type(model).__name__.removeprefix("FSDP")
        if isinstance(self.config, SFTConfig) and self.config.data.packing is True:
            raise UserError(f"data.packing=true does not work: {name} {reason}; set data.packing=auto")
        if self.is_main:
            print_line(f"Samples are padded instead of packed: {name} {reason}.", sys.stderr)
        model.config._attn_implementation = attention
        self.packs = False
        self._build_dataloader(self.train_dataset, self.val_dataset)

    def validation_plan(self, dataset: SampleDataset) -> MicroBatchPlan:
        """Which samples of the validation set share a forward pass."""
        return self.plan_by_tokens(dataset)
