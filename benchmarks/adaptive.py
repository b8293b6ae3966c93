"""What each knob of a budget controller saves: milliseconds and FLOPs, compared with the released model, in one run.

Each knob is turned alone, starting from the full model. Every round runs each configuration once, in reverse order in
every other round; results are medians over the rounds. torch counts the FLOPs. A run encodes one image, prefills the
prompt, and decodes `--new-tokens` tokens. Without `--model`, a model with random weights is created: a Qwen3-VL of 8
blocks with 16 experts each, 8 of them per token. The last line is the time of a controller's decision, without the
encoding at the lowest tier, which is its input.
"""

from __future__ import annotations

from benchmarks.harness import Results, bench_parser, write_results
from verl_ext.cli import FAILURES, IntArg, clean_exit
from verl_ext.console import print_line

EXIT_CODES = {"0": "every cheaper setting is faster", "1": "one is not", **FAILURES}


def not_falling(rows: list[Results]) -> list[str]:
    """The settings (knob and value) that are cheaper than the previous one but not faster."""
    pairs = [(a, b) for a, b in zip(rows, rows[1:]) if a["knob"] == b["knob"]]
    return [f"{b['knob']} {b['value']}" for a, b in pairs if b["total_ms"] >= a["total_ms"]]


def table_of(rows: list[Results]) -> str:
    """The rows as text, with the range of the total."""
    head = f"{'knob':<8}{'value':>12}{'vision':>9}{'prefill':>9}{'decode':>9}"
    head += f"{'total ms':>10}{'range':>18}{'GFLOP':>9}{'ms':>7}{'FLOPs':>7}"
    lines = [
        f"{row['knob']:<8}{row['value']:>12}{row['vision_ms']:>9.2f}{row['prefill_ms']:>9.2f}{row['decode_ms']:>9.2f}"
        f"{row['total_ms']:>10.2f}{'{:.1f} to {:.1f}'.format(*row['total_ms_range']):>18}{row['gflops']:>9.3f}"
        f"{row['ms_ratio']:>7.2f}{row['flops_ratio']:>7.2f}"
        for row in rows
    ]
    return "\n".join([head, *lines])


@clean_exit()
def main() -> int:
    """Measure, print and write the results."""
    more = "--model DIR --tier-sizes 65536 262144 --topk-choices 2 4 8 --output FILE.json"
    parser = bench_parser("adaptive", __doc__, "", more, exit_codes=EXIT_CODES)
    parser.add_argument("--model", metavar="DIR", help="directory or Hub name (default: a random model)")
    parser.add_argument(
        "--tier-sizes", type=IntArg(), nargs="+", default=[2304, 9216, 20736], help="sizes of the tiers, in pixels"
    )
    parser.add_argument("--topk-choices", type=IntArg(), nargs="*", default=[1, 2, 4, 8], help="numbers of experts")
    parser.add_argument("--rounds", type=IntArg(), default=15, help="runs of each configuration; results are medians")
    parser.add_argument("--new-tokens", type=IntArg(), default=8, help="tokens to decode in each run")
    arguments = parser.parse_args()
    from benchmarks.adaptive_knobs import measure  # here, because torch takes seconds to import

    settings = arguments.tier_sizes, arguments.topk_choices, arguments.new_tokens, arguments.rounds
    results = measure(arguments.model, *settings)
    rows, deciding = results["rows"], results["deciding_ms"]
    print_line(table_of(rows))
    print_line(f"deciding {deciding:.2f} ms, {100 * deciding / rows[0]['total_ms']:.2f}% of the released model's time")
    write_results(results, arguments.output)
    if wrong := not_falling(rows):
        print_line(f"latency does not fall at: {', '.join(wrong)}")
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
