"""The planted faults of the kernels: (name, file of csrc/cuda, old, new, native test), see scripts/mutations.py.

The tests run the kernels on the host, so that no GPU is needed.
"""

CUDA = [
    (
        "few equal values: one too many",
        "radix_select.cuh",
        "below < state->tie.rank && state->tie.rank <= reaching",
        "below <= state->tie.rank && state->tie.rank < reaching",
        "kernel_select",
    ),
    (
        "many equal values: one digit left out",
        "radix_select.cuh",
        "Digit digit = Highest(kTieBits); digit.bits > 0;",
        "Digit digit = Highest(kTieBits); digit.shift > 0;",
        "kernel_select",
    ),
    (
        "a value that is sorted with its index loses its sign",
        "gather.cuh",
        "signed_key >> 63 << (8 * sizeof(T) - 1)",
        "signed_key >> 63 << (8 * sizeof(T) - 2)",
        "kernel_select",
    ),
    (
        "a search together stops early",
        "warp.cuh",
        "? at(below) : high;",
        "? at(below > 0 ? below - 1 : 0) : high;",
        "kernel_payload",
    ),
    (
        "no block of elements is full",
        "pack.cu",
        "is_full[warp] = below - before == kBlock;",
        "is_full[warp] = below - before > kBlock;",
        "kernel_payload",
    ),
    (
        "the checksum counts itself",
        "checksum.cuh",
        "if (begin + 8 * p == kChecksumAt)",
        "if (begin + 8 * p > kChecksumAt && begin + 8 * p < kChecksumAt)",
        "kernel_payload",
    ),
    (
        "a span of sums ends too early",
        "reduce.cu",
        "span + (is_end ? 1 : 0)];",
        "span];",
        "kernel_payload",
    ),
    (
        "a damaged payload is added",
        "reduce.cu",
        "ForOutputs(share, [](float* out) { *out = BitsToFloat(0x7fc00000u); });",
        "ForOutputs(share, [](float*) {});",
        "kernel_payload",
    ),
    (
        "the blocks of several tensors are left out of the workspace's size",
        "batch.h",
        "if (batch.count == 1) return BatchOf(batch.one, sizes[0]);",
        "if (batch.many == nullptr) return BatchOf(batch.one, sizes[0]);",
        "kernel_bucket",
    ),
]
