"""Chinese meanings of the metrics that have no chart of their own, by their meaning in the registry."""

from __future__ import annotations

CHINESE_MEANINGS = {
    "Tokens that contribute to the loss.": "计入损失的词元数。",
    "Passes over the training data since the run began, such as 1.5.": "从任务开始遍历训练数据的轮数，例如 1.5。",
    "Updates skipped so far because of a non-finite loss or gradient.": "因损失或梯度不是有限数而跳过的更新次数。",
    "Model FLOPs utilization by verl's count: six FLOPs per token and weight, even with LoRA; GPUs only.": (
        "按 verl 的算法计算的模型算力利用率（MFU）：每个词元、每个参数 6 次运算，LoRA 也一样；仅 GPU。"
    ),
    "The whole save until its commit, including background work.": "保存检查点直到提交的全部时间，包括后台工作。",
    "A validation pass.": "一次验证。",
    "From the command to a checked configuration.": "从执行命令到配置检查完毕。",
    "Importing torch for torchrun, and starting a process per rank.": "为 torchrun 导入 torch，为各 rank 启动进程。",
    "Starting Python and importing the stage.": "启动 Python 并导入训练阶段。",
    "Initializing the process group.": "初始化进程组。",
    "Loading the tokenizer.": "加载分词器。",
    "Reading and tokenizing the data.": "读取数据并分词。",
    "Loading and sharding the model, and creating the optimizer.": "加载并切分模型，创建优化器。",
    "Selecting and loading a checkpoint, and waiting for the other ranks.": "选择并加载检查点，等待其他 rank。",
    "Opening run.json, tables and trackers.": "打开 run.json、表格和跟踪器。",
    "The validation before the first step.": "第一步之前的验证。",
    "The first step.": "第一步。",
    "The sum of all of these.": "启动各部分之和。",
    "Weighted sum of a sample's rewards.": "样本各项奖励的加权和。",
    "Weighted contribution of one reward function.": "一个奖励函数的加权贡献。",
    "Mean of this reward over the evaluation prompts of a `data_source`, for the 20 largest of several.": (
        "该奖励在一个 `data_source` 的评估提示上的平均值；仅当有多个来源时记录，最多记录最大的 20 个来源。"
    ),
    "Samples dropped because a reward failed.": "因奖励计算失败而丢弃的样本数。",
    "Reward calls that returned no reward.": "没有返回奖励的调用次数。",
    "Length of a prompt.": "提示的长度。",
    "Length of a completion.": "回答的长度。",
    "Length of prompt and completion.": "提示与回答的总长度。",
    "Tokens of all completions.": "所有回答的词元数。",
    "-log-probability times advantage; its gradient equals that of the step's first update.": (
        "负对数概率乘以优势；其梯度等于该步第一次更新的梯度。"
    ),
    (
        "KL divergence from the reference, by `actor.kl_loss_type`; `low_var_kl` and `k3` are clamped to 10 per "
        "token and have no gradient where clamped (`low_var_kl+` and `k2` do)."
    ): (
        "与参考模型的 KL 散度，按 `actor.kl_loss_type`；`low_var_kl` 和 `k3` 每个词元最多为 10，且达到后没有梯度，"
        "`low_var_kl+` 和 `k2` 则有。"
    ),
    "KL divergence of the updated policy from the sampling policy.": "更新后的策略与采样策略的 KL 散度。",
    "Fraction of tokens with a clipped ratio; of excluded tokens with `clip_cov`.": (
        "概率比被裁剪的词元比例；使用 `clip_cov` 时为被排除的词元比例。"
    ),
    "Fraction of tokens with a ratio beyond `clip_ratio_c`; only with `vanilla`.": (
        "概率比超过 `clip_ratio_c` 的词元比例；仅用于 `vanilla`。"
    ),
    "Largest deviation of a probability ratio from 1 at the step's first update. With one update per step, the ratio "
    "is relative to the engine's probability.": (
        "该步第一次更新时概率比与 1 的最大偏差。每步只更新一次时，概率比相对于推理引擎的概率。"
    ),
    "Groups of samples: the prompts of the step.": "样本组数，即该步的提示数。",
    "Groups whose rewards are all equal.": "奖励全部相同的组数。",
    "Such groups replaced by dynamic sampling.": "被动态采样替换的此类组数。",
    "Completion tokens.": "回答的词元。",
    "Completion tokens per second of update.": "更新阶段每秒处理的回答词元。",
    "Generating completions.": "生成回答。",
    "Waiting for rewards after the last completion.": "最后一个回答之后等待奖励。",
    "An evaluation pass.": "一次评估。",
    "Sending the weights to the rollout engine.": "把权重发送到推理引擎。",
    "Size of the weights sent; 0 if the engine already had them.": "所发送权重的大小；引擎已有时为 0。",
    "Step whose weights generated the completions.": "生成回答所用权重的步数。",
    "Accuracy of the answers, from 0 to 1.": "答案的准确率（0 到 1）。",
    "Latency of a configuration.": "配置的延迟。",
    "1 if latency exceeds the budget, else 0.": "延迟超过预算时为 1，否则为 0。",
    "Latency budget.": "延迟预算。",
    "Active transformer blocks.": "启用的 Transformer 块数。",
    "Index of the tier, from 0.": "档位的编号，从 0 开始。",
    "Experts per token in an active block.": "启用的块中每个词元的专家数。",
    "Configurations chosen.": "所选的配置数。",
    "Configurations.": "配置。",
    "Configurations per second of update.": "更新阶段每秒处理的配置。",
    "Fraction of configurations whose result for the sample was cached.": "该样本的结果已缓存的配置比例。",
    "Problems in the dataset.": "数据集的题数。",
    "Fraction of answers that ran: `success` and `wrong_answer`.": "能运行的答案比例：`success` 与 `wrong_answer`。",
    "Fraction of answers that solve their problem: pass@1.": "解出题目的答案比例：pass@1。",
    "Answers per problem, if more than one.": "每题的答案数（多于一个时）。",
    "Unbiased pass@k, with several answers per problem.": "每题有多个答案时的无偏 pass@k。",
    "Fraction of tests passed: mean and percentiles over problems.": "通过的测试比例：各题的均值与分位数。",
    "Mean length of an answer.": "答案的平均长度。",
    "Mean time to judge an answer.": "评判一个答案的平均时间。",
    "Problems generated and judged per second.": "每秒生成并评判的题数。",
    "Fraction of answers truncated at the maximum number of new tokens.": "因达到最大新词元数而被截断的答案比例。",
    "Generated tokens of all answers per solved problem.": "每解出一题所生成的词元数（所有答案）。",
    "Judging time of all answers per solved problem.": "每解出一题所用的评判时间（所有答案）。",
    "Fraction of answers of this error type.": "该错误类型的答案比例。",
    "Bounds of a rate's confidence interval.": "比率置信区间的上下界。",
}
