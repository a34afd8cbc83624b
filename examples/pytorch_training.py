"""Share what every PyTorch example does with Horovod: optimizer and compression, learning rate, sums over ranks.

The baselines (`none`, `fp16`) use Horovod's own compressors and run without the plugin.
"""

import horovod.torch as hvd
import reporting
import torch


def start(parser):
    """Parse the command line, start Horovod, choose the device."""
    args = reporting.parse_arguments(parser, hvd)
    if args.device is None:
        args.device = "cuda" if torch.cuda.is_available() and hvd.cuda_built() else "cpu"
    if args.device == "cuda":
        torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
    torch.manual_seed(args.seed)
    return args


def add_arguments(parser, **defaults):
    """Add the switches that all PyTorch examples share."""
    reporting.add_arguments(parser, **defaults)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="(default: cuda where Horovod was built for it)")


def make_compression(model, args, warmup_steps):
    """Make the compressor that the arguments ask for; a single process needs none."""
    method = args.method if args.size > 1 or args.method in reporting.DENSE_METHODS else "none"
    settings = reporting.compression_settings(args, warmup_steps)
    compression = reporting.choose_compression(hvd, "hvd_sparse.torch", method, model.named_parameters(), settings)
    if args.tensorboard and args.rank == 0 and reporting.compresses(args):
        from torch.utils.tensorboard import SummaryWriter

        compression.log_to(SummaryWriter(args.tensorboard))
    return compression


def make_optimizer(model, args, warmup_steps):
    """Return Horovod's distributed SGD and its compressor, after broadcasting the parameters of rank 0."""
    compression = make_compression(model, args, warmup_steps)
    if reporting.compresses_momentum(args):
        optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    else:
        optimizer = torch.optim.SGD(
            model.parameters(),
            lr=args.lr,
            momentum=args.momentum,
            nesterov=args.nesterov,
            weight_decay=args.weight_decay,
        )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    return hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=compression), compression


def count_parameters(model):
    """Return the number of elements of all parameters."""
    return sum(p.numel() for p in model.parameters())


def apply_gradients(model, optimizer, args):
    """Step the optimizer; clip the averaged gradient first unless the compressor clips."""
    if not args.clip_norm or reporting.compresses_momentum(args):
        optimizer.step()
    else:
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip_norm)
        with optimizer.skip_synchronize():
            optimizer.step()


def set_learning_rate(optimizer, peak, step, steps, warmup_steps):
    """Set the rate of this step."""
    for group in optimizer.param_groups:
        group["lr"] = reporting.learning_rate(peak, step, steps, warmup_steps)


def sum_over_ranks(values, name):
    """Sum a list of numbers over all ranks; every rank gets the same floats."""
    return hvd.allreduce(torch.tensor(values, dtype=torch.float64), name=name, op=hvd.Sum).tolist()
