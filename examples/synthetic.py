"""The common part of the synthetic benchmarks of both frameworks: switches, timing and report."""

import statistics
import time

import reporting

CLASSES = 1000
SEQUENCE_LENGTH = 32


def add_arguments(parser, add_shared=reporting.add_arguments):
    """Add the switches of a synthetic benchmark."""
    add_shared(parser, batch_size=32, lr=0.01)
    parser.add_argument("--model", choices=("mlp", "convnet", "lstm"), default="mlp", help="(default: %(default)s)")
    parser.add_argument(
        "--width",
        type=reporting.positive_integer,
        help="features of mlp and lstm (default: 1024, 512), channels of convnet's first stage (32)",
    )
    parser.add_argument(
        "--num-warmup-batches",
        type=reporting.whole_number,
        default=10,
        help="batches before the clock starts (default: %(default)s)",
    )
    parser.add_argument(
        "--num-batches-per-iter",
        type=reporting.positive_integer,
        default=10,
        help="batches a measurement (default: %(default)s)",
    )
    parser.add_argument(
        "--num-iters", type=reporting.positive_integer, default=10, help="measurements (default: %(default)s)"
    )


def default_width(args):
    """Return the requested width, or the model's default."""
    return args.width or {"mlp": 1024, "convnet": 32, "lstm": 512}[args.model]


def describe(traffic, tensors, args):
    """Print a description of the measurement, on rank 0."""
    if args.verbose:
        print(
            f"Model {args.model}, width {args.width}: {traffic.parameters:,} parameters in {tensors} tensors; "
            f"{args.size} ranks, method {reporting.method_shown(args)}"
        )


def measure(step, args):
    """Warm up; return the samples per second of each measurement on this rank. step(n) returns seconds per step."""
    step(args.num_warmup_batches)
    rates = []
    for iteration in range(args.num_iters):
        rates.append(args.batch_size / step(args.num_batches_per_iter))
        if args.verbose:
            print(f"Iteration {iteration + 1}: {rates[-1]:.1f} samples/s per rank")
    return rates


def report(example, step, traffic, sum_over_ranks, args):
    """Measure, and print the rates and the JSON line on rank 0."""
    start = time.perf_counter()
    rates = measure(step, args)
    seconds = time.perf_counter() - start
    mean = statistics.fmean(rates)
    spread = 1.96 * statistics.pstdev(rates)  # of single measurements, as in Horovod's benchmarks; not of the mean
    total = sum_over_ranks([mean], "samples_per_second")[0]
    if args.rank != 0:
        return
    if args.verbose:
        sent = traffic.stats()["step"]
        print(f"Samples/s per rank: {mean:.1f}, single measurements +-{spread:.1f}\nSamples/s in total: {total:.1f}")
        print(
            f"Gradients a step and rank: {sent['dense_bytes']:,} bytes as float32, "
            f"{sent['payload_bytes']:,} sent (ratio {sent['ratio']:.1f}, density {sent['density']:.2g})"
        )
    reporting.print_json(
        example,
        args,
        traffic,
        model=args.model,
        width=args.width,
        samples_per_second_per_rank=mean,
        samples_per_second_spread=spread,
        samples_per_second=total,
        seconds=seconds,
    )
