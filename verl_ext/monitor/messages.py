"""The messages of health findings, checklists and the log in Chinese; `text` has the texts of the page itself."""

from __future__ import annotations

import re

from verl_ext.monitor.database import LogEvent

MESSAGES = {
    # Advice
    "lower optim.lr, or look at the batches of those steps": "降低 optim.lr，或检查这些步的批次",
    "stop, lower optim.lr and resume from an earlier checkpoint": "停止训练，降低 optim.lr，并从较早的检查点恢复",
    "check the learning rate, that answers have loss tokens, and that labels belong to their prompts": (
        "检查学习率、回答中是否有计入损失的词元，以及标签与提示是否对应"
    ),
    "use a larger train_batch_size or rollout.n, a lower or decaying optim.lr, or more epochs": (
        "增大 train_batch_size 或 rollout.n，降低 optim.lr 或使其衰减，或增加训练轮数"
    ),
    "judge by the mean over an epoch": "请按每轮均值判断",
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
    "check the reward functions, their weights and the temperature": "检查奖励函数、其权重以及采样温度",
    "fix the reward function: the output of the run shows the first failure of each cause": (
        "修复奖励函数：任务输出中有每种失败原因的首次失败"
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
    "raise data.max_prompt_length, because longer prompts are rejected or dropped": (
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
        "比较各项趋势，若没有变化，调整 optim.lr 或奖励权重"
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
    # Loss
    "the loss is finite": "损失是有限数",
    "the loss was not finite in the last {} step": "最近 {} 步的损失不是有限数",
    "the loss was not finite in the last {} steps": "最近 {} 步的损失不是有限数",
    "the loss went from {} to {} over {} epochs": "损失在 {2} 轮内从 {0} 变为 {1}",
    "the recent loss is {}, the best earlier mean was {}": "最近的损失为 {}，此前的最佳均值为 {}",
    "the loss started at {}, and its best value was {}": "损失最初为 {}，最佳为 {}",
    "val/loss fell from {} to {}": "val/loss 从 {} 降到 {}",
    "the loss jitters by {} around {}, and changed by {}": "损失在 {1} 附近波动，幅度为 {0}，总体变化 {2}",
    "it reached {}": "最大绝对值达到 {}",
    "the largest recent policy loss is {}": "最近策略损失的最大绝对值为 {}",
    "the loss started at {}": "损失最初为 {}",
    "the loss of random guessing is {}": "随机猜测的损失为 {}",
    "the loss is {} near the end of the run": "训练接近结束时损失为 {}",
    "the loss is {} near the end of the run, and val/loss is {}": "训练接近结束时损失为 {}，val/loss 为 {}",
    # Validation and evaluation
    "val/loss is finite": "val/loss 是有限数",
    "the last val/loss was not finite": "最近一次的 val/loss 不是有限数",
    "{} is at its best, {}, at step {}": "{0} 在第 {2} 步达到最佳值 {1}",
    "{} was {} at step {} and is {} at step {}": "{0} 在第 {2} 步为 {1}，在第 {4} 步为 {3}",
    "{} was {} at step {} and is {} at step {}, not significantly worse (threshold: {})": (
        "{0} 在第 {2} 步为 {1}，在第 {4} 步为 {3}，没有显著变差（阈值：{5}）"
    ),
    "{} was {} at step {} and is {} at step {}, while {} falls": (
        "{0} 在第 {2} 步为 {1}，在第 {4} 步为 {3}，而 {5} 在下降"
    ),
    "{} was {} at step {} and is {} at step {}, while {} rises": (
        "{0} 在第 {2} 步为 {1}，在第 {4} 步为 {3}，而 {5} 在上升"
    ),
    "the checkpoint to use is global_step_{}": "应使用检查点 global_step_{}",
    "the last values of val/loss are {}, {}, {}, {}": "val/loss 最近四次的值依次为 {}、{}、{}、{}",
    "val/loss is {} near the end of the run": "训练接近结束时 val/loss 为 {}",
    # Gradient and learning rate
    "the gradient norm is about {}": "梯度范数约为 {}",
    "{} of the last {} gradient norms are above {} or not finite": "最近 {1} 个梯度范数中有 {0} 大于 {2} 或不是有限数",
    "the learning rate follows its schedule": "学习率符合调度",
    "the learning rate is {} at step {}, but {} in its schedule": "第 {1} 步的学习率为 {0}，而按调度应为 {2}",
    # Rewards and advantages
    "the reward went from {} to {} over {} epochs": "奖励在 {2} 轮内从 {0} 变为 {1}",
    "the reward went from {} to {} over {} parts of the run": "奖励在训练的 {2} 个分段内从 {0} 变为 {1}",
    "the recent reward is {}, the best earlier mean was {}": "最近的奖励为 {}，此前的最佳均值为 {}",
    "the reward was between {} and {}": "奖励在 {} 与 {} 之间",
    "the reward was between {} and {}, and rises": "奖励在 {} 与 {} 之间，且在上升",
    "the mean reward of a step reached {}": "单步平均奖励的最大绝对值为 {}",
    "the mean reward jitters by {} around {}": "平均奖励在 {1} 附近波动，幅度为 {0}",
    "the standard deviation of rewards in a step is {}": "同一步内奖励的标准差为 {}",
    "reward functions failed {} times in a step of {} samples": "奖励函数在每步的 {1} 个样本中失败 {0} 次",
    "{} was 0 for {} epochs": "{} 连续 {} 轮为 0",
    "{} was 0 for {} steps": "{} 连续 {} 步为 0",
    "the last value of {} is {}": "{} 的最新值为 {}",
    "the accuracy went from {} to {} over {} epochs": "准确率在 {2} 轮内从 {0} 变为 {1}",
    "the accuracy went from {} to {} over {} parts of the run": "准确率在训练的 {2} 个分段内从 {0} 变为 {1}",
    "over {} epochs {} went from {} to {}": "{} 轮内，{} 从 {} 变为 {}",
    "over {} epochs {} went from {} to {}, {} went from {} to {}": "{} 轮内，{} 从 {} 变为 {}，{} 从 {} 变为 {}",
    "over {} epochs {} went from {} to {}, {} went from {} to {}, {} went from {} to {}": (
        "{} 轮内，{} 从 {} 变为 {}，{} 从 {} 变为 {}，{} 从 {} 变为 {}"
    ),
    "advantages have a mean of {} and a standard deviation of {}": "优势的均值为 {}，标准差为 {}",
    "the standard deviation of advantages is at most {}": "优势的标准差最大为 {}",
    "the standard deviation of advantages is {}": "优势的标准差为 {}",
    # Language models
    "{} changed by {}, {} by {}": "{} 变化 {}，{} 变化 {}",
    "the entropy went from {} to {} nat": "熵从 {} 变为 {} nat",
    "the entropy went from {} to {} nat, and the reward rose": "熵从 {} 变为 {} nat，奖励上升",
    "completions went from {} to {} tokens": "回答长度从 {} 变为 {} 个词元",
    "completions went from {} to {} tokens, and the reward rose": "回答长度从 {} 变为 {} 个词元，奖励上升",
    "completions have {} of at most {} tokens": "回答长度为 {} 个词元，上限为 {}",
    "the longest prompt has {} of at most {} tokens": "最长的提示有 {} 个词元，上限为 {}",
    "rollout engine and trainer differ by {} nat/token": "推理引擎与训练器相差 {} nat/词元",
    # Budget controllers
    "{} of the configurations of the last epoch were over budget": "最近一轮有 {} 的配置超出预算",
    "{} of the configurations of the last epoch were over budget, and more than {} for {} epochs": (
        "最近一轮有 {0} 的配置超出预算，且连续 {2} 轮超过 {1}"
    ),
    "the violation rate went from {} to {} over {} epochs": "预算违反率在 {2} 轮内从 {0} 变为 {1}",
    "the latency is {} ms, {} of the budget": "延迟为 {} 毫秒，是预算的 {}",
    "after {} epochs {} is {}, and at least {} is usual": "{} 轮之后，{} 为 {}，通常至少为 {}",
    "after {} epochs {} is {}, and at most {} is usual": "{} 轮之后，{} 为 {}，通常至多为 {}",
    "{} is {}, and at least {} is usual": "{} 为 {}，通常至少为 {}",
    "{} is {}, and at most {} is usual": "{} 为 {}，通常至多为 {}",
    # Time, throughput and disk
    "a step takes {} s, {} s was usual": "每步用时 {} 秒，之前通常为 {} 秒",
    "a token takes {} s, {} s was usual": "每个词元用时 {} 秒，之前通常为 {} 秒",
    "the time of a step changed by {} over the run": "训练期间每步时间变化 {}",
    "the time of a token changed by {} over the run": "训练期间每个词元的时间变化 {}",
    "{} of a step is waiting for data": "每步有 {} 的时间在等待数据",
    "throughput fluctuates by at least {} around {}": "吞吐量在 {1} 附近波动，幅度至少为 {0}",
    "{} {} are free": "剩余 {} {}",
    "{} {} are free, and each save takes {} {} more": "剩余 {} {}，每次保存再占用 {} {}",
    # Any rule
    "the rule itself failed ({text})": "规则自身运行出错（{}）",
    # Checklist of the start
    "After {} steps": "{} 步之后",
    "After {} steps (at step {} so far)": "{} 步之后（目前在第 {} 步）",
    "metrics.jsonl can be read": "metrics.jsonl 可以读取",
    "none of its lines is a row of metrics": "其中没有任何一行是指标记录",
    "train/loss falls": "train/loss 下降",
    "train/loss is not 0 throughout, and not extreme": "train/loss 不恒为 0，也没有极端值",
    "train/lr(1e-3) follows its schedule": "train/lr(1e-3) 符合调度",
    "train/grad_norm is in range": "train/grad_norm 在正常范围内",
    "step times are steady": "每步时间稳定",
    "GPUs are busy for more than {} of the time": "GPU 的繁忙时间超过 {}",
    "used for {text}": "使用率为 {}",
    "compare the phases of a step (time/train/...)": "比较每步各阶段的耗时（time/train/...）",
    "no NCCL errors, timeouts or out-of-memory errors": "没有 NCCL 错误、超时或内存不足",
    "none in {} attempts": "{} 次启动中均未出现",
    "attempt {}: {text}": "第 {} 次启动：{}",
    # Checklist of the checkpoints
    "At every checkpoint": "每个检查点",
    "val/loss does not keep rising": "val/loss 没有持续上升",
    "every checkpoint is complete, including huggingface/": "每个检查点都完整，包括 huggingface/",
    "{} complete, {} of them with huggingface/": "{} 个完整，其中 {} 个含 huggingface/",
    "the next start exports step {text}": "下次启动时导出第 {} 步",
    "huggingface/ is damaged": "huggingface/ 已损坏",
    "{text} should have one, too": "{} 也应含 huggingface/",
    "run {text} export": "运行 {} export",
    "global_step_{}: {text}": "global_step_{}：{}",
    "run {text} verify, and remove incomplete checkpoints": "运行 {} verify，并删除不完整的检查点",
    "checkpoints have similar sizes": "各检查点大小相近",
    "from {} {} to {} {}": "从 {} {} 到 {} {}",
    "exports may be less frequent than saves, or an optimizer was dropped": "导出可能少于保存，或优化器状态已被丢弃",
    "latest_checkpointed_iteration.txt names the newest checkpoint": (
        "latest_checkpointed_iteration.txt 指向最新的检查点"
    ),
    "it names {}": "指向 {}",
    "it names {}, but global_step_{} is newer": "指向 {}，但 global_step_{} 更新",
    "it names {}, which does not exist": "指向 {}，但它不存在",
    "it is missing": "文件不存在",
    "it is empty": "文件为空",
    "it cannot be read ({text})": "文件无法读取（{}）",
    "it holds {text} instead of a step": "内容是 {}，而不是步数",
    "the next start uses the newest complete checkpoint": "下次启动会使用最新的完整检查点",
    # Incomplete checkpoints
    "it has no manifest.json, so it was never completed": "没有 manifest.json，说明保存从未完成",
    "its manifest.json cannot be read ({text})": "其 manifest.json 无法读取（{}）",
    "its manifest belongs to step {}": "其清单属于第 {} 步",
    "its file {} is missing": "缺少文件 {}",
    "its file {} is missing ({text})": "缺少文件 {}（{}）",
    "its file {} cannot be read ({text})": "无法读取文件 {}（{}）",
    "its file {} has {} bytes instead of {}": "文件 {} 有 {} 字节，应为 {} 字节",
    "its file {} is truncated": "文件 {} 不完整",
    "its files cannot be read ({text})": "其文件无法读取（{}）",
    "it has no shards": "没有分片",
    "it holds shards of {} and of {} ranks": "同时含有 {} 个 rank 和 {} 个 rank 的分片",
    "remove those of one run": "请删除其中一次任务的分片",
    "it has no data.pt, which verl writes last, so the save was interrupted": (
        "没有 verl 最后写入的 data.pt，说明保存被中断"
    ),
    # Checklist of the end
    "At the end": "结束时",
    "the run is alive": "任务仍在运行",
    "it was last active {} s ago": "{} 秒前仍有活动",
    "its process {} no longer exists": "其进程 {} 已不存在",
    "no heartbeat from its launcher for {} s": "其启动器已有 {} 秒没有心跳",
    "it has logged nothing for {} s": "已有 {} 秒没有任何记录",
    "run the same command again to resume": "再次运行相同的命令即可恢复",
    "all steps completed": "所有步均已完成",
    "all steps are done": "所有步均已完成",  # of development versions before 0.1.0
    "{} of {} steps, finished: {text}": "{} / {} 步，已完成：{}",
    "{} of {} steps, failed: {text}": "{} / {} 步，失败：{}",
    "{} of {} steps, stopped: {text}": "{} / {} 步，已停止：{}",
    "{} of {} steps, waiting: {text}": "{} / {} 步，等待中：{}",
    "the final train/loss is in range": "最终的 train/loss 在正常范围内",
    "the final val/loss is in range": "最终的 val/loss 在正常范围内",
    "the expected checkpoints exist": "应有的检查点都存在",
    "{} kept, the newest is global_step_{}": "保留了 {} 个，最新的是 global_step_{}",
    "{text} should be kept, too": "{} 也应保留",
    "global_step_{} was due but is missing": "global_step_{} 应已保存，但不存在",
    "the newest complete step is {}": "最新的完整检查点在第 {} 步",
    "there is no complete checkpoint": "没有完整的检查点",
    "the W&B run is closed": "W&B 任务已关闭",
    "closed": "已关闭",
    "it was not closed": "未关闭",
    "upload its rows with {text}": "用 {} 上传其记录",
    # Ends of attempts
    "unknown reason": "原因未知",
    "stopped by {} after step {}": "因 {} 在第 {} 步之后停止",
    "stopped by the deadline after step {}": "因到达时限在第 {} 步之后停止",
    "stopped by the health rule {} after step {}": "因健康规则 {} 在第 {} 步之后停止",
    "stopped by {}": "因 {} 停止",
    "stopped by a signal to a rank": "因某个 rank 收到信号而停止",
    "stopped immediately by {}": "因 {} 立即停止",
    "stopped immediately by a second {}": "因第二次 {} 立即停止",
    "killed after {} because the step and the save took longer than {text}": (
        "收到 {} 后当前步和保存用时超过 {}，被强制终止"
    ),
    "killed or lost": "被终止或失联",
    "the attempt did not record its end": "这次启动没有记录结束",
    # Checkpoints
    "complete": "完整",
    "complete, written by verl itself": "完整，由 verl 自身写入",
    "complete, without {}": "完整，不含 {}",
    "complete, export deferred": "完整，导出推迟",
    "complete, export damaged": "完整，导出损坏",
    "cannot be read now: {text}": "暂时无法读取：{}",
    "incomplete: {text}": "不完整：{}",
    "incomplete, written by verl itself: {text}": "不完整，由 verl 自身写入：{}",
    "a save that is in progress or was interrupted": "保存正在进行或被中断",
    "a removal that is in progress or was interrupted": "删除正在进行或被中断",
    "max_ckpt_to_keep is null": "max_ckpt_to_keep 为 null",
    "the newest": "最新",
    "one of the {} newest": "最新的 {} 个之一",
    "the best by {}": "按 {} 最佳",
    "one of the {} best by {}": "最佳的 {} 个之一（按 {}）",
    "verl itself wrote it": "由 verl 自身写入",
    "selected in {}": "由 {} 选定",
    "protected by its `{}` file": "受其文件 `{}` 保护",
    "leased by process {} on {}": "{1} 上的进程 {0} 正在使用",
    "leased by {}, which cannot be read": "正被使用（{} 无法读取）",
    "best_checkpoint.json cannot be read ({text})": "best_checkpoint.json 无法读取（{}）",
    "best_checkpoint.json has the step {text}, which is not an integer": ("best_checkpoint.json 中的步数 {} 不是整数"),
    "not complete, so rotation leaves it alone": "不完整，因此轮换不处理它",
    "rotation would drop its optimizer": "轮换会删除其优化器状态",
    "rotation would remove it": "轮换会删除它",
    "the next start, save or prune removes it": "下次启动、保存或 prune 时删除",
    # Log
    "attempt {} began at step {}": "第 {} 次启动从第 {} 步开始",
    "attempt {} began at step {} on {}, {} ranks": "第 {} 次启动从第 {} 步开始，主机 {}，{} 个 rank",
    "attempt {} ended: {text}": "第 {} 次启动结束：{}",
    "checkpoint saved in {} s": "检查点已保存，用时 {} 秒",
}
"""English clauses and their translations. `{}` stands for a word, such as a number or the name of a metric, and
`{text}` for any text, such as a list or a reason; both are translated too."""


def pattern_of(english: str) -> re.Pattern[str]:
    """Return the pattern that matches the clauses of a format."""
    escaped = re.escape(english).replace(re.escape("{}"), r"(\S+)").replace(re.escape("{text}"), "(.+)")
    return re.compile(escaped)


_PATTERNS = [(pattern_of(english), chinese) for english, chinese in MESSAGES.items() if "{" in english]


def translate_message(language: str, sentence: str) -> str:
    """Translate the clauses of a sentence, which semicolons separate; those of a user's own rules stay English."""
    if language != "zh":
        return sentence
    clauses = sentence.split("; ")
    translated = [_translate_clause(clause) for clause in clauses]
    return sentence if translated == clauses else "；".join(translated)


def translate_event(language: str, event: LogEvent) -> str:
    """Translate the text of an event; that of a finding begins with the name of its rule."""
    name = "" if event.rule is None else f"{event.rule}: "
    return name + translate_message(language, event.text.removeprefix(name))


def _translate_clause(clause: str) -> str:
    if clause in MESSAGES:
        return MESSAGES[clause]
    for pattern, chinese in _PATTERNS:
        if found := pattern.fullmatch(clause):
            return chinese.format(*map(_translate_clause, found.groups()))
    return clause
