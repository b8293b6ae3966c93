"""The advice of the built-in health rules in Chinese."""

from __future__ import annotations

import re

ADVICE = {
    "lower optim.lr, or look at the batches of those steps": "降低 optim.lr，或检查这些步的批次",
    "stop, lower optim.lr and resume from an earlier checkpoint": "停止训练，降低 optim.lr，并从较早的检查点恢复",
    "check the learning rate, that answers have loss tokens, and that labels belong to their prompts": (
        "检查学习率、回答中是否有计入损失的词元，以及标签与提示是否对应"
    ),
    "use a larger train_batch_size or rollout.n, or a lower optim.lr; judge by the mean over an epoch": (
        "增大 train_batch_size 或 rollout.n，或降低 optim.lr；请按每轮均值判断"
    ),
    "check rollout.n, and that rewards differ within a group": "检查 rollout.n，以及同一组内的奖励是否有差异",
    "check the chat template, the tokenizer and that the weights were loaded": (
        "检查对话模板、分词器，以及权重是否已加载"
    ),
    "compare val/loss, and use an earlier checkpoint or fewer epochs": "对照 val/loss，使用较早的检查点或减少训练轮数",
    "check the validation data and the dtype of the model": "检查验证数据和模型的数据类型",
    "stop and use the best checkpoint": "停止训练，使用最佳检查点",
    "stop if it keeps rising, and use the best checkpoint": "若持续上升则停止训练，并使用最佳检查点",
    "train longer, or check that the validation data resembles the training data": (
        "延长训练，或检查验证数据是否与训练数据相近"
    ),
    "stop and use the best checkpoint, or train on more prompts": "停止训练并使用最佳检查点，或使用更多提示训练",
    "if the loss is affected too, lower optim.lr or optim.clip_grad": (
        "若损失也受影响，降低 optim.lr 或 optim.clip_grad"
    ),
    "if the loss does not fall, raise optim.lr and check that the parameters are trained": (
        "若损失不下降，提高 optim.lr，并检查参数是否参与训练"
    ),
    "lower optim.lr and set optim.clip_grad": "降低 optim.lr，并设置 optim.clip_grad",
    "check that the loss has tokens and that parameters are trained": "检查是否有计入损失的词元，以及参数是否参与训练",
    "compare the optim section of config.yaml with what was intended": "对照预期检查 config.yaml 的 optim 部分",
    "stop, and resume from an earlier checkpoint with a lower optim.lr": "停止训练，降低 optim.lr 后从较早的检查点恢复",
    "check the parts of the reward: one of them outweighs the others": "检查奖励的各组成部分：其中一项压过了其他项",
    "if it should still rise, look at the weights of the reward functions": "若奖励仍应上升，检查各奖励函数的权重",
    "check the reward functions and their weights": "检查奖励函数及其权重",
    "use a larger train_batch_size or rollout.n; judge by the mean over an epoch": (
        "增大 train_batch_size 或 rollout.n；请按每轮均值判断"
    ),
    "check the reward functions, their weights and the temperature": "检查奖励函数、其权重以及采样温度",
    "fix the reward function: the output of the run has the traceback of its first failure": (
        "修复奖励函数：任务输出中有其首次失败的堆栈信息"
    ),
    "compare the answers in samples.jsonl with their references": "将 samples.jsonl 中的回答与参考答案对照",
    "if it should still rise, train longer or adjust optim.lr": "若仍应上升，延长训练或调整 optim.lr",
    "raise optim.lr, and check that parameters are trained and that rewards differ within a group": (
        "提高 optim.lr，并检查参数是否参与训练、同一组内的奖励是否有差异"
    ),
    "groups are mixed up: the advantages of a group sum to 0, so check sample_id and rollout.n": (
        "分组有误：同组优势之和应为 0，请检查 sample_id 和 rollout.n"
    ),
    "rewards do not differ within groups: raise rollout.n or the temperature, or use other prompts": (
        "组内奖励没有差异：提高 rollout.n 或温度，或更换提示"
    ),
    "check how samples are grouped, and algorithm.norm_adv_by_std_in_grpo": (
        "检查样本的分组方式以及 algorithm.norm_adv_by_std_in_grpo"
    ),
    "lower the weight of the format in reward.functions, or check the verdicts in samples.jsonl": (
        "降低 reward.functions 中格式奖励的权重，或检查 samples.jsonl 中的判定结果"
    ),
    "raise actor.entropy_coeff or the temperature, or lower optim.lr": (
        "提高 actor.entropy_coeff 或温度，或降低 optim.lr"
    ),
    "read samples.jsonl: short answers may exploit the reward": "查看 samples.jsonl：过短的回答可能在钻奖励的空子",
    "raise data.max_response_length, because answers are truncated": "提高 data.max_response_length，因为回答被截断",
    "raise data.max_prompt_length, because longer prompts are refused or dropped": (
        "提高 data.max_prompt_length，因为更长的提示会被拒绝或丢弃"
    ),
    "use the same dtype in both, or set algorithm.rollout_correction.rollout_is": (
        "两者使用相同的数据类型，或设置 algorithm.rollout_correction.rollout_is"
    ),
    "raise reward.budget_violation, or start with larger budgets": "提高 reward.budget_violation，或从更大的预算开始",
    "raise reward.budget_violation": "提高 reward.budget_violation",
    "compare reward.budget_violation and latency_penalty with the gain in accuracy": (
        "将 reward.budget_violation 和 latency_penalty 与准确率的提升相比较"
    ),
    "raise reward.accuracy, or check what the controller skips": "提高 reward.accuracy，或检查控制器跳过了什么",
    "compare the trends, and adjust optim.lr or the weights of the reward if they are flat": (
        "比较各项趋势；若没有变化，调整 optim.lr 或奖励权重"
    ),
    "check the parts of the step (time/train/...), and other programs on the machine": (
        "检查每步各阶段的耗时（time/train/...）以及本机的其他程序"
    ),
    "find what grows with the run, such as memory, logs or a data cache": (
        "找出随训练不断增长的部分，例如内存、日志或数据缓存"
    ),
    "raise data.num_workers, or look at the disk that holds the data": "提高 data.num_workers，或检查存放数据的磁盘",
    "look for other jobs on the machine, slow disks, or batches of very different sizes": (
        "检查本机是否有其他任务、磁盘是否缓慢，或批次大小是否差异很大"
    ),
    "free space, or set a smaller trainer.max_ckpt_to_keep": "释放磁盘空间，或减小 trainer.max_ckpt_to_keep",
}


def translate_advice(language: str, sentence: str) -> str:
    """Translate the advice at the end of a finding's sentence; other advice and the message stay English."""
    for found in re.finditer("; ", sentence) if language == "zh" else ():
        advice = ADVICE.get(sentence[found.end() :])
        if advice is not None:
            return f"{sentence[: found.start()]}；{advice}"
    return sentence
