"""The page's texts in English and Chinese; titles and hints of charts are in `charts.py`."""

from __future__ import annotations

from datetime import datetime

LANGUAGES = {"en": "English", "zh": "中文"}

CHINESE = {
    "Training monitor": "训练监控",
    "Run": "任务",
    "No run yet": "还没有任务",
    "This run does not exist, or its directory is gone": "该任务不存在，或其目录已被删除",
    "running": "运行中",
    "finished": "已完成",
    "waiting": "等待中",
    "failed": "失败",
    "stopped": "已停止",
    "killed": "已中断",
    "Live": "实时监控",
    "History": "历史回顾",
    "unreadable lines of metrics.jsonl": "metrics.jsonl 中无法读取的行",
    "Current step": "当前步数",
    "Total steps": "总步数",
    "Progress": "训练进度",
    "Time left": "预计剩余时间",
    "Loss now": "当前损失",
    "Learning rate": "学习率",
    "Speed": "训练速度",
    "samples/s": "样本/秒",
    "Steps done": "已完成的训练步数",
    "Steps of the whole run": "训练任务的预计总步数",
    "Fraction of the steps that are done": "完成百分比",
    "Estimated from the speed of the last 50 steps": "根据最近 50 步的速度估算",
    "Loss of the last batch; it should fall step by step": "当前批次的损失值；理想趋势：逐步下降",
    "Learning rate of the last step; it should follow its schedule": "当前的学习率；理想趋势：按调度策略变化",
    "Speed of the last step; it should be stable": "最近一步的速度；理想趋势：稳定",
    "Training": "训练",
    "Evaluation": "评估",
    "Compare": "对比",
    "Checkpoints": "检查点",
    "Samples": "样本",
    "Health": "健康检查",
    "Log": "训练日志",
    "Other charts": "其他图表",
    "Smoothing": "平滑",
    "log": "对数",
    "The log scale needs positive values": "对数刻度要求所有值为正",
    "x-axis": "横轴",
    "tokens in the loss": "计入损失的词元",
    "minutes": "分钟",
    "Download CSV": "下载 CSV",
    "Dark": "深色",
    "Nothing yet": "暂无数据",
    "attempt {}": "第 {} 次启动",
    "schedule": "调度",
    "Search": "搜索",
    "Search the log": "搜索日志",
    "Filter runs": "筛选任务",
    "Compare selected": "对比所选",
    "Select runs to compare them": "勾选任务即可对比",
    "Status": "状态",
    "Stage": "阶段",
    "Recipe": "配方",
    "Step": "步",
    "Loss": "损失",
    "Val loss": "评估损失",
    "Reward": "奖励",
    "Best": "最佳评估",
    "Started": "开始时间",
    "Duration": "用时",
    "Host": "主机",
    "Runs to compare": "要对比的任务",
    "Metrics": "指标",
    "Configuration": "配置",
    "Keys that differ": "不同的配置项",
    "The configurations are the same": "配置相同",
    "Latest values": "最新值",
    "Metric": "指标",
    "best": "最佳",
    "Rates": "比率",
    "Fraction of the answers by the result of their tests; all parts add up to 1": "按测试结果划分的答案比例，总和为 1",
    "shaded: 95 % confidence interval": "阴影：95 % 置信区间",
    "train": "训练",
    "validation": "验证",
    "step": "步",
    "no unit": "无单位",
    "token": "词元",
    "nat/token": "nat/词元",
    "sample/s": "样本/秒",
    "token/s": "词元/秒",
    "problem/s": "题/秒",
    "configuration/s": "配置/秒",
    "s": "秒",
    "ms": "毫秒",
    "byte": "字节",
    "sample": "样本",
    "group": "组",
    "block": "块",
    "expert": "专家",
    "epoch": "轮",
    "problem": "题",
    "answer": "答案",
    "budget": "预算",
    "configuration": "配置",
    "Rates by step": "各步的比率",
    "Error types": "错误类型分布",
    "Flipped problems": "结果翻转的题目",
    "Dataset": "数据集",
    "Model A": "模型 A",
    "Model B": "模型 B",
    "Problem": "题目",
    "A": "A",
    "B": "B",
    "Tests passed": "通过的测试",
    "No problem flipped": "没有结果翻转的题目",
    "Gained": "新增",
    "Lost": "丢失",
    "Both": "都对",
    "Neither": "都错",
    "solved by B only": "仅 B 解出",
    "solved by A only": "仅 A 解出",
    "solved by both": "两者都解出",
    "solved by neither": "两者都未解出",
    "no p-value, because problems have several answers": "每题有多个答案，因此没有 p 值",
    "p of McNemar's exact test": "McNemar 精确检验的 p 值",
    "Not compared, because the protocols of A and B differ": "A 与 B 的评估协议不同，因此不作比较",
    "Select a problem to read both answers": "选择一个题目以查看两个答案",
    "Prompt": "提示",
    "Answer": "答案",
    "Message": "消息",
    "tests passed": "个测试通过",
    "This evaluation has not kept the answer": "该评估没有保留这个答案",
    "Size": "大小",
    "Saved": "保存时间",
    "Kept because": "保留原因",
    "State": "状态",
    "Source": "来源",
    "training": "训练",
    "All steps": "所有步",
    "Only the newest samples of the file are shown": "仅显示文件中最新的样本",
    "Select a sample to read it": "选择一个样本以查看",
    "Rules": "规则",
    "notice": "提示",
    "warning": "警告",
    "alarm": "报警",
    "Rows per page": "每页行数",
    "Time": "时间",
    "Kind": "类型",
    "Text": "内容",
}


def translate(language: str, text: str) -> str:
    """Translate a text of the page to `en` or `zh`; text without a translation stays unchanged."""
    return CHINESE.get(text, text) if language == "zh" else text


def format_time(seconds: float) -> str:
    """Format a time in this machine's time zone; a number that is not a time stays a number."""
    try:
        return f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M:%S}"
    except (OverflowError, ValueError, OSError):  # files of a run may contain anything
        return f"{seconds:g}"


def format_seconds(seconds: float) -> str:
    """Format a duration, such as `1:02:05` or `3 d 4:05:06`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    clock = f"{hours}:{minutes:02}:{rest:02}"
    return f"{days} d {clock}" if days else clock


def format_number(value: float | None, scale: float = 1.0) -> str:
    """Format a number with four significant digits; a dash for None."""
    return "-" if value is None else f"{value * scale:.4g}"
